"""`DiffusionKVManager`: the KV of requests that wait or run: received, held, given back once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_entry import KVEntry, KVState
from omni_kvlink.engine.kv.kv_receiver import KVReceiver
from omni_kvlink.engine.kv.kv_source import KVSource
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sched.budget import Budget
from omni_kvlink.errors import ClosedError
from omni_kvlink.link import KVLink, Payload

_RECONNECT = 0.2
"""Seconds that a receive may spend on finding a producer again that went away."""


class KVManager(Protocol):
    """What a scheduler asks of whoever holds its requests' KV, here or in worker processes."""

    def listen(self, callback: Callable[[], None]) -> None:
        """Call this, from any thread, when a receive came to its end."""

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        """Whether there is room for a request's KV now."""

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Set room aside; CapacityError if there is none."""

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Begin to receive, and return."""

    def state(self, request_id: str) -> KVState:
        """How far a request's KV has come; asking changes nothing."""

    def error(self, request_id: str) -> Exception | None:
        """Why a receive failed."""

    def next_deadline(self) -> float | None:
        """When the next receive fails of itself, on `time.monotonic`'s clock."""

    def free(self, request: OmniDiffusionRequest) -> None:
        """Give back a request's KV and room, however far it came; the second time does nothing."""

    def stats(self) -> dict[str, Any]:
        """What is held, and what became of all the rest, as JSON values."""


