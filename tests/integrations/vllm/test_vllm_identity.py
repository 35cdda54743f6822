"""A cache is loaded only for the inputs, and by the model, that it was computed with."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

import torch
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from omni_kvlink.integrations.vllm import identity, pools
from omni_kvlink.integrations.vllm.identity import model_identity, prompt_identity
from support.vllm.engine_process import prompt
from support.vllm.steps import BLOCK, SteppedEngine

if TYPE_CHECKING:
    from pathlib import Path

# Reaches into _k_scale, _k_scale_float, _v_scale, _v_scale_float: vLLM's attention layers have no
# public name for their scales.

TOKENS = prompt(2 * BLOCK + 7, seed=3)
OTHER = [*TOKENS[:-1], TOKENS[-1] + 1]
Open = Callable[..., SteppedEngine]


def media(identifier: str = "cat", offset: int = 3, length: int = 4) -> list[MultiModalFeatureSpec]:
    position = PlaceholderRange(offset=offset, length=length)
    return [MultiModalFeatureSpec(None, "image", identifier, position)]


INPUTS: dict[str, Any] = {"cache_salt": "a"}
"""Of a scheduled request; media would need an encoder. For adapters: `test_vllm_adapters.py`."""

CHANGED: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "b"},
    "no salt": {"cache_salt": None},
}
MEDIA: dict[str, dict[str, Any]] = {
    "media's content": {"mm_features": media("dog")},
    "media's position": {"mm_features": media(offset=4)},
    "media's length": {"mm_features": media(length=5)},
    "no media": {"mm_features": None},
}


def field_of(change: str) -> str:
    return change.removeprefix("no ").partition("'")[0]


def request(tokens: list[int] = TOKENS, **inputs: Any) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **inputs)


@pytest.mark.parametrize("change", [*CHANGED, *MEDIA, "tokens", "adapter", "no adapter"])
def test_each_input_counts(change: str) -> None:
    """In a field of its own, beside vLLM's keys, which have only some of them."""
    inputs = {**INPUTS, "mm_features": media()}
    tokens = OTHER if change == "tokens" else TOKENS
    adapter = {"adapter": "other", "no adapter": ""}.get(change, "a")
    other = request(tokens, **{**inputs, **{**CHANGED, **MEDIA}.get(change, {})})
    here, there = prompt_identity(request(**inputs), "a"), prompt_identity(other, adapter)
    changed = {name for name in here if here[name] != there[name]}
    assert changed - {"extra"} == {field_of(change)}
    assert prompt_identity(request(**inputs), "a") == here


@pytest.mark.parametrize("change", ["values", "dtype", "shape", "none"])
def test_each_embedding_of_a_prompt_counts(change: str) -> None:
    rows = torch.randn(40, 8)
    others: dict[str, Any] = {
        "values": torch.cat([rows[:-1], rows[-1:] + 1]),
        "dtype": rows.view(torch.int32),
        "shape": rows.view(40, 4, 2),
        "none": None,
    }
    tokens: Any = None
    here = prompt_identity(request(tokens, prompt_embeds=rows))
    theirs = request([0] * 40 if change == "none" else tokens, prompt_embeds=others[change])
    there = prompt_identity(theirs)
    assert {name for name in here if here[name] != there.get(name)} == {"embeds"}
    assert prompt_identity(request(tokens, prompt_embeds=rows.clone())) == here
    assert prompt_identity(request(tokens, prompt_embeds=others["values"]), tokens=39) == (
        prompt_identity(request(tokens, prompt_embeds=rows), tokens=39)
    )


@pytest.mark.parametrize("adapter", [LoRARequest("m", 1, "/l"), LoRARequest("l", 2, "/m"), None])
def test_what_is_local_to_a_process_does_not_count(adapter: LoRARequest | None) -> None:
    """The name, number and path of an adapter whose weights are the same."""
    here = request(lora_request=LoRARequest("l", 1, "/l"))
    assert prompt_identity(request(lora_request=adapter), "a") == prompt_identity(here, "a")


