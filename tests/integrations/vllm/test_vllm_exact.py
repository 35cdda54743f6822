"""A fetched cache is as good as a local one: the oracle is the same engine's prefix-cache hit."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from support.vllm.engine_process import BLOCK, EngineProcess, oracle, prompt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]

LENGTHS = [5, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 9]
"""Shorter than a block, exactly one, one more, several."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def producer(start: Any, dtype: str) -> Any:
    engine = start("p", "producer", dtype=dtype)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["sync", "async"])
def consumer(request: pytest.FixtureRequest, start: Any, producer: Any, dtype: str) -> Any:
    engine = start("d", "consumer", extra={"load": request.param}, dtype=dtype)
    engine.load = request.param
    yield engine
    engine.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_as_a_local_prefix_cache_hit(
    producer: EngineProcess, consumer: Any, length: int, dtype: str
) -> None:
    """Synchronous: bit for bit. Asynchronous, where only the last token is computed: as near."""
    tokens = prompt(length, seed=length)
    expected = oracle(consumer, tokens)
    before = consumer.count("received")
    got = consumer.generate(tokens, producer.prefill(tokens))
    here = (length - 1) // BLOCK * BLOCK if consumer.load == "sync" else length
    assert (got["reason"], got["cached"]) == ("length", here)
    assert consumer.count("received") - before == (here > 0)
    assert got["tokens"] == expected["tokens"]
    apart = [abs(a - b) for a, b in zip(got["logprobs"], expected["logprobs"], strict=True)]
    if consumer.load == "sync":
        assert got["logprobs"] == expected["logprobs"]
    elif dtype == "float32":
        assert max(apart) < 1e-4
    else:  # one rounding of bfloat16, at log-probabilities of about 4
        assert max(apart) < 0.04
    assert producer.call("settle") >= 0
    assert consumer.call("forget")


def test_with_a_part_of_the_prompt_in_the_prefix_cache(
    producer: EngineProcess, consumer: Any
) -> None:
    """Only the blocks that are missing are fetched into; those that are shared stay."""
    tokens = prompt(4 * BLOCK + 3, seed=77)
    expected = oracle(consumer, tokens)
    consumer.generate(tokens[: 2 * BLOCK + 1])
    got = consumer.generate(tokens, producer.prefill(tokens))
    assert got["cached"] >= 4 * BLOCK
    assert got["tokens"] == expected["tokens"]
    if consumer.load == "sync":
        assert got["logprobs"] == expected["logprobs"]
    again = consumer.generate(tokens)
    assert again["tokens"] == expected["tokens"]
    assert again["cached"] == 4 * BLOCK
    assert consumer.call("forget")


def test_the_decoding_request_comes_first(producer: EngineProcess, consumer: Any) -> None:
    """Both sides are given one name; a forward pass waits for the layers that it needs."""
    tokens = prompt(5 * BLOCK + 3, seed=21)
    expected = oracle(consumer, tokens)
    key = f"early-{time.monotonic_ns()}"
    with ThreadPoolExecutor(1) as thread:
        requested = {"do_remote_prefill": True, "transfer_id": key}
        decoding = thread.submit(consumer.generate, tokens, requested)
        deadline = time.monotonic() + 20
        while not producer.call("waiting"):
            assert time.monotonic() < deadline, "nobody asked for the cache"
        producer.prefill(tokens, transfer_id=key)
        got = decoding.result(60)
    assert got["tokens"] == expected["tokens"]
    if consumer.load == "sync":
        assert got["logprobs"] == expected["logprobs"]
    assert got["cached"] >= 5 * BLOCK
    assert consumer.call("forget")


def test_many_at_once(producer: EngineProcess, consumer: Any) -> None:
    """A batch of prompts, some of whose caches come, some of which are computed here."""
    prompts = [prompt(20 + 17 * number, seed=number) for number in range(8)]
    expected = [oracle(consumer, tokens)["tokens"] for tokens in prompts]
    names = [f"batch-{number}" for number in range(8)]
    for number, (name, tokens) in enumerate(zip(names, prompts, strict=True)):
        params = producer.prefill(tokens) if number % 3 else None
        consumer.call("add", name=name, prompt=tokens, params=params)
    over = consumer.call("run", names=names)
    assert [over[name]["tokens"] for name in names] == expected
    assert consumer.call("forget")


def test_a_prompt_of_embeddings(start: Any) -> None:
    """Its cache is loaded for these embeddings, and refused for others of the same number."""
    producer = start("ep", "producer", enable_prompt_embeds=True)
    peers = {"peers": ["shm://ep"]}
    consumer = start("ed", "consumer", extra=peers, enable_prompt_embeds=True)
    try:
        length = [0] * (3 * BLOCK + 7)
        expected = consumer.generate(length, embeds=1)
        assert consumer.call("forget")
        got = consumer.generate(length, producer.prefill(length, inputs={"embeds": 1}), embeds=1)
        assert (got["cached"], got["tokens"]) == (len(length), expected["tokens"])
        other = consumer.generate(length, producer.prefill(length, inputs={"embeds": 1}), embeds=2)
        assert other["reason"] == "error"
        assert "from another prompt: other embeds" in consumer.output()
        assert consumer.count("received") == 1
    finally:
        producer.close()
        consumer.close()


def test_over_another_link(start: Any, model: Path, directory: Path) -> None:
    """ZMQ, prompts in chunks, and engines whose core is a process of its own."""
    url, apart = f"zmq+ipc://{directory}/z", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    sends = {"url": url, "serve": {}}
    chunked = {"max_num_batched_tokens": 2 * BLOCK, "enable_chunked_prefill": True}
    producer = start("zp", "producer", extra=sends, **chunked)
    fetches = {"peers": [url], "connect": {}}
    consumer = start("zd", "consumer", extra=fetches, env=apart)
    try:
        tokens = prompt(7 * BLOCK + 5, seed=5)
        expected = consumer.generate(tokens)
        assert consumer.call("forget")
        got = consumer.generate(tokens, producer.prefill(tokens))
        assert got["cached"] == len(tokens)
        assert got["tokens"] == expected["tokens"]
    finally:
        producer.close()
        consumer.close()
