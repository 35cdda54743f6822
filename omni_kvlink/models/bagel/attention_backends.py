"""Attention backends by name: what computes the attention of the language model.

A kernel of torch is called as its operator. `torch.nn.attention.sdpa_kernel` would choose it for
all threads of the process, and so for other models in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omni_kvlink.errors import UnavailableError
from omni_kvlink.models.bagel.attention import DenseAttention, attend

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import LanguageConfig

_Kernel = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Takes q [1, heads, n, dim], k and v [1, heads, m, dim], and whether it is causal."""

_ALIASES = {
    **dict.fromkeys(("", "auto", "TORCH_SDPA", "native"), "SDPA"),
    "_native_math": "SDPA_MATH",
    "_native_flash": "SDPA_FLASH",
    "_native_efficient": "SDPA_EFFICIENT",
    **dict.fromkeys(("CUDNN_ATTN", "_native_cudnn"), "SDPA_CUDNN"),
    "flash": "FLASH_ATTN",
    "xformers": "XFORMERS",
    "sage": "SAGE_ATTN",
}
"""vLLM-Omni's names, in capitals, and diffusers'."""

_PROBES = ((1, 1, True), (1, 5, True), (6, 6, True), (3, 8, True), (3, 8, False))
"""(queries, keys, causal) of each attention shape that the model computes."""
_PROBE_ERROR = 0.2  # of the norm; int8 keys stay below it, a wrong mask or order of heads does not


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V with as many heads as q."""
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _by_kernel(kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    query, key, value = (t.transpose(0, 1)[None] for t in (q, *_repeated(q, k, v)))
    return kernel(query, key, value, causal and len(q) > 1)[0].transpose(0, 1).flatten(1)


def _mask(query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """A term of the scores, for causal queries that are the last of more tokens.

    A row begins at a multiple of 16 elements, as the efficient kernel needs it.
    """
    heads, n, m = *query.shape[1:3], key.shape[2]
    if not causal or n == m:
        return None
    blank = query.new_full((n, -(-m // 16) * 16), float("-inf"))
    return blank.triu(m - n + 1)[:, :m].expand(1, heads, n, m)


def _operator(name: str) -> Callable[..., tuple[Tensor, ...]]:
    operator: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.aten, name)
    return operator


def _math(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    mask, run = _mask(query, key, causal), _operator("_scaled_dot_product_attention_math")
    return run(query, key, value, mask, 0.0, causal and mask is None)[0]


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    if query.device.type == "cpu":
        run = _operator("_scaled_dot_product_flash_attention_for_cpu")
        mask = _mask(query, key, causal)
        return run(query, key, value, 0.0, causal and mask is None, attn_mask=mask)[0]
    # It takes no mask; its causal queries are the last tokens, unlike those of torch's SDPA.
    run = _operator("_scaled_dot_product_flash_attention")
    return run(query, key, value, 0.0, causal)[0]


def _biased(name: str, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    if key.shape[2] == 1:  # its weight is 1; cuDNN does not take it
        return value
    mask, run = _mask(query, key, causal), _operator(f"_scaled_dot_product_{name}_attention")
    return run(query, key, value, mask, False, 0.0, causal and mask is None)[0]


def _flash_attn() -> DenseAttention:
    function = importlib.import_module("flash_attn").flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        # Its causal queries are the last tokens, since version 2.1.
        out: Tensor = function(q[None], k[None], v[None], causal=causal)
        return out[0].flatten(1)

    return run


def _xformers() -> DenseAttention:
    function = importlib.import_module("xformers.ops").memory_efficient_attention
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")
    mask = biases.LowerTriangularFromBottomRightMask()

    def run(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        k, v = _repeated(q, k, v)
        bias = mask if causal and len(q) > 1 else None
        out: Tensor = function(q[None], k[None], v[None], attn_bias=bias)
        return out[0].flatten(1)

    return run


def _sage() -> DenseAttention:
    function = importlib.import_module("sageattention").sageattn

    def run(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        n, is_causal = len(q), causal and len(q) > 1
        if is_causal:  # which it knows for as many queries as keys alone
            q = torch.cat([q[:1].expand(len(k) - n, -1, -1), q])
        out: Tensor = function(q[None], k[None], v[None], tensor_layout="NHD", is_causal=is_causal)
        return out[0, -n:].flatten(1)

    return run


@dataclass(frozen=True)
class _Backend:
    load: Callable[[], DenseAttention]
    package: str = ""
    on_cpu: bool = False
    in_float32: bool = False


def _of_torch(kernel: _Kernel, **support: Any) -> _Backend:
    return _Backend(lambda: partial(_by_kernel, kernel), **support)


_BACKENDS = {
    "SDPA_MATH": _of_torch(_math, on_cpu=True, in_float32=True),
    "SDPA_FLASH": _of_torch(_flash, on_cpu=True, in_float32=True),
    "SDPA_EFFICIENT": _of_torch(partial(_biased, "efficient"), in_float32=True),
    "SDPA_CUDNN": _of_torch(partial(_biased, "cudnn")),
    "FLASH_ATTN": _Backend(_flash_attn, "flash-attn"),
    "XFORMERS": _Backend(_xformers, "xformers", in_float32=True),
    "SAGE_ATTN": _Backend(_sage, "sageattention"),
}


def check_attention_backend(name: str) -> str:
    """Return the name in this library of a backend; ValueError lists all if there is none."""
    backend = _ALIASES.get(name, name)
    if backend != "SDPA" and backend not in _BACKENDS:
        names = ", ".join(["SDPA", *_BACKENDS, *filter(None, _ALIASES)])
        raise ValueError(f"attention_backend {name!r}; there are {names}")
    return backend


def attention_backend(
    name: str, config: LanguageConfig, device: torch.device, dtype: torch.dtype
) -> DenseAttention:
    """Load a backend for `BagelModel.set_attention`, and compare it with the default one.

    Small random tensors, of the model's head size on its device, are computed with both: a backend
    that cannot run there, or has another order of heads or another causal mask, is an error here.

    Args:
        name: `docs/engine_weights.md` has a table of them; "auto" is the default one, `attend`.
        config: of the model.
        device: that the model computes on.
        dtype: that it computes in.

    Raises:
        ValueError: there is no such backend.
        UnavailableError: its package is missing, or it does not run on this device in this dtype;
            the text names the cure.
    """
    key = check_attention_backend(name)
    if key == "SDPA":
        return attend
    backend, subject = _BACKENDS[key], f"attention_backend {name!r} on {device} in {dtype}"
    try:
        dense = backend.load()
    except Exception as error:  # a package that does not fit may raise any
        raise UnavailableError(f"{subject}: {error}: pip install {backend.package}") from error
    if device.type == "cpu" and not backend.on_cpu:
        raise _unavailable(subject, "it needs a GPU", "device: cuda")
    if dtype == torch.float32 and not backend.in_float32:
        raise _unavailable(subject, "it has half precision alone", "dtype: bfloat16 or float16")
    _compare(dense, config, device, dtype, subject)
    return dense


def _compare(
    dense: DenseAttention,
    config: LanguageConfig,
    device: torch.device,
    dtype: torch.dtype,
    subject: str,
) -> None:
    """Raise UnavailableError unless a backend computes what `attend` does."""
    random = torch.Generator().manual_seed(0)
    heads = 2 * (config.num_attention_heads // config.num_key_value_heads)
    for n, m, causal in _PROBES:
        shapes = ((n, heads), (m, 2), (m, 2))
        rows = [torch.randn(*shape, config.head_dim, generator=random) for shape in shapes]
        try:
            out = dense(*(t.to(device, dtype) for t in rows), causal=causal).float().cpu()
        except Exception as error:  # of a kernel, any
            raise _unavailable(subject, str(error)) from error
        expected = attend(*rows, causal=causal)
        if out.shape != expected.shape or not (
            (out - expected).norm() <= _PROBE_ERROR * expected.norm()
        ):
            text = f"of {n} queries and {m} keys, causal {causal}, its result is wrong"
            raise _unavailable(subject, text, "install another version")


def _unavailable(subject: str, reason: str, cure: str = "") -> UnavailableError:
    cures = f"{cure}, or " if cure else ""
    return UnavailableError(f"{subject}: {reason}: {cures}attention_backend: SDPA")
