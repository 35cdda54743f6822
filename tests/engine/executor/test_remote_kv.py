"""`RemoteKVManager`: when KV is ready or failed, and what each worker is called with."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import CapacityError, TransferFailed, TransferTimeout
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.executor import remote_kv
from omni_kvlink.engine.executor.remote_kv import DPRouter, RemoteKVManager
from omni_kvlink.engine.ipc.rpc import RpcClient
from omni_kvlink.engine.kv.kv_state import KVState
from support.engine.fixtures import WAIT, request, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class FakeWorker(RpcClient):
    """Notes its calls; the test sets the result of a receive."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.receives: dict[str, Future[int]] = {}

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "kv_stats":
            return answer  # it is frozen
        self.calls.append((method, args[0].request_id))
        if method == "receive_kv":
            self.receives[args[0].request_id] = answer
        return answer

    def count(self, method: str, name: str) -> int:
        return self.calls.count((method, name))


class Stage:
    """A manager of two groups of two workers."""

    def __init__(self) -> None:
        self.workers = [FakeWorker() for _ in range(4)]
        self.router = DPRouter(2)
        config = KVConfig(budget=1000, reserve=100, timeout=WAIT)
        self.manager = RemoteKVManager(
            config, self.router, lambda group: self.workers[2 * group : 2 * group + 2], self.workers
        )
        self.ended = threading.Semaphore(0)
        self.manager.listen(self.ended.release)

    def begin(self, name: str, **fields: Any) -> tuple[Any, list[FakeWorker]]:
        """Prefetch a request; returns it and the workers that were called to receive its KV."""
        one = request(name, **fields)
        self.manager.allocate(one)
        self.manager.prefetch(one)
        until(lambda: sum(worker.count("receive_kv", name) for worker in self.workers) == 2)
        return one, [worker for worker in self.workers if worker.count("receive_kv", name)]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    # No setting: a worker that does not answer is to cost the test no second.
    monkeypatch.setattr(remote_kv, "_STATS_TIMEOUT", 0.01)
    made = Stage()
    yield made
    made.manager.close()


def test_kv_is_ready_when_all_ranks_of_the_group_have_it(stage: Stage) -> None:
    one, (first, second) = stage.begin("r", kv_nbytes=300)
    first.receives["r"].set_result(120)
    assert stage.manager.state("r") is KVState.RECEIVING
    second.receives["r"].set_result(150)
    assert stage.ended.acquire(timeout=WAIT)
    assert stage.manager.state("r") is KVState.READY
    stats = stage.manager.stats()
    assert (stats["charged"], stats["nbytes"], stats["received"]) == (150, 150, 1)
    assert stats["workers"]["answered"] == 0  # they do not answer
    stage.manager.free(one)
    stage.manager.free(one)
    assert [worker.count("free_kv", "r") for worker in (first, second)] == [1, 1]
    assert stage.manager.stats()["charged"] == 0
    assert stage.router.find("r") is None


def test_kv_fails_with_the_first_rank_that_fails(stage: Stage) -> None:
    one, (first, second) = stage.begin("r")
    first.receives["r"].set_result(10)
    second.receives["r"].set_exception(TransferFailed("out of blocks"))
    assert stage.manager.state("r") is KVState.FAILED
    assert "out of blocks" in str(stage.manager.error("r"))
    assert [worker.count("free_kv", "r") for worker in (first, second)] == [1, 1]
    stage.manager.free(one)  # they were called already
    assert [worker.count("free_kv", "r") for worker in (first, second)] == [1, 1]
    assert sum(worker.count("free_kv", "r") for worker in stage.workers) == 2


def test_kv_fails_at_its_deadline_if_ranks_do_not_answer(stage: Stage) -> None:
    started = time.monotonic()
    stage.begin("r", kv_timeout=0.3)
    assert stage.ended.acquire(timeout=WAIT)
    assert time.monotonic() - started >= 0.3
    error: Any = stage.manager.error("r")
    assert isinstance(error, TransferTimeout)
    assert error.waited == 0.3  # the request's own
    late = next(worker for worker in stage.workers if worker.calls)
    late.receives["r"].set_result(10)  # ignored
    assert stage.manager.state("r") is KVState.FAILED


def test_the_budget_is_corrected_when_the_size_is_known(stage: Stage) -> None:
    _, workers = stage.begin("a")  # of unknown size: kv.reserve
    assert stage.manager.stats()["charged"] == 100
    for worker in workers:
        worker.receives["a"].set_result(700)
    assert stage.manager.stats()["charged"] == 700
    assert not stage.manager.can_allocate(request("b", kv_nbytes=301))
    with pytest.raises(CapacityError, match=r"kv\.budget") as caught:
        stage.manager.allocate(request("b", kv_nbytes=301))
    assert (caught.value.requested, caught.value.free) == (301, 300)
    assert stage.router.find("b") is None
    _, others = stage.begin("c", kv_nbytes=300)
    assert set(others).isdisjoint(workers)  # the less loaded group
    for worker in others:
        worker.receives["c"].set_result(301)  # more than announced, and than is free
    assert isinstance(stage.manager.error("c"), CapacityError)
    assert [worker.count("free_kv", "c") for worker in others] == [1, 1]


def test_a_request_that_is_freed_early_is_not_received(stage: Stage) -> None:
    for number in range(200):
        one = request(f"r{number}")
        stage.manager.allocate(one)
        stage.manager.prefetch(one)
        stage.manager.free(one)
    _, workers = stage.begin("last")
    for worker in workers:
        for method, name in worker.calls:
            if method == "receive_kv" and name != "last":  # then it was freed afterwards
                assert worker.calls.index(("free_kv", name)) > worker.calls.index((method, name))


def test_calls_in_the_wrong_order_raise(stage: Stage) -> None:
    with pytest.raises(EngineError, match="absent"):
        stage.manager.prefetch(request("r"))
    stage.begin("r")
    with pytest.raises(EngineError, match="receiving"):
        stage.manager.prefetch(request("r"))
    with pytest.raises(EngineError, match="free it first"):
        stage.manager.allocate(request("r"))


def test_the_least_loaded_group_is_chosen() -> None:
    router = DPRouter(3)
    assert [router.assign(name) for name in "abcda"] == [0, 1, 2, 0, 0]
    router.remove("b")
    router.remove("b")
    router.remove("nobody")
    assert [router.assign(name) for name in "ef"] == [1, 1]
    assert router.find("b") is None
