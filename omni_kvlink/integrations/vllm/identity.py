"""The inputs of a request, and the engine's model: what a KV cache's values depend on."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_SCALES = ("_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float")
"""Attributes of an attention layer: tensors on a device, one value or one per head; and floats."""


def prompt_identity(request: Request, adapter: str = "", tokens: int = 0) -> dict[str, str]:
    """SHA-256 of each input that a prompt's cache depends on, by name; equal on both sides.

    `adapter`: the identity of the request's adapter; see `AdapterIdentities`.
    `tokens`: of the first tokens of a prompt and its answer; 0: of the whole prompt.

    `extra` are the keys of vLLM's own prefix cache: what a version of vLLM adds to them counts,
    but for an adapter's name and path, which may differ between two engines with the same one.
    """
    stop = tokens or request.num_prompt_tokens
    bare, embeds = copy.copy(request), request.prompt_embeds
    bare.lora_request = bare.prompt_embeds = None  # these have inputs of their own
    extra, _ = generate_block_hash_extra_keys(bare, 0, stop, 0)
    inputs = {
        "tokens": list(request.all_token_ids[:stop]),
        "media": [
            (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features or ()
            if feature.mm_position.offset < stop
        ],
        "salt": request.cache_salt,
        "adapter": adapter or None,
        "extra": extra,
    }
    if embeds is not None:
        rows = embeds[:stop].contiguous().view(torch.uint8).numpy()
        inputs["embeds"] = embeds.dtype, embeds.shape[1:], hashlib.sha256(rows).hexdigest()
    return {
        name: hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()
        for name, value in inputs.items()
    }


def model_identity(vllm_config: VllmConfig, name: str) -> dict[str, Any]:
    """The model and settings that an engine's caches depend on, as fields of `BlockFormat`.

    `name` names the weights in place of the model's path and revision, if it is not empty.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    text: Any = model.hf_text_config
    rope = {key: getattr(text, key, None) for key in _ROPE}
    return {
        "model": name or str(model.model),
        "revision": "" if name else str(model.revision or ""),
        "quantization": str(model.quantization or ""),
        "rope": json.dumps(_without_none(rope), sort_keys=True, default=str),
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(cache.cache_dtype),
        "kv_scales": kv_scales(vllm_config.compilation_config.static_forward_context),
        "draft": _draft(vllm_config, name),
    }


def _draft(vllm_config: VllmConfig, name: str) -> str:
    """The draft model whose layers have caches, too; "" if there is none."""
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return ""
    draft = speculative.draft_model_config
    weights = name or f"{draft.model} {draft.revision or ''}".strip()
    return f"{speculative.method} {weights}"


def kv_scales(layers: Mapping[str, Any]) -> str:
    """SHA-256 of what the layers' quantized K and V are multiplied by; "" if none is quantized.

    `layers` are an engine's attention layers by name, after it has loaded its weights.
    """
    dtypes = {name: str(getattr(layer, "kv_cache_dtype", "")) for name, layer in layers.items()}
    scales = {
        name: [dtype, *(_plain(getattr(layers[name], key, None)) for key in _SCALES)]
        for name, dtype in sorted(dtypes.items())
        if is_quantized_kv_cache(dtype)
    }
    return hashlib.sha256(repr(scales).encode()).hexdigest() if scales else ""


def _plain(scale: Any) -> Any:
    return scale.tolist() if isinstance(scale, torch.Tensor) else scale


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