def test_what_a_version_of_vllm_adds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = prompt_identity(request())
    monkeypatch.setattr(identity, "generate_block_hash_extra_keys", lambda *_: (("new",), 0))
    there = prompt_identity(request())
    assert {name for name in here if here[name] != there[name]} == {"extra"}


@pytest.mark.parametrize("change", [*CHANGED, "tokens"])
def test_a_cache_of_other_inputs_is_refused(
    engine: Open, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """By the name of the field; a request with the same inputs beside it has its cache."""
    producer, consumer = engine("producer"), engine("consumer")
    wrong = producer.prefill("wrong", TOKENS, inputs=INPUTS)
    right = producer.prefill("right", TOKENS, inputs=INPUTS)
    tokens = OTHER if change == "tokens" else TOKENS
    consumer.add("wrong", tokens, wrong, **{**INPUTS, **CHANGED.get(change, {})})
    assert consumer.run("wrong") == ["error"]
    (text,) = {one.getMessage() for one in caplog.records if "another prompt" in one.getMessage()}
    assert field_of(change) in text.partition("from another prompt: other ")[2].split(", ")
    consumer.add("right", TOKENS, right, **INPUTS)
    assert consumer.run("right") == ["length"]
    assert consumer.counts["received"] == 1
    consumer.settle()
    producer.settle()
    assert (consumer.used_blocks, producer.used_blocks) == (0, 0)


MODEL = {
    "revision": "main",
    "quantization": "fp8",
    "rope": "{}",
    "compute_dtype": "bfloat16",
    "cache_dtype": "fp8_e5m2",
    "kv_scales": "0" * 64,
    "model": "another",
}


@pytest.mark.parametrize("name", MODEL)
def test_a_cache_of_another_model_is_refused(
    engine: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def changed(*arguments: Any) -> dict[str, Any]:
        return {**model_identity(*arguments), name: MODEL[name]}

    with monkeypatch.context() as patch:
        patch.setattr(pools, "model_identity", changed)
        producer = engine("producer")
    consumer = engine("consumer")
    consumer.add("r", TOKENS, producer.prefill("r", TOKENS))
    assert consumer.run("r") == ["error"]
    assert f"{name} is {MODEL[name]!r} there and" in caplog.text


def test_what_the_model_is(model: Path) -> None:
    """Each part of vLLM's settings that decides a cache's values, in a field of its own."""

    def config() -> VllmConfig:
        return VllmConfig(
            model_config=ModelConfig(model=str(model), max_model_len=512, dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK),
        )

    def changed(change: Callable[[VllmConfig], object]) -> set[str]:
        other = config()
        change(other)
        here, there = model_identity(config(), ""), model_identity(other, "")
        return {name for name in here if here[name] != there[name]}

    assert changed(lambda it: None) == set()
    assert changed(lambda it: setattr(it.model_config, "model", "m")) == {"model"}
    assert changed(lambda it: setattr(it.model_config, "revision", "r")) == {"revision"}
    assert changed(lambda it: setattr(it.model_config, "quantization", "q")) == {"quantization"}
    assert changed(lambda it: setattr(it.model_config, "dtype", torch.half)) == {"compute_dtype"}
    assert changed(lambda it: setattr(it.cache_config, "cache_dtype", "fp8")) == {"cache_dtype"}
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    assert changed(lambda it: setattr(it.model_config.hf_text_config, "rope_parameters", rope)) == {
        "rope"
    }
    named = config()
    named.model_config.revision = "r"
    assert model_identity(named, "w")["model"] == "w"
    assert model_identity(named, "w")["revision"] == "", "the name says which weights"


@pytest.mark.parametrize(
    "field", ["rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"]
)
def test_each_field_of_the_positions_counts(field: str) -> None:
    """Which of them a model's configuration has depends on the version of transformers."""

    def rope(value: float) -> Any:
        text = SimpleNamespace(**{field: value})
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                model="m", revision="", quantization="", dtype=torch.half, hf_text_config=text
            ),
            speculative_config=None,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        return model_identity(config, "")["rope"]

    assert rope(1.0) != rope(2.0)


@pytest.fixture
def scales_of(model: Path) -> Callable[..., str]:
    """`scales_of(dtype, change)`: of two layers, the second one changed."""

    def scales_of(
        dtype: Any, change: Callable[[Any], object] = lambda layer: None, **cache: Any
    ) -> str:
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), max_model_len=512, dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK, cache_dtype=dtype, **cache),
        )
        with set_current_vllm_config(config):
            names = [f"layers.{number}.attn" for number in range(2)]
            layers: list[Any] = [
                Attention(4, 32, 1.0, 2, cache_config=config.cache_config, prefix=name)
                for name in names
            ]
        layers[0]._k_scale.fill_(0.5)
        change(layers[1])
        found: str = model_identity(config, "")["kv_scales"]
        return found

    return scales_of


