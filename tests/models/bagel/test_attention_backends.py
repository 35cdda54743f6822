"""Attention backends: each computes what the default one does, by the kernel that its name says.

flash-attn, xFormers and SageAttention have kernels for GPUs alone. Here small modules stand for
them, whose functions compute with plain torch what the packages document; the tests marked `gpu`
run the packages themselves.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from omni_kvlink import UnavailableError
from omni_kvlink.models.bagel import BagelContext, BagelPipeline, attention_backends
from omni_kvlink.models.bagel.attention import attend
from omni_kvlink.models.bagel.attention_backends import attention_backend, check_attention_backend
from omni_kvlink.models.bagel.prefill_steps import NextToken, PromptTokens, TextPass
from omni_kvlink.models.bagel.sequence import SequenceSplit
from omni_kvlink.models.bagel.shards import Split
from omni_kvlink.models.bagel.tiny import tiny_config

from .conftest import stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from omni_kvlink.models.bagel.attention import DenseAttention

# Reaches into _BACKENDS: a name is given out as a function only where its package and its device
# are.

CPU, LLM = torch.device("cpu"), tiny_config().llm
ROUNDING = 1e-5
"""Of the largest value, in float32."""
KERNELS = {
    "SDPA_MATH": "aten::_scaled_dot_product_attention_math",
    "SDPA_FLASH": "aten::_scaled_dot_product_flash_attention_for_cpu",
}
"""Those that the CPU has, and the profiler's names for them."""
PACKAGES = {
    "FLASH_ATTN": ("flash_attn", "flash-attn"),
    "XFORMERS": ("xformers.ops", "xformers"),
    "SAGE_ATTN": ("sageattention", "sageattention"),
}
FORMS = [(1, 1, True), (1, 40, True), (33, 33, True), (7, 40, True), (7, 40, False), (7, 7, False)]
"""Queries, keys, and whether the queries are causal."""


def on_cpu(name: str, dtype: torch.dtype = torch.float32) -> DenseAttention:
    return attention_backend(name, LLM, CPU, dtype)


