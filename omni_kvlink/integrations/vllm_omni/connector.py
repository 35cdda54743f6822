"""`VllmOmniConnector`: vLLM-Omni's connector interface over links of this library."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import (
    ClosedError,
    DuplicateKeyError,
    PeerLostError,
    TransferTimeout,
    UnavailableError,
)
from omni_kvlink.integrations.vllm_omni.links import Links
from omni_kvlink.integrations.vllm_omni.payloads import object_of, payload_of
from omni_kvlink.integrations.vllm_omni.pending_gets import PendingGets
from omni_kvlink.integrations.vllm_omni.settings import OmniSettings
from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge
from omni_kvlink.lowlevel import backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omni_kvlink import KVConsumer, Receipt, Received

try:
    from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
    from vllm_omni.distributed.omni_connectors.factory import (
        OmniConnectorFactory as OmniConnectorFactory,
    )
    from vllm_omni.distributed.omni_connectors.utils.kv_utils import get_omni_replica_id

    from omni_kvlink.integrations.vllm_omni.omni_serializer import OmniTensorSerializer
    from omni_kvlink.integrations.vllm_omni.replicas import REPLICA_KEY, Replicas
except ImportError as error:
    raise UnavailableError(
        f"vLLM-Omni cannot be imported: {error}; with its vLLM there, "
        "`pip install --no-deps vllm-omni` installs it"
    ) from error

_connectors: weakref.WeakSet[VllmOmniConnector] = weakref.WeakSet()

MIN_CONNECT_SECONDS = 0.25
"""The least time to connect to a sender; the wait of a poll, 1 ms, is too short for it."""


class VllmOmniConnector(OmniConnectorBase):  # type: ignore[misc, unused-ignore]
    """Sends stage payloads over shm, ZMQ or UCX; thread-safe; serves any number of stage edges.

    `get` returns None if the payload has not arrived in time, as vLLM-Omni's interface requires.
    Every other failure raises: vLLM-Omni's manager logs it and fails the request.

    `config` and `stage_id` are read by vLLM-Omni: its chunk adapter makes keys of the stage's
    number, and the functions that build its chunks find their own settings in `config`.

    Args:
        config: the connector's `extra`; `config["kvlink"]` holds the fields of `OmniSettings`.

    Raises:
        ValueError: a setting is unknown or has an invalid value.
        UnavailableError: the transport cannot run here; the error names the cure.
    """

    supports_raw_data = True
    _is_open = False
    """Until `__init__` returns: incomplete objects are closed and freed, too."""

    def __init__(self, config: Mapping[str, Any]):
        self.settings = OmniSettings.of(config)
        self.config, self.stage_id = dict(config), config.get("stage_id", -1)
        backend(self.settings.transport)
        self._serializer, self._replica = OmniTensorSerializer(), get_omni_replica_id()
        self._links, self._pending = Links(self.settings), PendingGets()
        self._replicas = Replicas(self.settings, self.config)
        self._receipts: dict[tuple[str, str, str], Receipt] = {}
        self._lock = threading.Lock()
        self._counters = Counter(puts=0, gets=0, bytes_transferred=0, timeouts=0, failures=0)
        self._pid = os.getpid()
        self._is_open = True
        _connectors.add(self)

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Commit a payload; `data` may be modified when the call returns.

        `data` is a KV cache as the manager makes it (packed bytes, a packed uint8 tensor or a
        dict), or anything that vLLM-Omni's serializer takes; large tensors in it are copied once.
        Returns True, the payload's size in bytes, and what `get` may take as `metadata`: the
        link's URL, the size and the number of this replica of the stage.

        Raises:
            SchemaError: the cache is incomplete, or `data` cannot be serialized.
            DuplicateKeyError: a live payload has this key.
            CapacityError: the link has no memory for it within `put_timeout` seconds.
            BusyError: another process serves this edge.
            UnavailableError: a further replica of a stage, for which `addresses` has no place.
            ClosedError: the connector is closed.
        """
        self._check_open()
        self.reap_consumed()
        edge = self._sent_edge(from_stage, to_stage, put_key)
        with self._counting():
            link = self._links.sender(edge)
            try:
                payload, nbytes = payload_of(put_key, data, self._serializer)
                readers, ttl = int(self.settings.readers), self.settings.ttl
                receipt = link.put(
                    payload, readers=readers, ttl=ttl, timeout=self.settings.put_timeout
                )
            except (DuplicateKeyError, ClosedError):
                raise
            except Exception as error:
                link.fail(put_key, str(error) or repr(error))  # a waiting receiver raises at once
                raise
        with self._lock:
            self._receipts[from_stage, to_stage, put_key] = receipt
        self._count(puts=1, bytes_transferred=nbytes)
        return True, nbytes, {"link": link.url, "size": nbytes, REPLICA_KEY: edge.replica}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Wait for a payload: `settings.wait` seconds for a KV cache, `settings.poll` for others.

        The others share `settings.poll`: vLLM-Omni polls those of all its requests in turn.
        Returns the data and its size in bytes, or None if it has not arrived yet. A packed cache
        is a `Buffer`, which the caller releases. The sender is found by its edge's name; of several
        replicas, `metadata` may name one. Without, each that is served is asked.

        Raises:
            TransferFailed: the sender failed or aborted it.
            PeerLostError: the sender is gone.
            IntegrityError: the bytes differ from the committed ones.
            WireError: no vLLM-Omni connector sent it.
            ClosedError: the connector is closed.
        """
        edge = StageEdge.of(from_stage, to_stage, get_key)
        poll = self._pending.share(self.settings.poll)
        wait = self.settings.wait if edge.is_cache else poll
        deadline = time.monotonic() + wait
        find = max(wait, MIN_CONNECT_SECONDS)
        return self._get(edge, get_key, deadline, find=find, metadata=metadata)

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """Do the same as `get`, until `deadline` on the clock of `time.monotonic`."""
        edge = StageEdge.of(from_stage, to_stage, get_key)
        find = max(0.0, deadline - time.monotonic())
        return self._get(edge, get_key, deadline, find=find, metadata=metadata)

    def abandon_get(self, get_key: str) -> None:
        """Cancel a pending get; the payload goes to another receiver or expires."""
        if self._is_open:
            self._pending.cancel(lambda edge, key: key == get_key)

    def cleanup(self, request_id: str) -> None:
        """Abort the unread caches and chunks of a request, and cancel pending gets of them.

        A key instead of a request's id names this payload alone.
        """
        if not self._is_open:
            return

        def is_named(edge: StageEdge, key: str) -> bool:
            return request_id in (key, edge.request_of(key))

        self._pending.cancel(is_named)
        self._replicas.forget(request_id)
        with self._lock:
            entries = [
                entry for entry in self._receipts if is_named(StageEdge.of(*entry), entry[2])
            ]
            receipts = [(entry, self._receipts.pop(entry)) for entry in entries]
        for entry, receipt in receipts:
            if not receipt.done:
                link = self._links.sender(self._sent_edge(*entry))
                link.abort(entry[2], "cleaned up by the engine")

    def reap_consumed(self) -> None:
        """Drop the receipts of payloads that every receiver has released."""
        if not self._is_open:
            return
        self._pending.cancel_stale()
        with self._lock:
            for entry in [entry for entry, receipt in self._receipts.items() if receipt.done]:
                del self._receipts[entry]

    def health(self) -> dict[str, Any]:
        """The connector's state, counters and links, as JSON values."""
        if not self._is_open:
            return {"status": "closed"}
        self.reap_consumed()
        with self._lock:
            counters, unread = dict(self._counters), len(self._receipts)
        state = {"status": "healthy", "transport": self.settings.transport, **counters}
        return {**state, "unread": unread, "links": self._links.stats()}

    def close(self) -> None:
        """Close all links; unread payloads are lost. A second call does nothing."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            _close(self._pid, self._pending, self._links)

    def __del__(self) -> None:
        """Close the links in another thread: this one may hold any lock."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            _thread.start_new_thread(_close, (self._pid, self._pending, self._links))

    def _get(
        self,
        edge: StageEdge,
        key: str,
        deadline: float,
        *,
        find: float,
        metadata: Mapping[str, Any] | None,
    ) -> tuple[Any, int] | None:
        """Connect within `find` seconds, and wait for the payload until the deadline."""
        self._check_open()
        with self._counting():
            try:
                received = self._receive(edge, key, deadline, find, metadata)
            except TransferTimeout:
                self._count(timeouts=1)
                return None
            result = object_of(received, self._serializer, self.settings.verify)
        self._count(gets=1, bytes_transferred=result[1])
        return result

    def _receive(
        self,
        edge: StageEdge,
        key: str,
        deadline: float,
        find: float,
        metadata: Mapping[str, Any] | None,
    ) -> Received:
        """Wait for a payload that one of the sender's replicas has."""
        links = self._links_to(self._replicas.edges(edge, key, metadata), find)
        sender = self._replicas.likely(edge, metadata)

        def lost(replica: StageEdge, link: KVConsumer, error: PeerLostError) -> None:
            self._links.close_receiver(replica, link)
            if replica == sender:
                raise error

        seconds = max(0.0, deadline - time.monotonic())
        if edge.is_cache and len(links) == 1:
            [(replica, link)] = links.items()
            try:
                return link.get(key, timeout=seconds)
            except PeerLostError as error:
                lost(replica, link, error)
                raise
        source, received = self._pending.get(links, edge, key, timeout=seconds, lost=lost)
        if len(links) > 1:
            self._replicas.remember(source, key)
        return received

    def _links_to(self, edges: list[StageEdge], find: float) -> dict[StageEdge, KVConsumer]:
        """The links to these replicas; of several, to those that are there now.

        Raises:
            TransferTimeout: there is none.
        """
        if len(edges) == 1:
            return {edges[0]: self._links.receiver(edges[0], timeout=find)}
        links = {}
        for edge in edges:
            with contextlib.suppress(TransferTimeout):  # it has ended meanwhile
                links[edge] = self._links.receiver(edge, timeout=MIN_CONNECT_SECONDS)
        if not links:
            raise TransferTimeout("no replica of the sender is served", phase="connecting")
        return links

    def _sent_edge(self, from_stage: str, to_stage: str, key: str) -> StageEdge:
        """The edge of this replica of the sending stage."""
        return StageEdge.of(from_stage, to_stage, key)._replace(replica=self._replica)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._count(failures=1)
            raise

    def _count(self, **increments: int) -> None:
        with self._lock:
            self._counters.update(increments)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the connector is closed")
        if self._pid != os.getpid():
            raise ClosedError(
                "the connector belongs to the process that created it; create one in this process"
            )


def _close(pid: int, pending: PendingGets, links: Links) -> None:
    """Close the links; in a forked child do nothing: the parent owns the links."""
    if pid == os.getpid():
        pending.cancel()
        links.close()


@atexit.register
def _close_all() -> None:
    for connector in list(_connectors):
        connector.close()
