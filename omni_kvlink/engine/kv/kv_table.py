"""`KVManager`: the state, the reserved bytes and the deadline of each request's KV."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.errors import CapacityError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.engine.config import KVConfig
    from omni_kvlink.engine.request import OmniDiffusionRequest


class KVState(enum.Enum):
    """The state of a request's KV.

    ABSENT ── allocate ──► ALLOCATED ── prefetch ──► RECEIVING ──┬──► READY
       ▲                       │                         │       └──► FAILED
       └───────── free ────────┴─────────────────────────┴──────────────┘
    """

    ABSENT = "absent"
    ALLOCATED = "allocated"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


_NEXT = {
    KVState.ABSENT: (),
    KVState.ALLOCATED: (KVState.RECEIVING, KVState.ABSENT),
    KVState.RECEIVING: (KVState.READY, KVState.FAILED, KVState.ABSENT),
    KVState.READY: (KVState.ABSENT,),
    KVState.FAILED: (KVState.ABSENT,),
}
_COUNTERS = {KVState.READY: "received", KVState.FAILED: "failed", KVState.ABSENT: "freed"}
"""The counter of the KVs that came into a state."""


@dataclasses.dataclass(eq=False)
class KVEntry:
    """One request's KV; the KV manager's lock guards it."""

    request_id: str
    timeout: float
    started: float = 0.0  # monotonic
    deadline: float = math.inf  # monotonic; infinite unless the KV is awaited
    state: KVState = KVState.ALLOCATED
    error: Exception | None = None  # while FAILED, and of a receive that was freed


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

    def free(self, request: OmniDiffusionRequest) -> None:
        """Release a request's KV and its reservation, in any state; idempotent."""
        self._free(request.request_id)

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
        for request_id in list(self._entries):
            self._free(request_id)
        self._jobs.put(self._on_deadline)  # wakes the thread, which runs no more jobs
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
        """Change an entry's fields and state; False, and no change, if `_NEXT` forbids it."""
        with self._changed:
            if state not in _NEXT[entry.state]:
                return False
            vars(entry).update({"deadline": math.inf, **fields})
            entry.state = state
            if state in _COUNTERS:
                self._counts[_COUNTERS[state]] += 1
            if state is KVState.READY:
                self._counts["nbytes"] += self.nbytes(entry.request_id)
            self._changed.notify_all()
            return True

    def _free(self, request_id: str) -> None:
        with self._changed:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                return
            self._reserved.pop(request_id, None)
            state, error = entry.state, entry.error or ClosedError("the request has ended")
            self._move(entry, KVState.ABSENT, error=error)
        self._release(entry, state)

    def _submit(self, call: Callable[..., Any], *args: Any) -> None:
        """Run a job in the receiver's thread, after those submitted before."""
        self._jobs.put(partial(call, *args))

    def _run(self) -> None:
        """Run jobs in order, and `_on_deadline` in time; none may raise."""
        while not self._closed:
            with self._changed:
                deadline = min((e.deadline for e in self._entries.values()), default=math.inf)
            limit, job = deadline - time.monotonic(), self._on_deadline
            if limit > 0:
                with contextlib.suppress(queue.Empty):
                    job = self._jobs.get(timeout=None if limit == math.inf else limit)
            if not self._closed:
                job()

    def _on_deadline(self) -> None:
        with self._changed:
            now, entries = time.monotonic(), list(self._entries.values())
        for entry in [entry for entry in entries if entry.deadline <= now]:
            if entry.state is KVState.RECEIVING:  # not freed meanwhile
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
