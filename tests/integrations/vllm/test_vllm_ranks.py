"""Engines of several ranks: each rank's part of a cache, and what one rank's end does to the others."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from vllm_fixtures import BLOCK, PATIENCE, EngineProcess, prompt

from omni_kvlink.testing.rig import until

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(1800),
]

UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Two ranks share a NUMA node here, which vLLM's own binding of threads does not foresee."""

FOREVER = 3600
"""Seconds; who waits so long for a dead rank does not end in these tests."""


def ranks(tensor: int = 1, pipeline: int = 1) -> dict[str, Any]:
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "distributed_executor_backend": "mp",
        "num_gpu_blocks_override": 64,
        "env": UNBOUND,
    }


def oracle(engine: EngineProcess, tokens: list[int]) -> dict[str, Any]:
    """The engine's output with the prompt in its prefix cache, which is emptied afterwards."""
    engine.generate(tokens)
    hit: dict[str, Any] = engine.generate(tokens)
    assert hit["cached"] == (len(tokens) - 1) // BLOCK * BLOCK
    assert engine.call("forget")
    return hit


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_as_a_local_prefix_cache_hit(start: Any, layout: tuple[int, int]) -> None:
    """Synchronous: bit for bit. Asynchronous, where only the last token is computed: as near."""
    producer = start("p", "producer", **ranks(*layout))
    for load in ("sync", "async"):
        consumer = start("d", "consumer", extra={"load": load}, **ranks(*layout))
        free = producer.call("free_blocks")
        for length in (5, BLOCK, 3 * BLOCK + 7):
            tokens = prompt(length, seed=length)
            expected = oracle(consumer, tokens)
            got = consumer.generate(tokens, producer.prefill(tokens))
            here = (length - 1) // BLOCK * BLOCK if load == "sync" else length
            assert (got["reason"], got["cached"]) == ("length", here)
            assert got["tokens"] == expected["tokens"]
            if load == "sync":
                assert got["logprobs"] == expected["logprobs"]
            assert difference(got, expected) < 1e-4
            assert consumer.call("forget")
        producer.call("settle")
        producer.call("forget")
        assert producer.call("free_blocks") == free
        consumer.close()
    producer.close()


@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (1, 2)])
def test_engines_of_other_sizes(start: Any, senders: int, receivers: int) -> None:
    """A rank reads a half of another one's heads, or those of two: the CPU's kernel can use them.

    The sums over ranks are rounded otherwise on either side: equal tokens, as near as that allows.
    """
    producer = start("p", "producer", extra={"peer_tp": receivers}, **ranks(senders))
    consumer = start("d", "consumer", extra={"peer_tp": senders}, **ranks(receivers))
    try:
        for length in (5, 3 * BLOCK + 7):
            tokens = prompt(length, seed=length)
            expected = oracle(consumer, tokens)
            got = consumer.generate(tokens, producer.prefill(tokens))
            assert (got["reason"], got["cached"]) == ("length", length)
            assert got["tokens"] == expected["tokens"]
            assert difference(got, expected) < 1e-4
            assert consumer.call("forget")
        producer.call("settle")
        assert consumer.count("received") == 2 * receivers * max(1, senders // receivers)
    finally:
        producer.close()
        consumer.close()


def test_a_peer_of_another_size(start: Any) -> None:
    """It is refused by name, and the request ends: peer_tp was not set."""
    producer = start("p", "producer", **ranks(2))
    consumer = start("d", "consumer")
    try:
        tokens = prompt(2 * BLOCK + 5)
        got = consumer.generate(tokens, producer.prefill(tokens))
        assert (got["reason"], got["tokens"]) == ("error", [])
        assert "tp_size is 2 there and 1 here; peer_tp is" in consumer.output()
    finally:
        producer.close()
        consumer.close()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_rank_of_the_producer_is_killed(start: Any, load: str) -> None:
    """While both ranks of a consumer wait for it. Others go on, and a new producer is found."""
    producer = start("p", "producer", **ranks(2))
    consumer = start("d", "consumer", extra={"load": load, "timeout": FOREVER}, **ranks(2))
    other = start("e", "both", extra={"peers": ["shm://e"]})
    try:
        tokens = prompt(3 * BLOCK + 7, seed=3)
        free, cold = consumer.call("free_blocks"), consumer.generate(tokens)
        consumer.call("forget")
        key = f"late-{time.monotonic_ns()}"
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(consumer.generate, tokens, fetch(key))
            until_waiting(producer, running)
            killed = time.monotonic()
            producer.call("kill_rank", rank=1)
            got = running.result(PATIENCE)
        print(f"{load}: the request ended {1e3 * (time.monotonic() - killed):.0f} ms later")
        assert (got["reason"], got["tokens"]) == ("error", [])
        consumer.call("settle")
        assert consumer.call("free_blocks") == free
        with pytest.raises((RuntimeError, EOFError)):
            producer.prefill(tokens)
        assert other.generate(tokens, other.prefill(tokens))["tokens"] == cold["tokens"]
        producer.close()
        producer = start("p", "producer", **ranks(2))
        assert consumer.generate(tokens, producer.prefill(tokens))["tokens"] == cold["tokens"]
    finally:
        for engine in (producer, consumer, other):
            engine.close()


def fetch(key: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": key, "remote_url": "shm://p"}


def until_waiting(producer: EngineProcess, running: Future[Any]) -> None:
    """Until a reader waits at each rank of the producer."""

    def is_waiting() -> bool:
        assert not running.done(), running.result()
        return bool(producer.call("waiting"))

    until(is_waiting, "the consumer's ranks wait", timeout=PATIENCE)