def rows(n: int, m: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v of the tiny model's heads."""
    random = torch.Generator().manual_seed(100 * n + m)
    shapes = ((n, 4, 16), (m, 2, 16), (m, 2, 16))
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def gap(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


# ---- kernels of torch


@pytest.mark.parametrize(("n", "m", "causal"), FORMS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_the_default_attention(name: str, n: int, m: int, causal: bool) -> None:
    given = rows(n, m)
    assert gap(on_cpu(name)(*given, causal=causal), attend(*given, causal=causal)) < ROUNDING
    short = rows(n, m, torch.bfloat16)
    found = on_cpu(name, torch.bfloat16)(*short, causal=causal)
    assert found.dtype == torch.bfloat16
    assert gap(found.float(), attend(*given, causal=causal)) < 0.02


class Model:
    """A pipeline, and each of its passes."""

    def __init__(self, pipeline: BagelPipeline) -> None:
        self.pipeline = pipeline

    def text(self) -> BagelContext:
        """A text alone, and one after it: its causal queries are the last of more tokens."""
        context = self.pipeline.empty_context()
        for count in (1, 9, 5):
            context = self.pipeline.append_text(context, [*range(60, 60 + count)])
        return context

    def image(self) -> BagelContext:
        return self.pipeline.append_vae_latent(self.text(), torch.full((4, 8, 8), 0.3))

    def texts(self) -> BagelContext:
        """The text that is continued, of several that are read in one pass."""
        passes: list[TextPass] = [
            NextToken(self.text(), 17),
            PromptTokens(self.text(), [*range(80, 92)]),
        ]
        return self.pipeline.advance(passes)[1][0]

    @torch.no_grad()
    def flow(self, batch: bool) -> Tensor:
        shape = (8, 2, 64) if batch else (8, 64)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        contexts = [self.text(), self.image()] if batch else self.image()
        return self.pipeline.model.velocity(contexts, noise)


ROUTES: dict[str, Callable[[Model], Any]] = {
    "text": Model.text,
    "image": Model.image,
    "texts": Model.texts,
    "flow": partial(Model.flow, batch=False),
    "flows": partial(Model.flow, batch=True),
}


@pytest.fixture
def model(exact: BagelPipeline) -> Iterator[Model]:
    """The session's pipeline, whose attention is the default one before and after."""
    yield Model(exact)
    exact.model.set_attention(attend)


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [tensor for layer in range(3) for tensor in stored(found, layer)]


def operators(run: Callable[[], Any]) -> set[str]:
    """The operators of attention that ran."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    return {each.key for each in recorded.key_averages() if "scaled_dot_product" in each.key}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_model_computes_the_same_by_the_kernel_that_was_set(
    model: Model, name: str, route: str
) -> None:
    run = partial(ROUTES[route], model)
    expected = tensors(run())
    model.pipeline.model.set_attention(on_cpu(name))
    assert operators(run) == {KERNELS[name]}
    for ours, theirs in zip(tensors(run()), expected, strict=True):
        assert gap(ours, theirs) < ROUNDING


def test_two_models_of_a_process_differ(model: Model, checkpoint: Path) -> None:
    """And without a setting a model calls SDPA itself."""
    other = Model(BagelPipeline.from_pretrained(checkpoint, dtype=torch.float32))
    other.pipeline.model.set_attention(on_cpu("SDPA_MATH"))
    assert operators(other.text) == {KERNELS["SDPA_MATH"]}
    assert "aten::scaled_dot_product_attention" in operators(model.text)


class Calls(TorchDispatchMode):
    """Records the operators that run, and torch's own switches of kernels meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.switches: set[tuple[bool, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own: Any = torch.backends.cuda
        kernels = (own.math_sdp_enabled, own.flash_sdp_enabled, own.mem_efficient_sdp_enabled)
        self.switches.add(tuple(is_enabled() for is_enabled in kernels))
        self.names.append(str(func))
        out: Any = func(*args, **(kwargs or {}))
        return out


@pytest.mark.parametrize("name", KERNELS)
def test_torchs_switches_stay(name: str) -> None:
    """They are the process's: another thread, with another model, would see them, too."""
    dense = on_cpu(name)
    with Calls() as calls:
        dense(*rows(3, 8), causal=True)
    assert calls.switches == {(True, True, True)}


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize(("n", "m", "causal"), FORMS)
def test_operators_of_a_gpu_take_these_arguments(kernel: str, n: int, m: int, causal: bool) -> None:
    """With tensors that have shapes alone: no kernel runs."""
    dense = attention_backends._BACKENDS[f"SDPA_{kernel.upper()}"].load()
    given = [t.to("meta", torch.bfloat16) for t in rows(n, m)]
    with Calls() as calls:
        out = dense(*given, causal=causal)
    assert (out.shape, out.dtype) == ((n, 64), torch.bfloat16)
    operator = f"aten._scaled_dot_product_{kernel}_attention.default"
    assert (operator in calls.names) == (m > 1 or kernel == "flash")


# ---- packages


def masked(q: Tensor, k: Tensor, v: Tensor, offset: int | None) -> Tensor:
    """Attention of [1, n, heads, dim]; query i sees keys up to i + offset, or all.

    Heads of q share those of K and V in order: 0, 0, 1, 1.
    """
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if offset is not None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(offset + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """flash-attn 2.1's: grouped heads; causal queries are aligned with the last keys."""
    return masked(q, k, v, k.shape[1] - q.shape[1] if causal else None)


def memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor, *, attn_bias: Any) -> Tensor:
    """xFormers': as many heads of K and V as of q; a class of biases says what is causal."""
    assert k.shape[2] == q.shape[2]
    assert attn_bias is None or isinstance(attn_bias, LowerTriangularFromBottomRightMask)
    return masked(q, k, v, None if attn_bias is None else k.shape[1] - q.shape[1])


class LowerTriangularFromBottomRightMask:
    """xFormers' bias."""


def sageattn(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False
) -> Tensor:
    """SageAttention's, without its int8: grouped heads; causal for as many queries as keys."""
    assert tensor_layout == "NHD"
    assert not is_causal or q.shape[1] == k.shape[1]
    return masked(q, k, v, 0 if is_causal else None)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that compute what the packages document."""
    modules: dict[str, dict[str, Any]] = {
        "flash_attn": {"flash_attn_func": flash_attn_func},
        "xformers.ops": {"memory_efficient_attention": memory_efficient_attention},
        "xformers.ops.fmha.attn_bias": {
            "LowerTriangularFromBottomRightMask": LowerTriangularFromBottomRightMask
        },
        "sageattention": {"sageattn": sageattn},
    }
    for name, values in modules.items():
        module: Any = SimpleNamespace(**values)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def runs_here(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins need no GPU and no half precision."""
    for name in PACKAGES:
        own = attention_backends._BACKENDS[name]
        own = dataclasses.replace(own, on_cpu=True, in_float32=True)
        monkeypatch.setitem(attention_backends._BACKENDS, name, own)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(("n", "m", "causal"), FORMS)
@pytest.mark.usefixtures("runs_here")
def test_a_package_is_called_as_it_documents(name: str, n: int, m: int, causal: bool) -> None:
    given = rows(n, m)
    assert gap(on_cpu(name)(*given, causal=causal), attend(*given, causal=causal)) < ROUNDING


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("runs_here")
def test_the_model_computes_the_same_by_a_package(model: Model, name: str, route: str) -> None:
    expected = tensors(ROUTES[route](model))
    model.pipeline.model.set_attention(on_cpu(name))
    assert operators(partial(ROUTES[route], model)) == set()
    for ours, theirs in zip(tensors(ROUTES[route](model)), expected, strict=True):
        assert gap(ours, theirs) < ROUNDING


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_not_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, package = PACKAGES[name]
    absent: Any = None
    monkeypatch.setitem(sys.modules, module, absent)
    with pytest.raises(UnavailableError, match=f"'{name}' on cpu .*: pip install {package}$"):
        on_cpu(name)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", [*PACKAGES, "SDPA_EFFICIENT", "_native_cudnn"])
def test_a_backend_that_needs_a_gpu(name: str) -> None:
    cure = "it needs a GPU: device: cuda, or attention_backend: SDPA"
    with pytest.raises(UnavailableError, match=f"'{name}' on cpu in torch.bfloat16: {cure}"):
        on_cpu(name, torch.bfloat16)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["FLASH_ATTN", "SAGE_ATTN", "SDPA_CUDNN"])
def test_a_backend_that_has_no_float32(name: str) -> None:
    cure = "half precision alone: dtype: bfloat16 or float16, or attention_backend: SDPA"
    with pytest.raises(UnavailableError, match=f"'{name}' on cuda in torch.float32: .*{cure}"):
        attention_backend(name, LLM, torch.device("cuda"), torch.float32)


def top_left(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """flash-attn before 2.1: causal queries are aligned with the first keys."""
    return masked(q, k, v, 0 if causal else None)


def other_heads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Heads of K and V in the order 0, 1, 0, 1."""
    k, v = (t.repeat(1, 1, q.shape[2] // t.shape[2], 1) for t in (k, v))
    return masked(q, k, v, k.shape[1] - q.shape[1] if causal else None)


def not_a_number(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    return torch.full_like(q, math.nan)


def fails(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize(
    ("function", "word"),
    [
        (top_left, "of 1 queries and 5 keys, causal True, its result is wrong: install another"),
        (other_heads, "of 1 queries and 1 keys, causal True, its result is wrong"),
        (not_a_number, "of 1 queries and 1 keys, causal True, its result is wrong"),
        (fails, "no kernel image is available: attention_backend: SDPA"),
    ],
)
def test_what_computes_something_else_is_refused(
    function: Any, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", function)
    with pytest.raises(UnavailableError, match=f"'flash' on cpu in torch.float32: {word}"):
        on_cpu("flash")


# ---- names


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *((name, "SDPA") for name in ("", "auto", "SDPA", "TORCH_SDPA", "native")),
        ("_native_math", "SDPA_MATH"),
        ("_native_flash", "SDPA_FLASH"),
        ("_native_efficient", "SDPA_EFFICIENT"),
        *((name, "SDPA_CUDNN") for name in ("_native_cudnn", "CUDNN_ATTN", "SDPA_CUDNN")),
        *((name, "FLASH_ATTN") for name in ("flash", "FLASH_ATTN")),
        *((name, "XFORMERS") for name in ("xformers", "XFORMERS")),
        *((name, "SAGE_ATTN") for name in ("sage", "SAGE_ATTN")),
    ],
)
def test_names_of_vllm_omni_and_diffusers(name: str, known: str) -> None:
    assert check_attention_backend(name) == known
    if known == "SDPA":
        assert on_cpu(name) is attend


@pytest.mark.parametrize("name", ["STA", "FLASHINFER_ATTN", "sdpa", "flash_hub"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'; there are SDPA, SDPA_MATH, .*auto, TORCH_"):
        on_cpu(name)


def test_a_ring_has_no_other_attention(checkpoint: Path) -> None:
    ring: Any = object()
    split = Split(sequence=SequenceSplit(0, 1, 0, 2, ring))
    found = BagelPipeline.from_pretrained(checkpoint, stage="dit", split=split)
    found.model.set_attention(attend)
    with pytest.raises(ValueError, match="ring_degree 2: a ring has no other attention"):
        found.model.set_attention(on_cpu("SDPA_MATH"))


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("name", [*attention_backends._BACKENDS])
def test_on_a_gpu(name: str, head_dim: int) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name][0])
    config, device = msgspec.structs.replace(LLM, hidden_size=4 * head_dim), torch.device("cuda")
    dense = attention_backend(name, config, device, torch.bfloat16)
    error = 0.2 if name == "SAGE_ATTN" else 0.02  # int8
    for n, m, causal in FORMS:
        random = torch.Generator().manual_seed(m)
        shapes = ((n, 4, head_dim), (m, 2, head_dim), (m, 2, head_dim))
        given = [torch.randn(shape, generator=random) for shape in shapes]
        found = dense(*(t.to(device, torch.bfloat16) for t in given), causal=causal).float().cpu()
        expected = attend(*given, causal=causal)
        assert (found - expected).norm() <= error * expected.norm()
