"""`DiffusionKVManager`: receives and holds the KV of requests that wait or run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import KVPayload
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_source import KVSource, ReceivedKV
from omni_kvlink.engine.kv.kv_table import KVEntry, KVManager, KVState
from omni_kvlink.errors import ClosedError, TransferTimeout, format_seconds
from omni_kvlink.lowlevel import BackgroundGet

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer
    from omni_kvlink.engine.request import OmniDiffusionRequest

_RECONNECT = 0.2  # seconds that a receive may take to reconnect to a producer that went away


@dataclasses.dataclass(eq=False)
class ReceivingEntry(KVEntry):
    """A request's KV that this process receives."""

    source: KVSource | None = None
    get: BackgroundGet | None = None
    is_opened: bool = False  # it has come, and is verified
    data: KVPayload | None = None  # while READY
    received: ReceivedKV | None = None

    def abort(self, reason: str) -> None:
        """Cancel the get, and tell the producer not to keep the KV."""
        if self.get is not None:
            self.get.cancel()
        if self.source is not None:
            with contextlib.suppress(ClosedError):  # a closed link keeps nothing
                self.source.abort(self.request_id, reason)


class DiffusionKVManager(KVManager[ReceivingEntry]):
    """Holds the KV of each request from before it runs until after; thread-safe.

    One thread of its own receives, verifies and enforces deadlines, while the engine's computes. KV
    comes from `connector`, which its owner closes; None to use only `receive_from_connector`. On
    the CPU the tensors stay in the link's memory.
    """

    def __init__(
        self,
        connector: KVConsumer | KVSource | None,
        config: KVConfig | None = None,
        *,
        device: torch.device | str = "cpu",
    ):
        self.connector = None if connector is None else _source(connector)
        self._device = torch.device(device)
        super().__init__(config or KVConfig())

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Begin to receive the KV of a request that has a reservation, and return.

        Raises EngineError if its `kv_sender_info` names others than the stage's sources.
        """
        if self.connector is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        senders, sources = request.kv_sender_info, self.config.sources
        if senders and sources and senders != sources:  # it would never come
            raise EngineError(
                f"the KV of {request.request_id!r} was sent at {', '.join(senders)}, and this "
                f"stage receives from {', '.join(sources)}: restart it with those kv.sources"
            )
        self._get(request.request_id, self.connector)

    def receive_from_connector(
        self,
        connector: KVConsumer | KVSource,
        request: OmniDiffusionRequest,
        *,
        timeout: float | None = None,
    ) -> None:
        """Allocate, if `allocate` was not called, and receive; blocks until every byte is there.

        `timeout` in seconds replaces the request's. After an error the request holds nothing.

        Raises:
            TransferTimeout, TransferFailed, PeerLostError: it did not come.
            IntegrityError, WireError: what came is not what was sent.
            CapacityError: the budget has no room for it.
        """
        if self.state(request.request_id) is KVState.ABSENT:
            self.allocate(request)
        entry = self._entry(request.request_id)
        entry.timeout = entry.timeout if timeout is None else timeout
        try:
            self._get(request.request_id, _source(connector))
            with self._changed:  # the receiver's thread enforces the deadline
                self._changed.wait_for(lambda: entry.state is not KVState.RECEIVING)
            if entry.error is not None:
                raise entry.error
        except BaseException:
            self.free(request)
            raise

    def get_kv_cache(self, request_id: str) -> KVPayload:
        """The KV as it came; never blocks. Raises the error of its receive, or EngineError."""
        entry = self._entries.get(request_id)
        if entry is None:
            text = f"the KV of {request_id!r} is absent: it was freed, or never received"
            raise EngineError(f"{text}; take what is needed of it before `free`")
        if entry.error is not None:
            raise entry.error
        if entry.data is None:
            state = entry.state.value
            raise EngineError(f"the KV of {request_id!r} is {state}: wait until it is ready")
        return entry.data

    def _make_entry(self, request: OmniDiffusionRequest, timeout: float) -> ReceivingEntry:
        return ReceivingEntry(request.request_id, timeout)

    def _get(self, request_id: str, source: KVSource) -> None:
        with self._changed:
            entry = self._begin(request_id, source=source)
            entry.get = BackgroundGet(
                request_id,
                lambda timeout: source.link,
                lambda link, key, timeout: source.begin_get(key, timeout=timeout),
                entry.timeout,
                submit=self._submit,
                copy=partial(self._open, entry, source),
                fail=partial(self._fail, entry),
            )
        self._submit(entry.get.request, min(_RECONNECT, entry.timeout))

    def _release(self, entry: ReceivingEntry, state: KVState) -> None:
        received, entry.received, entry.data = entry.received, None, None
        if state is KVState.RECEIVING and not entry.is_opened:
            entry.abort("the request has ended")
        if received is not None:
            received.release()

    # In the receiver's thread. The KV of an entry that is freed meanwhile is no longer RECEIVING.

    def _open(self, entry: ReceivingEntry, source: KVSource, delivery: Any) -> None:
        """Verify the KV that has come, and put it on the device."""
        with self._changed:
            entry.is_opened, entry.deadline = True, math.inf  # which is not enforced any more
        started = time.perf_counter() - (time.monotonic() - entry.started)
        try:
            received = source.open(delivery, started=started, verify=self.config.verify)
            with contextlib.ExitStack() as unless_held:
                unless_held.callback(received.release)
                unless_held.callback(entry.abort, "its request failed, or has ended")  # first
                self._charge(entry, received.nbytes)
                data = received.to(self._device)
                if self._move(entry, KVState.READY, received=received, data=data):
                    unless_held.pop_all()
        except Exception as error:
            self._fail(entry, error)
        else:
            self._notify()

    def _expire(self, entry: ReceivingEntry) -> TransferTimeout:
        entry.abort("its deadline passed")
        text = f"the KV of {entry.request_id!r} did not come within {format_seconds(entry.timeout)}"
        if entry.source is not None:
            text += entry.source.timeout_hint(entry.request_id)
        is_requested = entry.get is not None and entry.get.is_requested
        phase = "asked for" if is_requested else "connecting"
        return TransferTimeout(text, key=entry.request_id, waited=entry.timeout, phase=phase)


def _source(connector: KVConsumer | KVSource) -> KVSource:
    return connector if isinstance(connector, KVSource) else KVSource(connector)
