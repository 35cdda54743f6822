"""`KVManager`: the table of requests' KV. `DiffusionKVManager`: receives and holds it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from omni_kvlink import KVPayload
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_source import KVSource, ReceivedKV
from omni_kvlink.engine.kv.kv_state import COUNTERS, NEXT_STATES, KVEntry, KVState
from omni_kvlink.errors import CapacityError, ClosedError, TransferTimeout, format_seconds
from omni_kvlink.lowlevel import BackgroundGet

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink import KVConsumer
    from omni_kvlink.engine.request import OmniDiffusionRequest

_RECONNECT = 0.2  # seconds that a receive may take to reconnect to a producer that went away


E = TypeVar("E", bound=KVEntry)


class KVManager(ABC, Generic[E]):
    """The KV of requests, as a scheduler sees it; thread-safe, and no method here blocks.

    A thread of its own receives, and enforces deadlines. Subclasses say how a KV is received.
    """

    def __init__(self, config: KVConfig):
        self.config = config
        self._changed = threading.Condition()
        self._reserved: dict[str, int] = {}  # bytes of each request, at most `kv.budget` together
        self._entries: dict[str, E] = {}
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        self._counts = {"received": 0, "failed": 0, "freed": 0, "nbytes": 0}
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._receiver.start()

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, whenever a receive has ended; no lock is held then."""
        self._listeners.append(callback)

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        """Whether the budget has room for a request's KV now."""
        with self._changed:
            return sum(self._reserved.values()) + self._size(request) <= self.config.budget

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Reserve `kv_nbytes` for a request's KV, or `kv.reserve` if it is None.

        Raises CapacityError if the budget has no room.
        """
        key = request.request_id
        timeout = self.config.timeout if request.kv_timeout is None else request.kv_timeout
        with self._changed:
            self._check_open()
            if key in self._entries:
                raise EngineError(f"request {key!r} holds KV already: free it first")
            self._reserve(key, self._size(request))
            self._entries[key] = self._make_entry(request, timeout)

    @abstractmethod
    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Begin to receive the KV of a request that has a reservation, and return."""

    def state(self, request_id: str) -> KVState:
        """The state of a request's KV."""
        entry = self._entries.get(request_id)
        return KVState.ABSENT if entry is None else entry.state

    def error(self, request_id: str) -> Exception | None:
        """The error of a request's receive; None if it has not failed."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.error

    def nbytes(self, request_id: str) -> int:
        """Bytes reserved for a request's KV; its actual size once it has come."""
        return self._reserved.get(request_id, 0)

    def free(self, request: OmniDiffusionRequest | E) -> None:
        """Release a request's KV and its reservation, in any state; idempotent."""
        with self._changed:
            entry = self._entries.pop(request.request_id, None)
            if entry is None:
                return
            self._reserved.pop(request.request_id, None)
            state, error = entry.state, entry.error or ClosedError("the request has ended")
            self._move(entry, KVState.ABSENT, error=error)
        self._release(entry, state)

    def stats(self) -> dict[str, Any]:
        """Bytes and entries held, and counters, as JSON values."""
        with self._changed:
            states = [entry.state for entry in self._entries.values()]
            return {
                "budget": self.config.budget,
                "charged": sum(self._reserved.values()),
                "held": {state.value: states.count(state) for state in KVState},
                **self._counts,
            }

    def close(self) -> None:
        """Release everything; idempotent."""
        with self._changed:
            self._closed = True
        for entry in list(self._entries.values()):
            self.free(entry)
        self._submit(lambda: None)  # wakes the thread, which runs no more jobs
        if threading.current_thread() is not self._receiver:
            self._receiver.join()

    @abstractmethod
    def _make_entry(self, request: OmniDiffusionRequest, timeout: float) -> E:
        """The entry of a request whose bytes are reserved; the lock is held."""

    @abstractmethod
    def _expire(self, entry: E) -> Exception:
        """Stop a receive whose deadline has passed, and return its error."""

    @abstractmethod
    def _release(self, entry: E, state: KVState) -> None:
        """Release what a request held in this state, which it has left."""

    def _begin(self, request_id: str, **fields: Any) -> E:
        """A request's KV is being received; raises EngineError if it is not allocated."""
        with self._changed:
            entry, started = self._entry(request_id), time.monotonic()
            fields |= {"started": started, "deadline": started + entry.timeout}
            if not self._move(entry, KVState.RECEIVING, **fields):
                raise EngineError(f"the KV of {request_id!r} is {entry.state.value} already")
            return entry

    def _fail(self, entry: E, error: Exception) -> bool:
        """A receive has failed; False if it has ended already."""
        failed = self._move(entry, KVState.FAILED, error=error)
        self._notify()
        return failed

    def _charge(self, entry: E, nbytes: int) -> None:
        """The actual size of a KV; raises CapacityError if it does not fit into the budget."""
        with self._changed:
            if entry.state is KVState.RECEIVING:
                self._reserve(entry.request_id, nbytes)

    def _reserve(self, request_id: str, nbytes: int) -> None:
        """Reserve bytes, in place of those that a request has; the lock is held."""
        others = sum(self._reserved.values()) - self.nbytes(request_id)
        if nbytes > (free := self.config.budget - others):
            text = f"the KV of {request_id!r} takes {nbytes} bytes, {free} of the budget of "
            text += f"{self.config.budget} are free: raise kv.budget"
            raise CapacityError(text, requested=nbytes, free=free)
        self._reserved[request_id] = nbytes

    def _size(self, request: OmniDiffusionRequest) -> int:
        default = self.config.reserve or self.config.budget // 8
        return default if request.kv_nbytes is None else request.kv_nbytes

    def _move(self, entry: E, state: KVState, **fields: Any) -> bool:
        """Change an entry's fields and state; False, and no change, if `NEXT_STATES` forbids it."""
        with self._changed:
            if state not in NEXT_STATES[entry.state]:
                return False
            vars(entry).update({"deadline": math.inf, **fields})
            entry.state = state
            if state in COUNTERS:
                self._counts[COUNTERS[state]] += 1
            if state is KVState.READY:
                self._counts["nbytes"] += self.nbytes(entry.request_id)
            self._changed.notify_all()
            return True

    def _submit(self, call: Callable[..., Any], *args: Any) -> None:
        """Run a job in the receiver's thread, after those submitted before."""
        self._jobs.put(partial(call, *args))

    def _run(self) -> None:
        """Run jobs in order, and enforce deadlines; no job may raise."""
        while not self._closed:
            with self._changed:
                entries = list(self._entries.values())
            limit = min((entry.deadline for entry in entries), default=math.inf) - time.monotonic()
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=max(0.0, min(limit, threading.TIMEOUT_MAX)))
                if not self._closed:
                    job()
            for entry in entries:
                is_late = entry.deadline <= time.monotonic()
                if is_late and entry.state is KVState.RECEIVING and not self._closed:
                    self._fail(entry, self._expire(entry))

    def _notify(self) -> None:
        for callback in self._listeners:
            callback()

    def _entry(self, request_id: str) -> E:
        self._check_open()
        if request_id not in self._entries:
            text = f"the KV of {request_id!r} is absent: no memory is reserved; allocate it first"
            raise EngineError(text)
        return self._entries[request_id]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the KV manager is closed")


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
