"""`OmniKVLinkConnector`: vLLM-Omni's connector interface over links of this library."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from omni_kvlink.connectors.base import Receipt
from omni_kvlink.connectors.registry import backend
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
from omni_kvlink.link import Received

try:
    from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
except ImportError as error:
    raise UnavailableError(
        f"vLLM-Omni cannot be imported: {error}; with its vLLM there, "
        "`pip install --no-deps vllm-omni` installs it"
    ) from error

NAME = "OmniKVLinkConnector"
FIND = 0.25
"""Seconds to find a sender, at least: a poll's millisecond would never suffice."""

_registered: set[str] = set()


class OmniKVLinkConnector(OmniConnectorBase):  # type: ignore[misc, unused-ignore]
    """Stage payloads over shm, ZMQ or UCX; thread-safe, for both ends of any number of edges.

    A payload that does not come in time is None, as vLLM-Omni wants it. Every other failure is
    raised: its manager and its loops log it and give the request up, instead of waiting.

    Args:
        config: what stands in `extra`; ours is `config["kvlink"]`, see `OmniSettings`.

    Raises:
        ValueError: a setting is unknown, or cannot be.
        UnavailableError: the transport cannot run here; names the cure.
    """

    supports_raw_data = True
    _end: weakref.finalize[..., OmniKVLinkConnector] | None = None
    """None until `__init__` is through: `__del__` closes half-built objects, too."""

    def __init__(self, config: Mapping[str, Any]):
        self.settings = OmniSettings.of(config)
        backend(self.settings.transport)
        self._links, self._asking = Links(self.settings), PendingGets()
        self._receipts: dict[tuple[str, str, str], Receipt] = {}
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(
            ("puts", "gets", "bytes_transferred", "timeouts", "failures"), 0
        )
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _close, self._pid, self._asking, self._links)

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Publish a payload; it is committed, and `data` the caller's again, on return.

        Args:
            data: a KV cache as the manager makes it (packed bytes, a packed uint8 tensor, a dict),
                or what vLLM-Omni's serializer takes.

        Returns:
            True, the bytes sent, and where.

        Raises:
            SchemaError: the cache is not complete, or `data` cannot be sent.
            DuplicateKeyError, CapacityError, BusyError, ClosedError
        """
        self._check_open()
        self.reap_consumed()
        place = StageEdge.of(from_stage, to_stage, put_key)
        with self._counting():
            link = self._links.sender(place)
            try:
                payload, nbytes = payload_of(put_key, data, self.serialize_obj)
                receipt = link.put(
                    payload,
                    readers=int(self.settings.readers),
                    ttl=self.settings.ttl,
                    timeout=self.settings.put_timeout,
                )
            except (DuplicateKeyError, ClosedError):
                raise
            except Exception as error:
                link.fail(put_key, str(error) or repr(error))  # nobody shall wait in vain
                raise
        with self._lock:
            self._receipts[from_stage, to_stage, put_key] = receipt
        self._count(puts=1, bytes_transferred=nbytes)
        return True, nbytes, {"link": link.url, "size": nbytes}

    def get(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
    ) -> tuple[Any, int] | None:
        """Wait for a payload, `settings.wait` seconds for a KV cache, `settings.poll` for others.

        Args:
            metadata: not needed; the sender is found by its name.

        Returns:
            What was put and its bytes; a packed cache is a `Buffer`, to be released. None if it has
            not come yet.

        Raises:
            TransferFailed: the sender could not send it, or took it back.
            PeerLostError: the sender is gone.
            IntegrityError, WireError, ClosedError
        """
        place = StageEdge.of(from_stage, to_stage, get_key)
        wait = self.settings.wait if place.is_cache else self.settings.poll
        return self._get(place, get_key, time.monotonic() + wait, find=max(wait, FIND))

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As `get`, until `deadline` on `time.monotonic`'s clock."""
        place = StageEdge.of(from_stage, to_stage, get_key)
        return self._get(place, get_key, deadline, find=max(0.0, deadline - time.monotonic()))

    def abandon_get(self, get_key: str) -> None:
        """Nobody waits for this key any more; what comes goes to another reader, or expires."""
        if not self._closed:
            self._asking.drop(get_key)

    def cleanup(self, request_id: str) -> None:
        """Take back what was put under exactly this key and not read, and ask for it no more."""
        if self._closed:
            return
        self._asking.drop(request_id)
        with self._lock:
            spots = [spot for spot in self._receipts if spot[2] == request_id]
            found = [(spot, self._receipts.pop(spot)) for spot in spots]
        for spot, receipt in found:
            if not receipt.done:
                self._links.sender(StageEdge.of(*spot)).abort(
                    request_id, "cleaned up by the engine"
                )

    def reap_consumed(self) -> None:
        """Forget what every reader has let go of; its memory is free already."""
        if self._closed:
            return
        self._asking.sweep()
        with self._lock:
            for spot in [spot for spot, receipt in self._receipts.items() if receipt.done]:
                del self._receipts[spot]

    def health(self) -> dict[str, Any]:
        """State, counters and links, as JSON values."""
        if self._closed:
            return {"status": "closed"}
        self.reap_consumed()
        with self._lock:
            counters, unread = dict(self._counters), len(self._receipts)
        state = {"status": "healthy", "transport": self.settings.transport, **counters}
        return {**state, "unread": unread, "links": self._links.stats()}

    def close(self) -> None:
        """Free what can be freed; payloads not read yet are lost. A second call does nothing."""
        if self._end is not None:
            self._end()

    @property
    def _closed(self) -> bool:
        return self._end is None or not self._end.alive

    def _get(
        self, place: StageEdge, key: str, deadline: float, *, find: float
    ) -> tuple[Any, int] | None:
        """Find the sender within `find` seconds, and have the payload until the deadline."""
        self._check_open()
        with self._counting():
            try:
                received = self._receive(place, key, deadline, find)
            except TransferTimeout:
                self._count(timeouts=1)
                return None
            try:
                result = object_of(received, self.deserialize_obj, self.settings.verify)
            except BaseException:
                received.release()
                raise
        self._count(gets=1, bytes_transferred=result[1])
        return result

    def _receive(self, place: StageEdge, key: str, deadline: float, find: float) -> Received:
        link = self._links.receiver(place, timeout=find)
        left = max(0.0, deadline - time.monotonic())
        try:
            if place.is_cache:
                return link.get(key, timeout=left)
            return self._asking.get(link, place, key, timeout=left)
        except PeerLostError:
            self._links.forget(place, link)
            raise

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._count(failures=1)
            raise

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counters[name] += number

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the connector is closed")
        if self._pid != os.getpid():
            raise ClosedError("the connector belongs to the process that made it")


def _close(pid: int, asking: PendingGets, links: Links) -> None:
    """Also when the process ends; in a forked child nothing: the links are its parent's."""
    if pid == os.getpid():
        asking.close()
        links.close()


def register_connector() -> None:
    """What `register` does, once vLLM-Omni can be imported."""
    if NAME not in _registered:
        OmniConnectorFactory.register_connector(NAME, OmniKVLinkConnector)
        _registered.add(NAME)
