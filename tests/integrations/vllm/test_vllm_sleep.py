"""Engines that sleep between two transfers: no pointer into their pools is kept or used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from omni_kvlink.connectors.runtime import fault_points
from support.vllm.cache_layers import BLOCK, full, sliding
from support.vllm.engine_process import prompt, transfer
from support.vllm.sleep import PageSleep, move, pause, pools_of_engine, restore, unregister
from support.vllm.steps import SteppedEngine

# Reaches into _KV_CONNECTOR_AGENT: vLLM has one connector a process, and no public name to exchange
# it.
# Reaches into _verify_kv_transfer_compat: vLLM's check at the start of an engine.

TOKENS = prompt(3 * BLOCK + 7, seed=3)
SLEEPS = "the engine sleeps: its KV caches are not registered"

Open = Callable[..., SteppedEngine]


def fetch(key: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": key}


def run_transfer(producer: SteppedEngine, consumer: SteppedEngine, name: str) -> None:
    """A prompt, from its prefill to its end; each layer checks what it finds in its blocks."""
    received = consumer.counts.get("received", 0)
    consumer.add(name, TOKENS, producer.prefill(name, TOKENS))
    assert consumer.run(name) == ["length"]
    producer.settle()
    consumer.settle()
    assert consumer.counts["received"] == received + 1


def fall_asleep(*engines: SteppedEngine) -> list[PageSleep]:
    """As vLLM 0.33 does it; from here on a use of a pointer into a pool ends this process."""
    pages = [PageSleep(pools_of_engine(engine)) for engine in engines]
    for engine, each in zip(engines, pages, strict=True):
        pause(engine)
        unregister(engine)
        each.suspend()
    return pages


def wake_up(pages: list[PageSleep], *engines: SteppedEngine) -> None:
    for each in pages:
        each.resume()
    restore(*engines)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_sleep_between_two_transfers(engine: Open, load: str) -> None:
    producer, consumer = engine("producer"), engine("consumer", load=load)
    run_transfer(producer, consumer, "before")
    pages = fall_asleep(producer, consumer)
    wake_up(pages, producer, consumer)
    run_transfer(producer, consumer, "after")
    assert not consumer.wrong


def test_a_sleep_of_an_engine_with_windows(engine: Open) -> None:
    groups = (full("layer 0"), sliding(40, "layer 1"))
    producer = engine("producer", steps={"groups": groups})
    consumer = engine("consumer", steps={"groups": groups})
    run_transfer(producer, consumer, "before")
    wake_up(fall_asleep(producer, consumer), producer, consumer)
    run_transfer(producer, consumer, "after")


def test_a_committed_cache_is_read_while_its_producer_sleeps(engine: Open) -> None:
    """It lies in the link's memory; without `delay_free`, no sleep waits for its readers."""
    producer, consumer = engine("producer", delay_free=False), engine("consumer")
    params = producer.prefill("k", TOKENS)
    pages = fall_asleep(producer)
    consumer.add("k", TOKENS, params)
    assert consumer.run("k") == ["length"]
    wake_up(pages, producer)
    run_transfer(producer, consumer, "after")


def test_nothing_keeps_the_memory_that_slept(engine: Open) -> None:
    """The pools get other memory, twice: the first one is freed, and both sides use the second."""
    producer, consumer = engine("producer"), engine("consumer")
    pools = [*pools_of_engine(producer), *pools_of_engine(consumer)]
    unregister(producer, consumer)
    first = move(pools)
    restore(producer, consumer)
    run_transfer(producer, consumer, "before")
    pause(producer)
    pause(consumer)
    unregister(producer, consumer)
    second = move(pools)
    assert [memory() is None for memory in first] == [True] * len(pools)
    restore(producer, consumer)
    run_transfer(producer, consumer, "after")
    assert all(memory() is not None for memory in second)


def test_both_calls_may_come_twice(engine: Open) -> None:
    producer, consumer = engine("producer"), engine("consumer")
    for number in range(2):
        restore(producer, consumer)  # nothing to restore
        run_transfer(producer, consumer, f"{number}")
        unregister(producer, consumer)
        unregister(producer, consumer)
        restore(producer, consumer)
    restore(producer, consumer)
    run_transfer(producer, consumer, "after")


