"""Requests that end early, wait, are preempted, or are read by several; blocks always come back."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest

from support.vllm.engine_process import BLOCK, SEND, EngineProcess, prompt

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]

TOKENS = prompt(3 * BLOCK + 7, seed=3)
FEW = 24
"""Blocks of a consumer that must preempt."""


@pytest.fixture(scope="module")
def producer(start: Any) -> Any:
    chunked = {"max_num_batched_tokens": 2 * BLOCK, "enable_chunked_prefill": True}
    engine = start("p", "producer", extra={"ttl": 3600}, **chunked)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def consumer(start: Any, producer: Any) -> Any:
    small = {"num_gpu_blocks_override": FEW, "max_model_len": 512, "enable_prefix_caching": False}
    engine = start("d", "consumer", policy="recompute", extra={"timeout": 20}, **small)
    yield engine
    engine.close()


def test_blocks_stay_until_the_receipt(producer: EngineProcess, consumer: EngineProcess) -> None:
    """A finished prefill keeps its blocks until the reader has let go, and no longer."""
    producer.call("forget")
    free, sent = producer.call("free_blocks"), producer.count("sent")
    params = producer.prefill(TOKENS)
    producer.call("step", times=20)
    assert producer.call("free_blocks") == free - 4
    assert producer.count("sent") == sent
    assert consumer.generate(TOKENS, params)["cached"] == len(TOKENS)
    producer.call("settle")
    assert producer.call("free_blocks") == free
    assert producer.count("sent") == sent + 1


def test_a_request_is_aborted_while_it_waits(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """The consumer's blocks come back at once, not at the deadline."""
    consumer.call("forget")
    free, dropped = consumer.call("free_blocks"), consumer.count("dropped")
    failed = consumer.count("load_failed")
    key = f"never-{time.monotonic_ns()}"
    params = {"do_remote_prefill": True, "transfer_id": key}
    consumer.call("add", name=key, prompt=TOKENS, params=params)
    consumer.call("step", times=20)
    assert consumer.call("free_blocks") == free - 4
    consumer.call("abort", name=key)
    consumer.call("settle")
    assert consumer.call("free_blocks") == free
    assert consumer.count("dropped") == dropped + 1
    assert consumer.count("load_failed") == failed, "it waited for its deadline"


def test_a_request_is_aborted_before_it_is_scheduled(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """Its producer is told, and frees its blocks long before the ttl."""
    free = producer.call("free_blocks")
    params = producer.prefill(TOKENS)
    consumer.call("add", name="unborn", prompt=TOKENS, params=params)
    consumer.call("abort", name="unborn")
    consumer.call("settle")
    producer.call("settle")
    assert producer.call("free_blocks") == free
    assert "the request ended before it was scheduled" in producer.output()


def test_a_preempted_request_is_computed_again(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """Too few blocks for two long answers: one is preempted after its cache was fetched."""
    consumer.call("forget")
    prompts = [prompt(4 * BLOCK + 5, seed=seed) for seed in (31, 32)]
    cold = [consumer.generate(tokens, tokens=250)["tokens"] for tokens in prompts]
    consumer.call("forget")
    before, received = consumer.call("preemptions"), consumer.count("received")
    failed = consumer.count("load_failed")
    for number, tokens in enumerate(prompts):
        params = producer.prefill(tokens)
        consumer.call("add", name=f"long-{number}", prompt=tokens, params=params, tokens=250)
    over = consumer.call("run", names=["long-0", "long-1"])
    assert [over[f"long-{number}"]["tokens"] for number in (0, 1)] == cold
    assert consumer.call("preemptions") > before
    assert consumer.count("received") == received + 2
    assert consumer.count("load_failed") == failed, "a cache is not asked for again"
    producer.call("settle")


def test_a_prefill_is_aborted_between_its_chunks(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """Its reader learns it at once, and computes the prompt itself."""
    consumer.call("forget")
    tokens = prompt(12 * BLOCK, seed=41)
    cold = consumer.generate(tokens)["tokens"]
    consumer.call("forget")
    key = f"half-{time.monotonic_ns()}"
    free = producer.call("free_blocks")
    producer.call("add", name=key, prompt=tokens, params={**SEND, "transfer_id": key}, tokens=1)
    producer.call("step", times=2)
    producer.call("abort", name=key)
    producer.call("settle")
    assert producer.call("free_blocks") == free
    failed = consumer.count("load_failed")
    got = consumer.generate(tokens, {"do_remote_prefill": True, "transfer_id": key})
    assert (got["tokens"], got["reason"]) == (cold, "length")
    assert consumer.count("load_failed") == failed + 1


def test_several_decode_engines(start: Any, producer: EngineProcess, consumer: Any) -> None:
    """Two readers of one prefill, each an engine of its own."""
    consumer.call("forget")
    cold = consumer.generate(TOKENS)["tokens"]
    consumer.call("forget")
    free = producer.call("free_blocks")
    params = producer.prefill(TOKENS, readers=2)
    other = start("d2", "consumer", extra={"load": "sync"})
    try:
        first = consumer.generate(TOKENS, params)
        producer.call("step", times=5)
        assert producer.call("free_blocks") < free
        second = other.generate(TOKENS, params)
    finally:
        other.close()
    assert first["tokens"] == second["tokens"] == cold
    assert (first["cached"], second["cached"]) == (len(TOKENS), 3 * BLOCK)
    producer.call("settle")
    assert producer.call("free_blocks") == free