class DiffusionKVManager:
    """Holds the KV of each request from before it runs until after; thread-safe.

    One thread receives and verifies, while the engine's thread computes; it also ends what is late.

    Args:
        connector: where KV comes from: the consumer's end of the link to the stage before, or a
            source of parts; None to use only `receive_from_connector`.
        config: budget, timeout, how to verify.
        device: where the pipeline wants the tensors. On the CPU they stay in the link's memory.
    """

    def __init__(
        self,
        connector: KVLink | KVSource | None,
        config: KVConfig | None = None,
        *,
        device: torch.device | str = "cpu",
    ):
        self.connector = KVSource.whole(connector) if isinstance(connector, KVLink) else connector
        self.config = config or KVConfig()
        self._device = torch.device(device)
        self._verify = self.config.verify
        self._changed = threading.Condition()
        self._budget = Budget(self.config)
        self._held: dict[str, KVEntry] = {}
        self._listeners: list[Callable[[], None]] = []
        self._receiver = KVReceiver(
            "kv-receiver", next_deadline=self.next_deadline, on_deadline=self._on_deadline
        )
        self._closed = False
        self._counts = {"received": 0, "failed": 0, "freed": 0, "nbytes": 0}

    def listen(self, callback: Callable[[], None]) -> None:
        self._listeners.append(callback)

    # Room.

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        with self._changed:
            return self._budget.has_room(request)

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Set room aside for a request's KV: as much as the stage before said, or a reserve.

        Raises:
            CapacityError: more than what is free; asked and free bytes are its attributes.
            EngineError: the request has room already.
        """
        with self._changed:
            self._check_open()
            if request.request_id in self._held:
                raise EngineError(f"request {request.request_id!r} holds KV already: free it first")
            nbytes = self._budget.take(request)
            limit = self.config.timeout if request.kv_timeout is None else request.kv_timeout
            self._held[request.request_id] = KVEntry(request.request_id, nbytes, limit)

    # Receiving.

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Begin to receive a request's KV, for which there is room, and return.

        Raises:
            EngineError: `allocate` it first; or this manager has no connector.
        """
        if self.connector is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        self._begin(self.connector, request)

    def receive_from_connector(
        self,
        connector: KVLink | KVSource,
        request: OmniDiffusionRequest,
        *,
        timeout: float | None = None,
    ) -> None:
        """Fetch a request's KV and hold it; returns when every byte is there.

        Args:
            timeout: seconds; the request's own, or the configured one, if None.

        Raises:
            TransferTimeout, TransferFailed, PeerLostError: it did not come; the request holds
                nothing then.
            IntegrityError, WireError: what came is not what was sent.
            CapacityError: no room for it.
        """
        if self.state(request.request_id) is KVState.ABSENT:
            self.allocate(request)
        if timeout is not None:
            self._find(request.request_id).limit = timeout
        try:
            source = KVSource.whole(connector) if isinstance(connector, KVLink) else connector
            self._begin(source, request)
            self._wait(request.request_id)
        except BaseException:
            self.free(request)
            raise

    def state(self, request_id: str) -> KVState:
        with self._changed:
            holding = self._held.get(request_id)
        return KVState.ABSENT if holding is None else holding.state

    def error(self, request_id: str) -> Exception | None:
        with self._changed:
            holding = self._held.get(request_id)
        return None if holding is None else holding.error

    def nbytes(self, request_id: str) -> int:
        """Bytes that are set aside for a request's KV, which it has once it is there."""
        with self._changed:
            holding = self._held.get(request_id)
        return 0 if holding is None else holding.nbytes

    def next_deadline(self) -> float | None:
        with self._changed:
            ends = [holding.deadline for holding in self._held.values()]
            return min((end for end in ends if end is not None), default=None)

    # Holding.

    def get_kv_cache(self, request_id: str) -> Payload:
        """The KV as it came, a `KVCacheTransferData` or `KVCacheBundle`; never blocks.

        Raises:
            EngineError: it was never asked for, or is not there yet.
            KVLinkError: why it did not come.
        """
        state = self.state(request_id)
        with self._changed:
            holding = self._held.get(request_id)
        if holding is not None and holding.error is not None:
            raise holding.error
        if holding is None or holding.data is None:
            raise EngineError(
                f"the KV of {request_id!r} is {state.value}; a request runs when it is ready"
            )
        return holding.data

    def free(self, request: OmniDiffusionRequest) -> None:
        """Give back a request's KV and room, however far it came; the second time does nothing.

        Tensors that somebody still holds keep the memory until they are gone.
        """
        with self._changed:
            holding = self._held.pop(request.request_id, None)
            self._budget.give_back(request.request_id)
        if holding is not None:
            holding.close()
            self._count("freed")

    def stats(self) -> dict[str, Any]:
        with self._changed:
            states = [holding.state.value for holding in self._held.values()]
            return {
                "budget": self.config.budget,
                "charged": self._budget.charged,
                "held": {state.value: states.count(state.value) for state in KVState},
                **self._counts,
            }

    def close(self) -> None:
        """Give back everything; a second call does nothing. The connector stays open."""
        with self._changed:
            self._closed = True
            held, self._held = list(self._held.values()), {}
            self._budget = Budget(self.config)
            self._changed.notify_all()
        for holding in held:
            holding.close()
            self._count("freed")
        self._receiver.close()

    # The receiver's side.

    def _begin(self, source: KVSource, request: OmniDiffusionRequest) -> None:
        holding = self._find(request.request_id)
        holding.begin(source)
        self._receiver.submit(self._ask, holding)

    def _ask(self, holding: KVEntry) -> None:
        """In the receiver: ask the producer. No thread waits for the answer."""
        try:
            wants = holding.ask(min(_RECONNECT, holding.limit))
        except Exception as error:
            self._fail(holding, error)
            return
        if wants is not None:
            wants.future.add_done_callback(partial(self._on_answer, holding))

    def _on_answer(self, holding: KVEntry, _: object) -> None:
        """In a thread of the connector, which must not wait."""
        self._receiver.submit(self._take, holding)

    def _on_deadline(self) -> None:
        with self._changed:
            held = list(self._held.values())
        for holding in held:
            if holding.expire():
                self._count("failed")
        self._tell()

    def _take(self, holding: KVEntry) -> None:
        """In the receiver: the answer is there."""
        try:
            holding.take(self._verify, self._device, partial(self._admit, holding))
        except Exception as error:
            self._fail(holding, error)
            return
        if holding.state is KVState.READY:
            self._count("received", holding.nbytes)
        self._tell()

    def _admit(self, holding: KVEntry, nbytes: int) -> None:
        with self._changed:
            if self._held.get(holding.request_id) is holding:  # else it was given back meanwhile
                self._budget.correct(holding.request_id, nbytes)
            holding.nbytes = nbytes

    def _fail(self, holding: KVEntry, error: Exception) -> None:
        if holding.fail(error):
            self._count("failed")
        self._tell()

    def _count(self, what: str, nbytes: int = 0) -> None:
        with self._changed:
            self._counts[what] += 1
            self._counts["nbytes"] += nbytes

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for callback in self._listeners:
            callback()

    def _wait(self, request_id: str) -> None:
        """Sleep until a receive is over; raises its error."""
        with self._changed:
            while self.state(request_id) is KVState.RECEIVING:
                self._changed.wait(self._find(request_id).limit)  # the receiver ends what is late
        error = self.error(request_id)
        if error is not None:
            raise error

    def _find(self, request_id: str) -> KVEntry:
        self._check_open()
        if request_id not in self._held:
            raise EngineError(f"request {request_id!r} has no room: allocate it first")
        return self._held[request_id]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the KV manager is closed")