def test_a_load_that_waits_fails_by_name(engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The payload comes while the engine sleeps: it is declined, and no block waits for it."""
    producer, consumer = engine("producer"), engine("consumer")
    consumer.add("r", TOKENS, fetch("k"))
    consumer.step()
    pages = PageSleep(pools_of_engine(consumer))
    unregister(consumer)
    pages.suspend()
    producer.prefill("k", TOKENS)
    producer.settle()
    assert producer.used_blocks == 0
    wake_up([pages], consumer)
    assert consumer.run("r") == ["error"]
    assert f"of request 'r' was not loaded: TransferFailed: {SLEEPS}" in caplog.text
    run_transfer(producer, consumer, "after")


def test_a_load_amid_its_copies_fails_by_name(
    engine: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first layer is there, the second one comes when nobody may write it any more."""
    producer, consumer = engine("producer"), engine("consumer")
    layers, may_go_on = iter(range(10)), threading.Event()

    def point(name: str) -> None:
        if name == "stream.layer" and next(layers):
            may_go_on.wait()

    monkeypatch.setattr(fault_points, "point", point)
    consumer.add("r", TOKENS, fetch("k"))
    sending = threading.Thread(target=producer.prefill, args=("k", TOKENS))
    sending.start()
    first = next(iter(consumer.ranks[0].pools.values()))
    consumer.step_until(first.any)
    pages = PageSleep(pools_of_engine(consumer))
    unregister(consumer)
    pages.suspend()
    may_go_on.set()
    sending.join()
    producer.settle()
    assert producer.used_blocks == 0
    wake_up([pages], consumer)
    assert consumer.run("r") == ["error"]
    assert f"of request 'r' was not loaded: TransferFailed: {SLEEPS}" in caplog.text
    run_transfer(producer, consumer, "after")


def test_a_cache_that_is_asked_for_meanwhile(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that was woken without its caches: what it is to send or to load fails by name."""
    producer, consumer = engine("producer"), engine("consumer")
    unregister(producer)
    producer.prefill("k", TOKENS)
    consumer.add("k", TOKENS, fetch("k"))
    assert consumer.run("k") == ["error"]
    assert f"cache 'k' was not sent: {SLEEPS}" in caplog.text
    assert "it could not be saved: TransferFailed" in caplog.text
    restore(producer)
    unregister(consumer)
    consumer.add("m", TOKENS, producer.prefill("m", TOKENS))
    assert consumer.run("m") == ["error"]
    assert f"of request 'm' was not loaded: TransferFailed: {SLEEPS}" in caplog.text
    producer.settle()
    assert producer.used_blocks == 0, "the read was declined"
    restore(consumer)
    run_transfer(producer, consumer, "after")


needs_hooks = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "unregister_kv_caches"),
    reason="vLLM before 0.33 has no such hooks: make test-vllm-interface",
)


@needs_hooks
def test_the_hooks_are_those_of_vllm(engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of vLLM itself puts the pools to sleep and wakes them up."""
    from vllm.v1.worker.gpu_worker import Worker

    producer, consumer = engine("producer"), engine("consumer")
    run_transfer(producer, consumer, "before")
    for each in (producer, consumer):
        pause(each)
        worker: Any = SimpleNamespace(
            sleep_mode_backend=PageSleep(pools_of_engine(each)),
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=0)),
            _sleep_saved_parameters={},
            _sleep_saved_buffers={},
            _sleep_saved_draft_buffers={},
            synchronize_device=lambda: None,
        )
        # As in a worker's process.
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", each.worker)
        Worker.discard(worker, ("kv_cache",))
        Worker.discard(worker, ("kv_cache",))
        Worker.wake_up(worker, ["kv_cache"])
        Worker.wake_up(worker, ["weights"])
    run_transfer(producer, consumer, "after")


@needs_hooks
@pytest.mark.parametrize("wrapper", ["", "MultiConnector"])
def test_vllm_lets_an_engine_with_the_connector_sleep(wrapper: str) -> None:
    from vllm.config import KVTransferConfig, VllmConfig

    config = transfer("both", url="shm://p", peers=["shm://p"])
    if wrapper:
        extra = {"connectors": [config]}
        config = {"kv_connector": wrapper, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    made: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**config),
        model_config=SimpleNamespace(enable_sleep_mode=True, enable_cumem_allocator=True),
    )
    VllmConfig._verify_kv_transfer_compat(made)
