"""Producers that are absent, or about to end: other requests go on, and what can be read is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from omni_kvlink import Receipt
from omni_kvlink.integrations.vllm.loading import CONNECTING_THREADS, THREADS
from support.vllm.engine_process import prompt
from support.vllm.halves import link_of, loader_of, saver_of
from support.vllm.steps import BLOCK, SteppedEngine

TOKENS = prompt(3 * BLOCK + 7, seed=3)
FEW = prompt(7)
"""Tokens of one block."""

Open = Callable[..., SteppedEngine]


def fetch(key: str, **params: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": key, **params}


def test_absent_producers_delay_no_other(engine: Open) -> None:
    """More of them than threads that copy: the cache of one that is there is loaded meanwhile."""
    producer = engine("producer")
    absent = [f"absent-{number}" for number in range(THREADS + 1)]
    consumer = engine("consumer", peers=["shm://p", "shm://absent-*"], timeout=600)
    for name in absent:
        consumer.add(name, FEW, fetch(name, remote_url=f"shm://{name}"))
    consumer.step()
    consumer.add("r", TOKENS, producer.prefill("k", TOKENS))
    assert consumer.run("r") == ["length"]
    assert consumer.counts["received"] == 1
    assert not [name for name in absent if name in consumer.ended]
    for name in absent:
        consumer.abort(name)
    assert consumer.used_blocks == len(absent)
    consumer.settle()  # long before the loads' timeout
    assert consumer.used_blocks == 0


def test_a_load_whose_connection_is_not_begun_ends_in_time(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Its deadline does not wait for a thread to connect it."""
    producer, consumer = engine("producer"), engine("consumer", timeout=0.05)
    end = threading.Event()
    for _ in range(CONNECTING_THREADS):
        # All of its threads are taken, so that no connection is begun.
        loader_of(consumer.worker)._connecting_pool.submit(end.wait)
    try:
        consumer.add("r", TOKENS, producer.prefill("k", TOKENS))
        assert consumer.run("r") == ["error"]
        assert "the producer shm://p was not reached within 0.05 s" in caplog.text
    finally:
        end.set()
    consumer.settle()
    assert consumer.used_blocks == 0


def test_a_pattern_needs_the_producers_answer(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """What names no producer fails alone, and the log names the cure."""
    producer, consumer = engine("producer"), engine("consumer", peers=["shm://*"])
    consumer.add("bare", TOKENS, fetch("k"))
    with caplog.at_level(logging.ERROR):
        assert consumer.run("bare") == ["error"]
    assert "the request names no remote_url" in caplog.text
    consumer.add("r", TOKENS, producer.prefill("k", TOKENS))
    assert consumer.run("r") == ["length"]


def test_a_producer_drains(engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shutdown waits until what it has announced is read."""
    producer, consumer = engine("producer", drain=60), engine("consumer")
    consumer.add("first", FEW, producer.prefill("first", FEW))
    assert consumer.run("first") == ["length"]
    params = producer.prefill("k", TOKENS)
    begun, wait = threading.Event(), Receipt.wait

    def wait_noted(receipt: Receipt, *, timeout: float) -> None:
        begun.set()
        wait(receipt, timeout=timeout)

    monkeypatch.setattr(Receipt, "wait", wait_noted)
    ending = threading.Thread(target=producer.worker.shutdown)
    ending.start()
    assert begun.wait(60)
    consumer.add("r", TOKENS, params)
    assert consumer.run("r") == ["length"]
    assert consumer.counts["received"] == 2
    ending.join(60)
    assert not ending.is_alive()


def test_a_drain_ends(engine: Open) -> None:
    """Nobody reads: the shutdown goes on."""
    producer = engine("producer", drain=0.01)
    producer.prefill("k", TOKENS)
    producer.worker.shutdown()
    assert link_of(saver_of(producer.worker)).stats()["closed"]
