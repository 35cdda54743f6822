"""Requests that end early, wait, are preempted, or are read by several; blocks always come back."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest
from vllm_fixtures import BLOCK, SEND, EngineProcess, prompt

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(300),
]

TOKENS = prompt(3 * BLOCK + 7, seed=3)
FEW = 24
"""Blocks of a consumer that must preempt."""


@pytest.fixture(scope="module")
def producer(start: Any) -> Any:
    chunked = {"max_num_batched_tokens": 2 * BLOCK, "enable_chunked_prefill": True}
    engine = start("p", "producer", **chunked)
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
    producer.do("forget")
    free, sent = producer.do("free_blocks"), producer.count("sent")
    params = producer.prefill(TOKENS)
    producer.do("step", times=20)
    assert producer.do("free_blocks") == free - 4
    assert producer.count("sent") == sent
    assert consumer.generate(TOKENS, params)["cached"] == len(TOKENS)
    producer.do("settle")
    assert producer.do("free_blocks") == free
    assert producer.count("sent") == sent + 1


def test_a_request_is_aborted_while_it_waits(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """The consumer's blocks come back at once, not at the deadline."""
    consumer.do("forget")
    free, dropped = consumer.do("free_blocks"), consumer.count("dropped")
    key = f"never-{time.monotonic_ns()}"
    params = {"do_remote_prefill": True, "transfer_id": key}
    consumer.do("add", name=key, prompt=TOKENS, params=params)
    consumer.do("step", times=20)
    assert consumer.do("free_blocks") == free - 4
    began = time.monotonic()
    consumer.do("abort", name=key)
    consumer.do("settle")
    assert time.monotonic() - began < 5
    assert consumer.do("free_blocks") == free
    assert consumer.count("dropped") == dropped + 1


def test_a_request_is_aborted_before_it_is_scheduled(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """Its producer is told, and frees its blocks long before the ttl."""
    free = producer.do("free_blocks")
    params = producer.prefill(TOKENS)
    consumer.do("add", name="unborn", prompt=TOKENS, params=params)
    consumer.do("abort", name="unborn")
    began = time.monotonic()
    consumer.do("settle")
    producer.do("settle")
    assert time.monotonic() - began < 4
    assert producer.do("free_blocks") == free
    assert "the request ended before it was scheduled" in producer.output()


def test_a_preempted_request_is_computed_again(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """Too few blocks for two long answers: one is preempted after its cache was fetched."""
    consumer.do("forget")
    prompts = [prompt(4 * BLOCK + 5, seed=seed) for seed in (31, 32)]
    cold = [consumer.generate(tokens, tokens=250)["tokens"] for tokens in prompts]
    consumer.do("forget")
    before, received = consumer.do("preemptions"), consumer.count("received")
    failed = consumer.count("load_failed")
    for number, tokens in enumerate(prompts):
        params = producer.prefill(tokens)
        consumer.do("add", name=f"long-{number}", prompt=tokens, params=params, tokens=250)
    over = consumer.do("run", names=["long-0", "long-1"])
    assert [over[f"long-{number}"]["tokens"] for number in (0, 1)] == cold
    assert consumer.do("preemptions") > before
    assert consumer.count("received") == received + 2
    assert consumer.count("load_failed") == failed, "a cache is not asked for again"
    producer.do("settle")


def test_a_prefill_is_aborted_between_its_chunks(
    producer: EngineProcess, consumer: EngineProcess
) -> None:
    """Its reader learns it at once, and computes the prompt itself."""
    consumer.do("forget")
    tokens = prompt(12 * BLOCK, seed=41)
    cold = consumer.generate(tokens)["tokens"]
    consumer.do("forget")
    key = f"half-{time.monotonic_ns()}"
    free = producer.do("free_blocks")
    producer.do("add", name=key, prompt=tokens, params={**SEND, "transfer_id": key}, tokens=1)
    producer.do("step", times=2)
    producer.do("abort", name=key)
    producer.do("settle")
    assert producer.do("free_blocks") == free
    failed = consumer.count("load_failed")
    got = consumer.generate(tokens, {"do_remote_prefill": True, "transfer_id": key})
    assert (got["tokens"], got["reason"]) == (cold, "length")
    assert consumer.count("load_failed") == failed + 1


def test_several_decode_engines(start: Any, producer: EngineProcess, consumer: Any) -> None:
    """Two readers of one prefill, each an engine of its own."""
    consumer.do("forget")
    cold = consumer.generate(TOKENS)["tokens"]
    consumer.do("forget")
    free = producer.do("free_blocks")
    params = producer.prefill(TOKENS, readers=2)
    other = start("d2", "consumer", extra={"load": "sync"})
    try:
        first = consumer.generate(TOKENS, params)
        producer.do("step", times=5)
        assert producer.do("free_blocks") < free
        second = other.generate(TOKENS, params)
    finally:
        other.close()
    assert first["tokens"] == second["tokens"] == cold
    assert (first["cached"], second["cached"]) == (len(TOKENS), 3 * BLOCK)
    producer.do("settle")
    assert producer.do("free_blocks") == free
