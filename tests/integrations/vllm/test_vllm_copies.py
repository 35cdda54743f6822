"""Blocks that a copy writes while vLLM frees them: they are nobody else's before it has ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from omni_kvlink import TransferFailed
from omni_kvlink.link import copy_into
from omni_kvlink.testing.rig import until
from support.vllm.engine_process import prompt
from support.vllm.steps import BLOCK, BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.integrations.vllm.loading import RankLoad
    from support.vllm.steps import SteppedEngine

    Open = Callable[..., SteppedEngine]

TOKENS = prompt(3 * BLOCK + 7, seed=3)
USED = 4
"""Blocks of `TOKENS`."""


class HeldCopies:
    """Copies of layers, the `number`-th of which is held up until `go_on`; `error` is of others."""

    error: Exception | None = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int):
        self.is_held, self.may_copy, self.left = threading.Event(), threading.Event(), [number]
        copy_layer, held = copy_into.CopyInto.copy_layer, self

        def copy_later(self: copy_into.CopyInto, *arguments: Any) -> None:
            held.left[0] -= 1
            if held.left[0] == -1:
                held.is_held.set()
                assert held.may_copy.wait(60)
            elif held.error is not None:
                assert held.is_held.wait(60)
                raise held.error
            copy_layer(self, *arguments)

        monkeypatch.setattr(copy_into.CopyInto, "copy_layer", copy_later)

    def go_on(self) -> None:
        self.may_copy.set()

    def release_when_held(self) -> None:
        if self.is_held.wait(60):
            self.go_on()


@pytest.fixture(params=[0, 1], ids=["first layer", "last layer"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopies]:
    copies = HeldCopies(monkeypatch, request.param)
    yield copies
    copies.go_on()


def loading(consumer: SteppedEngine) -> RankLoad:
    """The only load of the engine's only rank."""
    load: RankLoad
    (load,) = consumer.worker._loader._loading.values()  # no call says how far a load is
    return load


def give_up(producer: SteppedEngine) -> None:
    """End the cache that nobody reads: its blocks are held for an hour."""
    for rank in producer.ranks:
        saver = rank.connector._saver  # the scheduler is told by the link
        for pools in saver._pools:  # its keys are those of the parts
            saver._link.abort(pools.part.key("k"), "not needed")  # as a reader would


def fetch(key: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": key}


def begin_load(engine: Open, held: HeldCopies) -> tuple[SteppedEngine, SteppedEngine]:
    """A producer, and a consumer which is amid the copy of a layer of request `r`."""
    producer, consumer = engine("producer"), engine("consumer")
    producer.prefill("k", TOKENS)
    consumer.add("r", TOKENS, fetch("k"))
    consumer.step()
    assert held.is_held.wait(60)
    return producer, consumer


def occupy(consumer: SteppedEngine, count: int, *, tokens: int = 3) -> list[str]:
    """Add requests that compute, and so write, all the blocks that they can have."""
    names = [f"other{number}" for number in range(count)]
    for number, name in enumerate(names):
        consumer.add(name, prompt(3 * BLOCK + 7, seed=10 + number), None, tokens=tokens)
    return names


def settle(*engines: SteppedEngine) -> None:
    for engine in engines:
        engine.settle()
        assert engine.used_blocks == 0
        assert not engine.wrong


def test_an_aborted_requests_blocks_wait_for_the_copy(engine: Open, held: HeldCopies) -> None:
    """Others compute meanwhile, in other blocks; then in these, which no copy writes any more."""
    producer, consumer = begin_load(engine, held)
    blocks = set(consumer.blocks("r"))
    consumer.abort("r")
    names = occupy(consumer, 6)
    for _ in range(3):
        consumer.step()
    assert consumer.used_blocks >= USED, "its blocks are still its own"
    running = [name for name in names if name in consumer.scheduler.requests]
    assert running
    assert not any(blocks & set(consumer.blocks(name)) for name in running)
    assert consumer.run(*names) == ["length"] * len(names)
    held.go_on()
    consumer.settle()
    assert consumer.used_blocks == 0
    names = [f"late{number}" for number in range(8)]
    for number, name in enumerate(names):
        consumer.add(name, prompt((BLOCKS // 8 - 1) * BLOCK, seed=40 + number), None, tokens=3)
    consumer.step()
    assert blocks <= {block for name in names for block in consumer.blocks(name)}
    assert consumer.run(*names) == ["length"] * len(names)
    settle(consumer, producer)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_amid_a_copy(engine: Open, held: HeldCopies, policy: str) -> None:
    """Its request is computed in the same blocks, which the copy has left before."""
    producer, consumer = engine("producer"), engine("consumer", policy)
    producer.prefill("k", TOKENS)
    consumer.add("r", TOKENS, fetch("k"))
    consumer.step()
    assert held.is_held.wait(60)
    load = loading(consumer)
    load.parts[0].get._deadline.at = 0.0  # its time is over: it fails at the next layer, or commit
    for _ in range(3):
        consumer.step()
    assert "r" not in consumer.ended
    assert consumer.counts.get("load_failed", 0) == 0, "a target may be written"
    held.go_on()
    ended = consumer.run("r")
    assert ended in (["length"], ["error" if policy == "fail" else "length"])
    give_up(producer)
    settle(consumer, producer)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_requests_are_preempted_amid_a_copy(
    engine: Open, held: HeldCopies, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others need more blocks than there are, while a cache is loaded and behind it."""
    # vLLM counts preemptions, and does not name the requests.
    preempted, preempt = list[str](), Scheduler._preempt_request

    def note(self: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *arguments, **options)

    # As above.
    monkeypatch.setattr(Scheduler, "_preempt_request", note)
    producer, consumer = engine("producer"), engine("consumer", load=load)
    producer.prefill("k", TOKENS)
    consumer.add("r", TOKENS, fetch("k"), tokens=2 * BLOCK)
    if load == "sync":  # the pass waits for the copy
        threading.Thread(target=held.release_when_held).start()
    consumer.step()
    assert held.is_held.wait(60)
    names = [f"other{number}" for number in range(7)]
    for number, name in enumerate(names):
        consumer.add(name, prompt(5 * BLOCK, seed=10 + number), None, tokens=2 * BLOCK)
    consumer.step_until(lambda: preempted)
    held.go_on()
    assert consumer.run("r", *names) == ["length"] * 8
    settle(consumer, producer)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_heads_of_one_rank_fail_amid_the_copy_of_the_others(
    engine: Open, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Two ranks send to one: the load has failed when neither part is being copied any more."""
    held = HeldCopies(monkeypatch, 0)
    held.error = TransferFailed("broken")
    producer = engine("producer", peer_tp=1, steps={"tensor": 2})
    consumer = engine("consumer", policy, peer_tp=2, timeout=3600)
    producer.prefill("k", TOKENS)
    consumer.add("r", TOKENS, fetch("k"))
    consumer.step()
    load = loading(consumer)
    until(lambda: any(part.done.is_set() for part in load.parts), "a part has failed")
    assert [part.done.is_set() for part in load.parts].count(True) == 1
    names = occupy(consumer, 4)
    assert consumer.run(*names) == ["length"] * len(names)
    assert "r" not in consumer.ended
    assert consumer.counts.get("load_failed", 0) == 0, "a target is being written"
    assert consumer.used_blocks == USED
    held.error = None
    held.go_on()
    assert consumer.run("r") == ["error" if policy == "fail" else "length"]
    assert consumer.counts["load_failed"] == 1
    give_up(producer)
    settle(consumer, producer)
