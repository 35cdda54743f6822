"""`WorkerService`: KV events of one request while another one's KV begins to be received."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.worker.service import WorkerService

# Reaches into _lock, _on_kv, _receiving: the service is made without its process; an event comes at
# one moment.


class Manager:
    """States of a KV manager, in which another request's KV arrives at each step."""

    def __init__(self) -> None:
        self.states: dict[str, KVState] = {}
        self.on_kv: Any = None

    def allocate(self, request: Any) -> None:
        self.on_kv()
        self.states[request.request_id] = KVState.ALLOCATED
        self.on_kv()

    def prefetch(self, request: Any) -> None:
        self.on_kv()
        self.states[request.request_id] = KVState.READY
        self.on_kv()

    def state(self, key: str) -> KVState:
        return self.states.get(key, KVState.ABSENT)

    def nbytes(self, key: str) -> int:
        return 7

    def error(self, key: str) -> None:
        return None


def test_an_event_of_another_request_ends_no_reservation() -> None:
    manager, service = Manager(), object.__new__(WorkerService)
    service.worker = SimpleNamespace(runner=SimpleNamespace(kv_manager=manager))  # type: ignore[assignment]
    service._lock, service._receiving = threading.Lock(), dict[str, Future[int]]()
    manager.on_kv = service._on_kv
    received = service.receive_kv(SimpleNamespace(request_id="r"))  # type: ignore[arg-type]
    assert received.result(0) == 7
