"""`RemoteKVManager`: the KV of requests, while it lies with the workers."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.executor.dp_router import DPRouter
from omni_kvlink.engine.kv.kv_entry import KVState
from omni_kvlink.engine.kv.kv_receiver import KVReceiver
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sched.budget import Budget
from omni_kvlink.errors import CapacityError, TransferTimeout

_GRACE = 0.15
"""Seconds after a deadline, which the workers keep, in which they may say so."""
_STATS = 1.0
"""Seconds that workers have to say what they hold."""


class Caller(Protocol):
    """What this needs of a worker's handle."""

    def call(self, method: str, args: Sequence[Any] = ()) -> Future[Any]: ...


@dataclasses.dataclass(eq=False)
class RemoteKVProxy:
    """One request's KV, at the ranks of its group.

    Attributes:
        request: without its prompt.
        limit: seconds from `started` until it must have come.
        started: on `time.monotonic`'s clock.
        coming: ranks that have not got it yet.
        largest: bytes that a rank has got, at most.
    """

    request: OmniDiffusionRequest
    limit: float
    ranks: list[Caller]
    state: KVState = KVState.ALLOCATED
    error: Exception | None = None
    started: float = 0.0
    coming: int = 0
    largest: int = 0

    @property
    def end(self) -> float:
        """When it has failed although no worker says so."""
        return self.started + self.limit + _GRACE


class RemoteKVManager:
    """Speaks for the `DiffusionKVManager`s of all workers; thread-safe.

    Room is asked for and set aside here; a request's KV is there when all ranks of its group have
    it, and fails with the first that fails. A thread of its own ends what is late although no
    worker says so.

    Args:
        config: budget and timeout.
        groups: gets a request's group when room is set aside for it.
        ranks_of: the workers of a group.
        everyone: all workers.
    """

    def __init__(
        self,
        config: KVConfig,
        groups: DPRouter,
        ranks_of: Callable[[int], Sequence[Caller]],
        everyone: Sequence[Caller],
    ):
        self._config, self._groups = config, groups
        self._ranks_of, self._everyone = ranks_of, everyone
        self._lock = threading.Lock()
        self._budget = Budget(config)
        self._held: dict[str, RemoteKVProxy] = {}
        self._listeners: list[Callable[[], None]] = []
        self._counts = {"received": 0, "failed": 0, "freed": 0, "nbytes": 0}
        self._receiver = KVReceiver(
            "remote-kv", next_deadline=self.next_deadline, on_deadline=self._on_deadline
        )

    def listen(self, callback: Callable[[], None]) -> None:
        self._listeners.append(callback)

    # Room.

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        with self._lock:
            return self._budget.has_room(request)

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Set room aside, and choose the group that paints the request.

        Raises:
            CapacityError: more than what is free; asked and free bytes are its attributes.
            EngineError: the request has room already.
        """
        key = request.request_id
        limit = self._config.timeout if request.kv_timeout is None else request.kv_timeout
        with self._lock:
            if key in self._held:
                raise EngineError(f"request {key!r} holds KV already: free it first")
            self._budget.take(request)
            ranks = list(self._ranks_of(self._groups.choose(key)))
            short = dataclasses.replace(request, prompt="", kv_timeout=limit)
            self._held[key] = RemoteKVProxy(short, limit, ranks)

    # Receiving.

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Let the ranks of the request's group begin to receive, and return.

        Raises:
            EngineError: `allocate` it first; or it was begun before.
        """
        with self._lock:
            held = self._held.get(request.request_id)
            if held is None or held.state is not KVState.ALLOCATED:
                state = KVState.ABSENT if held is None else held.state
                raise EngineError(f"the KV of {request.request_id!r} is {state.value}")
            held.state, held.started = KVState.RECEIVING, time.monotonic()
            held.coming = len(held.ranks)
        self._receiver.submit(self._begin, held)

    def state(self, request_id: str) -> KVState:
        held = self._held.get(request_id)
        return KVState.ABSENT if held is None else held.state

    def error(self, request_id: str) -> Exception | None:
        held = self._held.get(request_id)
        return None if held is None else held.error

    def next_deadline(self) -> float | None:
        with self._lock:
            ends = [one.end for one in self._held.values() if one.state is KVState.RECEIVING]
        return min(ends, default=None)

    # Ending.

    def free(self, request: OmniDiffusionRequest) -> None:
        with self._lock:
            held = self._held.pop(request.request_id, None)
            if held is None:
                return
            self._budget.give_back(request.request_id)
            self._groups.forget(request.request_id)
            self._counts["freed"] += 1
            begun, held.state = held.state, KVState.ABSENT
        if begun in (KVState.RECEIVING, KVState.READY):
            self._tell_free(held)

    def stats(self) -> dict[str, Any]:
        """What is held, and what became of all the rest; the workers' own counts, summed up."""
        with self._lock:
            states = [held.state.value for held in self._held.values()]
            mine = {
                "budget": self._budget.nbytes,
                "charged": self._budget.charged,
                "held": {state.value: states.count(state.value) for state in KVState},
                **self._counts,
            }
        answers = [worker.call("kv_stats") for worker in self._everyone]
        wait(answers, _STATS)
        found = [one.result() for one in answers if one.done() and one.exception() is None]
        sums = {name: sum(one[name] for one in found) for name in ("charged", *self._counts)}
        return {**mine, "workers": {"answered": len(found), **sums}}

    def close(self) -> None:
        """The workers are gone, and what they held; again does nothing."""
        self._receiver.close()

    # Inside.

    def _begin(self, held: RemoteKVProxy) -> None:
        """In the receiver's thread: ask every rank, unless the request was ended meanwhile."""
        with self._lock:  # so that whoever frees it is heard by the ranks after this
            if held.state is not KVState.RECEIVING:
                return
            answers = [rank.call("receive_kv", [held.request]) for rank in held.ranks]
        for answer in answers:
            answer.add_done_callback(partial(self._on_answer, held))

    def _on_answer(self, held: RemoteKVProxy, answer: Future[int]) -> None:
        """A rank has a request's KV, or will not get it."""
        error: Any = answer.exception()
        if error is None:
            with self._lock:
                if held.state is not KVState.RECEIVING:
                    return
                held.coming -= 1
                held.largest = max(held.largest, answer.result())
                error = None if held.coming else self._take(held)
                if error is None and held.coming:
                    return
        if error is not None:
            self._fail(held, error)
        else:
            self._tell()

    def _take(self, held: RemoteKVProxy) -> CapacityError | None:
        """All ranks have it; the lock is held."""
        try:
            self._budget.correct(held.request.request_id, held.largest)
        except CapacityError as error:
            return error
        held.state = KVState.READY
        self._counts["received"] += 1
        self._counts["nbytes"] += held.largest
        return None

    def _fail(self, held: RemoteKVProxy, error: Exception) -> None:
        """It will not come, and the ranks that have it give it back."""
        with self._lock:
            if held.state is not KVState.RECEIVING:
                return
            held.state, held.error = KVState.FAILED, error
            self._counts["failed"] += 1
        self._tell_free(held)
        self._tell()

    def _on_deadline(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [one for one in self._held.values() if one.end <= now]
        for held in late:
            key, waited = held.request.request_id, held.limit
            text = f"the KV of {key!r} did not come within {waited:g} s, and no worker said so"
            self._fail(held, TransferTimeout(text, key=key, waited=waited, phase="asked for"))

    def _tell_free(self, held: RemoteKVProxy) -> None:
        for rank in held.ranks:
            rank.call("free_kv", [held.request])

    def _tell(self) -> None:
        for callback in self._listeners:
            callback()
