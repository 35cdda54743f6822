"""KV that lies with several ranks: when it is there, when it is not, and what each is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from engine_fixtures import request
from mp_fixtures import until

from omni_kvlink import CapacityError, TransferFailed, TransferTimeout
from omni_kvlink.engine import EngineError, KVConfig, KVState
from omni_kvlink.engine.executor.dp_router import DPRouter
from omni_kvlink.engine.executor.remote_kv import RemoteKVManager


class Rank:
    """Notes what it is told; a receive ends when the test says so."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.coming: dict[str, Future[int]] = {}

    def call(self, method: str, args: Sequence[Any] = ()) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "kv_stats":
            return answer  # it is frozen
        self.told.append((method, args[0].request_id))
        if method == "receive_kv":
            self.coming[args[0].request_id] = answer
        return answer

    def count(self, method: str, name: str) -> int:
        return self.told.count((method, name))


class Stage:
    """Two groups of two ranks."""

    def __init__(self) -> None:
        self.ranks = [Rank() for _ in range(4)]
        self.groups = DPRouter(2)
        config = KVConfig(budget=1000, reserve=100, timeout=5.0)
        self.manager = RemoteKVManager(
            config, self.groups, lambda group: self.ranks[2 * group : 2 * group + 2], self.ranks
        )
        self.ended = threading.Semaphore(0)
        self.manager.listen(self.ended.release)

    def begin(self, name: str, **fields: Any) -> tuple[Any, list[Rank]]:
        """A request, and the ranks that were told to receive its KV."""
        one = request(name, **fields)
        self.manager.allocate(one)
        self.manager.prefetch(one)
        until(lambda: sum(rank.count("receive_kv", name) for rank in self.ranks) == 2)
        return one, [rank for rank in self.ranks if rank.count("receive_kv", name)]


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.manager.close()


def test_it_is_there_when_all_of_the_group_have_it(stage: Stage) -> None:
    one, (first, second) = stage.begin("r", kv_nbytes=300)
    first.coming["r"].set_result(120)
    assert stage.manager.state("r") is KVState.RECEIVING
    second.coming["r"].set_result(150)
    assert stage.ended.acquire(timeout=5)
    assert stage.manager.state("r") is KVState.READY
    stats = stage.manager.stats()
    assert (stats["charged"], stats["nbytes"], stats["received"]) == (150, 150, 1)
    assert stats["workers"]["answered"] == 0  # and it did not wait for them for long
    stage.manager.free(one)
    stage.manager.free(one)
    assert [rank.count("free_kv", "r") for rank in (first, second)] == [1, 1]
    assert stage.manager.stats()["charged"] == 0
    assert stage.groups.find("r") is None


def test_it_fails_with_the_first_that_fails(stage: Stage) -> None:
    one, (first, second) = stage.begin("r")
    first.coming["r"].set_result(10)
    second.coming["r"].set_exception(TransferFailed("out of blocks"))
    assert stage.manager.state("r") is KVState.FAILED
    assert "out of blocks" in str(stage.manager.error("r"))
    assert [rank.count("free_kv", "r") for rank in (first, second)] == [1, 1]
    stage.manager.free(one)  # they were told already
    assert [rank.count("free_kv", "r") for rank in (first, second)] == [1, 1]
    assert sum(rank.count("free_kv", "r") for rank in stage.ranks) == 2


def test_ranks_that_say_nothing_are_not_waited_for(stage: Stage) -> None:
    started = time.monotonic()
    stage.begin("r", kv_timeout=0.3)
    assert stage.ended.acquire(timeout=5)
    assert 0.3 <= time.monotonic() - started < 0.3 + 0.25
    assert isinstance(stage.manager.error("r"), TransferTimeout)
    late = next(rank for rank in stage.ranks if rank.told)
    late.coming["r"].set_result(10)  # nobody listens any more
    assert stage.manager.state("r") is KVState.FAILED


def test_room_is_corrected_when_the_size_is_known(stage: Stage) -> None:
    _, ranks = stage.begin("a")  # of unknown size: a reserve
    assert stage.manager.stats()["charged"] == 100
    for rank in ranks:
        rank.coming["a"].set_result(700)
    assert stage.manager.stats()["charged"] == 700
    assert not stage.manager.can_allocate(request("b", kv_nbytes=301))
    with pytest.raises(CapacityError, match=r"kv\.budget") as caught:
        stage.manager.allocate(request("b", kv_nbytes=301))
    assert (caught.value.asked, caught.value.free) == (301, 300)
    assert stage.groups.find("b") is None
    _, others = stage.begin("c", kv_nbytes=300)
    assert set(others).isdisjoint(ranks)  # the less loaded group
    for rank in others:
        rank.coming["c"].set_result(301)  # more than was said, and than is left
    assert isinstance(stage.manager.error("c"), CapacityError)
    assert [rank.count("free_kv", "c") for rank in others] == [1, 1]


def test_who_is_freed_before_the_ranks_were_told_is_not_received(stage: Stage) -> None:
    for number in range(200):
        one = request(f"r{number}")
        stage.manager.allocate(one)
        stage.manager.prefetch(one)
        stage.manager.free(one)
    _, ranks = stage.begin("last")
    for rank in ranks:
        for method, name in rank.told:
            if method == "receive_kv" and name != "last":  # then it was told to free it, after
                assert rank.told.index(("free_kv", name)) > rank.told.index((method, name))


def test_what_is_asked_in_the_wrong_order(stage: Stage) -> None:
    with pytest.raises(EngineError, match="absent"):
        stage.manager.prefetch(request("r"))
    stage.begin("r")
    with pytest.raises(EngineError, match="receiving"):
        stage.manager.prefetch(request("r"))
    with pytest.raises(EngineError, match="free it first"):
        stage.manager.allocate(request("r"))


def test_the_least_loaded_group_is_chosen() -> None:
    groups = DPRouter(3)
    assert [groups.choose(name) for name in "abcda"] == [0, 1, 2, 0, 0]
    groups.forget("b")
    groups.forget("b")
    groups.forget("nobody")
    assert [groups.choose(name) for name in "ef"] == [1, 1]
    assert groups.find("b") is None