SCALES: dict[str, Callable[[Any], object]] = {
    "k": lambda layer: layer._k_scale.fill_(0.5),
    "v": lambda layer: layer._v_scale.fill_(0.5),
    "k, one bit": lambda layer: layer._k_scale.fill_(1 + 2**-23),
    "k of the host": lambda layer: setattr(layer, "_k_scale_float", 0.5),
    "v of the host": lambda layer: setattr(layer, "_v_scale_float", 0.5),
    "k of each head": lambda layer: setattr(layer, "_k_scale", torch.tensor([0.5, 1.0])),
    "k of other heads": lambda layer: setattr(layer, "_k_scale", torch.tensor([1.0, 0.5])),
}


def test_each_scale_of_a_quantized_cache_counts(scales_of: Callable[..., str]) -> None:
    """Of vLLM's own attention layers, as its loader of weights would leave them."""
    plain = scales_of("fp8")
    assert len(plain) == 64
    assert scales_of("fp8") == plain
    digests = {scales_of("fp8", change) for change in SCALES.values()}
    assert len(digests | {plain}) == len(SCALES) + 1
    assert scales_of("fp8", kv_cache_dtype_skip_layers=["1"]) not in digests | {plain, ""}


def test_a_plain_cache_has_no_scales(scales_of: Callable[..., str]) -> None:
    assert {scales_of("auto", change) for change in SCALES.values()} == {""}


def test_vllm_computes_no_scales_in_a_forward_pass() -> None:
    """As its former option `calculate_kv_scales` did; the digest is taken before the first pass."""
    names = {field.name for field in dataclasses.fields(CacheConfig)}
    assert "cache_dtype" in names
    assert not {name for name in names if "scales" in name}


def test_another_version_of_vllm(
    engine: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, unless the settings accept it; the log says that they do, once."""
    with monkeypatch.context() as patch:
        patch.setattr("vllm.__version__", "0.29.9")
        producer = engine("producer")
    refusing = engine("consumer")
    refusing.add("r", TOKENS, producer.prefill("r", TOKENS))
    assert refusing.run("r") == ["error"]
    assert "vllm is '0.29.9' there and" in caplog.text
    # Another test of this process may have had the warning.
    pools._warn_once.cache_clear()
    caplog.clear()
    accepting = engine("consumer", compatible_with=["0.29.9"])
    for name in ("first", "second"):
        accepting.add(name, TOKENS, producer.prefill(name, TOKENS))
        assert accepting.run(name) == ["length"]
        accepting.settle()
        accepting.scheduler.reset_prefix_cache()
    assert accepting.counts["received"] == 2
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    (line,) = [one.getMessage() for one in warnings if "compatible_with" in one.getMessage()]
    assert "shm://p has vLLM 0.29.9" in line
