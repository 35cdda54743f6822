"""Engines that draft tokens: the layers of a draft model are part of a cache."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from support.vllm.engine_process import BLOCK, prompt
from support.vllm.small_models import make_llama, make_mimo, make_qwen2

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]

LENGTHS = [5, BLOCK, 3 * BLOCK + 5]
TOKENS = 12


@pytest.fixture(scope="module")
def models(model: Path, directory: Path) -> dict[str, Path]:
    """The target of each method, and `other`, a draft model whose tokens are rejected."""
    found = {name: directory / name for name in ("eagle", "mtp", "other")}
    make_llama(found["eagle"], model)
    make_mimo(found["mtp"], model)
    make_qwen2(found["other"], model)
    return {**found, "draft_model": model, "ngram": model}


def config_of(method: str, tokens: int, models: dict[str, Path], draft: str = "") -> dict[str, Any]:
    """An engine's options: its model, and what drafts for it."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
    target = models[method]
    drafts = {"draft_model": models[draft or "draft_model"], "eagle": target / "eagle"}
    if method in drafts:
        config["model"] = str(drafts[method])
    if method == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return {"model": target, "speculative_config": config}


METHODS = [
    ("draft_model", 2, "draft_model"),
    ("draft_model", 2, "other"),
    ("draft_model", 3, "other"),
    ("eagle", 3, ""),
    ("mtp", 2, ""),
    ("ngram", 3, ""),
]


@pytest.mark.parametrize(("method", "drafted", "draft"), METHODS)
def test_as_one_engine_alone(
    start: Any, models: dict[str, Path], method: str, drafted: int, draft: str
) -> None:
    """The same tokens, as many of them drafted and accepted: the draft model's cache is there."""
    config = config_of(method, drafted, models, draft)
    producer, consumer = start("p", "producer", **config), start("d", "consumer", **config)
    try:
        for length in LENGTHS:
            tokens = prompt(length, seed=length)
            before = accepted(consumer)
            expected = consumer.generate(tokens, tokens=TOKENS)
            alone = accepted(consumer) - before
            assert consumer.call("forget")
            got = consumer.generate(tokens, producer.prefill(tokens), tokens=TOKENS)
            assert (got["reason"], got["cached"]) == ("length", length)
            assert got["tokens"] == expected["tokens"]
            assert accepted(consumer) - before - alone == alone
            assert consumer.call("forget")
        assert consumer.count("received") == len(LENGTHS)
        producer.call("settle")
        assert (producer.count("sent"), producer.count("send_failed")) == (len(LENGTHS), 0)
    finally:
        producer.close()
        consumer.close()


@pytest.mark.parametrize("drafting", ["p", "d"])
def test_only_one_side_has_a_draft_model(
    start: Any, models: dict[str, Path], drafting: str
) -> None:
    """One sentence says the cure, on both sides; the request has the tokens of one engine."""
    drafts = {drafting: config_of("draft_model", 2, models, "other")}
    name = f"only-{drafting}"
    producer = start(name, "producer", **drafts.get("p", {}))
    reads = {"policy": "recompute", "extra": {"peers": [f"shm://{name}"]}}
    consumer = start(f"{name}-reads", "consumer", **reads, **drafts.get("d", {}))
    try:
        tokens = prompt(3 * BLOCK + 5, seed=3)
        expected = consumer.generate(tokens, tokens=TOKENS)
        assert consumer.call("forget")
        got = consumer.generate(tokens, producer.prefill(tokens), tokens=TOKENS)
        assert (got["reason"], got["tokens"]) == ("length", expected["tokens"])
        producer.call("settle")
        for engine in (producer, consumer):
            (line,) = [each for each in engine.output().splitlines() if "it drafts with" in each]
            assert "draft_model.model.layers.0.self_attn.attn" in line
            assert "start both engines with the same --speculative-config" in line
    finally:
        producer.close()
        consumer.close()


def accepted(engine: Any) -> float:
    """Drafted tokens that the engine's model has accepted so far."""
    return float(engine.call("metrics")["vllm:spec_decode_num_accepted_tokens"])
