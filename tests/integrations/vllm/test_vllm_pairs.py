"""Engines that do not fit each other, and engines that do both."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVLink, TransferFailed
from omni_kvlink.lowlevel import begin_get
from support import FOLDER
from support.vllm.engine_process import BLOCK, prompt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]

TOKENS = prompt(3 * BLOCK + 7, seed=3)


def test_blocks_of_another_kind_are_refused(start: Any, model: Path) -> None:
    """Both sides are named, on both sides; the engine goes on."""
    producer = start("p", "producer", dtype="bfloat16")
    consumer = start("d", "consumer", extra={"model": "qwen"})
    try:
        got = consumer.generate(TOKENS, producer.prefill(TOKENS))
        assert (got["reason"], got["tokens"]) == ("error", [])
        for output in (
            "the blocks of shm://p do not fit this engine",
            f"model is '{model}' there and 'qwen' here",
            "dtype is 'bfloat16' there and 'float32' here",
            "block_nbytes is 16384 there and 32768 here",
        ):
            assert output in consumer.output()
        producer.call("settle")
        assert "dtype is 'bfloat16' there and 'float32' here" in producer.output()
        assert consumer.generate(TOKENS)["reason"] == "length"
    finally:
        producer.close()
        consumer.close()


@pytest.mark.skipif(
    # vLLM asks torch by this name; there is no public one.
    not torch.cpu._is_avx512_supported(),
    reason="this processor has no AVX-512: vLLM has no fp8 cache then",
)
def test_a_quantized_cache_is_loaded_by_the_same_scales_only(start: Any) -> None:
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8", "extra": {"load": "sync"}}
    script = FOLDER / "vllm" / "scaled.py"
    producer = start("p", "producer", kv_cache_dtype="fp8")
    engines = [start("d", "consumer", **fp8), start("e", "consumer", script=script, **fp8)]
    try:
        for engine, reason in zip(engines, ("length", "error"), strict=True):
            engine.generate(TOKENS)
            local = engine.generate(TOKENS)
            assert (local["cached"], engine.call("forget")) == (3 * BLOCK, True)
            got = engine.generate(TOKENS, producer.prefill(TOKENS))
            assert got["reason"] == reason
            assert engine.count("received") == (reason == "length")
            if reason == "length":
                assert (got["cached"], got["logprobs"]) == (3 * BLOCK, local["logprobs"])
        (line,) = {one for one in engines[1].output().splitlines() if "do not fit" in one}
        assert "this engine: kv_scales is '" in line
    finally:
        for engine in (producer, *engines):
            engine.close()


def test_nobody_comes(start: Any) -> None:
    """After its ttl a cache is given up; the blocks are not stranded."""
    producer = start("p", "producer", extra={"ttl": 2})
    try:
        free, began = producer.call("free_blocks"), time.monotonic()
        producer.prefill(TOKENS)
        producer.call("settle")
        assert time.monotonic() - began > 1.9
        assert producer.call("free_blocks") == free
        assert producer.count("send_expired") == 1
        assert "its time to live passed with 1 readers missing" in producer.output()
    finally:
        producer.close()


def test_no_room(start: Any, directory: Path) -> None:
    """A forward pass does not wait for memory: the reader is told, and the engine goes on."""
    serve = {"quota": 400_000, "directory": str(directory)}
    producer = start("p", "producer", extra={"serve": serve, "delay_free": False})
    consumer = start(
        "d", "consumer", policy="recompute", extra={"connect": {"directory": str(directory)}}
    )
    try:
        cold = consumer.generate(TOKENS)["tokens"]
        consumer.call("forget")
        first, second = (producer.prefill(TOKENS) for _ in range(2))
        assert producer.call("settle") < 5, "blocks were held although delay_free is off"
        assert consumer.generate(TOKENS, second)["tokens"] == cold
        assert "it could not be saved: CapacityError" in consumer.output()
        assert consumer.count("load_failed") == 1
        consumer.call("forget")
        assert consumer.generate(TOKENS, first)["cached"] == len(TOKENS)
        assert consumer.count("received") == 1
    finally:
        producer.close()
        consumer.close()


def test_engines_that_do_both(start: Any) -> None:
    """Each prefills for the other; a cache that was fetched can be sent on."""
    one = start("one", "both", extra={"peers": ["shm://two"]})
    two = start("two", "both", extra={"peers": ["shm://one"], "load": "sync"})
    try:
        for here, there in ((one, two), (two, one)):
            tokens = prompt(2 * BLOCK + 9, seed=ord(here.log.name[0]))
            cold = here.generate(tokens)["tokens"]
            here.call("forget")
            got = here.generate(tokens, there.prefill(tokens))
            assert got["tokens"] == cold
            assert got["cached"] >= 2 * BLOCK
            there.call("settle")
        tokens = prompt(4 * BLOCK + 1, seed=55)
        cold = one.generate(tokens)["tokens"]
        one.call("forget")
        fetched = one.prefill(tokens)
        onward = two.generate(tokens, {**fetched, "do_remote_decode": True}, tokens=1)["params"]
        assert onward["remote_url"] == "shm://two"
        one.call("settle")
        one.call("forget")
        assert one.generate(tokens, onward)["tokens"] == cold
    finally:
        one.close()
        two.close()


def test_what_was_not_loaded_is_not_sent_on(start: Any, directory: Path) -> None:
    """A flipped bit on the way in: the request is computed here, its reader gets no wrong cache."""
    flips = FOLDER / "vllm" / "flipping.py"
    producer = start("p", "producer", extra={"url": "flip://p"}, script=flips)
    relay = start("relay", "both", policy="recompute", extra={"load": "sync"})
    try:
        cold = relay.generate(TOKENS, tokens=1)["tokens"]
        relay.call("forget")
        producer.prefill(TOKENS, transfer_id="bad")
        both = {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "bad"}
        with KVLink.connect("shm://relay", timeout=5, directory=str(directory)) as reader:
            pending = begin_get(reader, "bad", timeout=5)
            assert relay.generate(TOKENS, both, tokens=1)["tokens"] == cold
            with pytest.raises(TransferFailed, match=r"its blocks .* were not loaded"):
                pending.wait(timeout=5)
        relay.call("settle")
        assert relay.count("load_corrupt") == relay.count("send_failed") == 1
    finally:
        producer.close()
        relay.close()
