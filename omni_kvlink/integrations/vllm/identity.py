"""Identities: a request's inputs, and the model behind its KV cache and encoder outputs."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from omni_kvlink.integrations.vllm.adapters import AdapterIdentities

_ENCODER = ("model", "revision", "quantization", "compute_dtype")
"""The fields of `model_identity` that an encoder depends on, too."""

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
    rope = {key: value for key in _ROPE if (value := getattr(text, key, None)) is not None}
    return {
        "model": name or str(model.model),
        "revision": "" if name else str(model.revision or ""),
        "quantization": str(model.quantization or ""),
        "rope": _json(rope),
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


def encoder_identity(vllm_config: VllmConfig, name: str) -> dict[str, str]:
    """The weights and settings that an engine's encoder outputs depend on; equal on both sides.

    `name` names the weights in place of the model's path and revision, if it is not empty.
    """
    model = vllm_config.model_config
    media, model_fields = model.multimodal_config, model_identity(vllm_config, name)
    processor = dict(media.mm_processor_kwargs or {})
    processor.pop("device", None)  # vLLM adds it on a producer alone; the transform is the same
    config = hashlib.sha256(_json(_without_origin(model.hf_config.to_dict())).encode())
    return {
        **{field: model_fields[field] for field in _ENCODER},
        "vllm": vllm.__version__,
        "config": config.hexdigest(),
        "processor": _json(processor),
        "attention_dtype": str(media.mm_encoder_attn_dtype or ""),
        "video_pruning": str(media.get_video_pruning_spec() or ""),
    }


def tower_adapter(request: Request, vllm_config: VllmConfig, identities: AdapterIdentities) -> str:
    """The identity of the adapter that a request's encoder runs with; "" if there is none.

    Raises:
        SchemaError: it is unknown; see `AdapterIdentities`.
    """
    lora = vllm_config.lora_config
    has_adapter = lora is not None and lora.enable_tower_connector_lora
    return identities.identify(request.lora_request if has_adapter else None)


def differences(expected: Mapping[str, Any], actual: object) -> str:
    """The fields of `expected` that differ, each with both values; "" if none does.

    Of a list of objects, such as the groups of a `BlockFormat`, each object's fields.
    """
    if not isinstance(actual, Mapping):
        return f"it sent {actual!r:.100}"
    found = []
    for name, value in expected.items():
        other = actual.get(name)
        if pairs := _object_pairs(value, other):
            for number, pair in enumerate(pairs):
                if wrong := differences(*pair):
                    found.append(f"of {name.removesuffix('s')} {number} {wrong}")
        elif other != value:
            found.append(f"{name} is {other!r:.200} there and {value!r:.200} here")
    return "; ".join(found)


def _object_pairs(value: Any, other: Any) -> list[tuple[Any, Any]]:
    """The pairs of two lists of as many objects, which can be compared one by one; else none."""
    if not (isinstance(value, list) and isinstance(other, list) and len(value) == len(other)):
        return []
    is_comparable = all(isinstance(item, Mapping) for item in [*value, *other])
    return list(zip(value, other, strict=True)) if is_comparable else []


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def _without_origin(node: Any) -> Any:
    """A configuration without where it was loaded from, and what wrote it."""
    if not isinstance(node, dict):
        return node
    return {
        key: _without_origin(value)
        for key, value in node.items()
        if not str(key).startswith("_") and key != "transformers_version"
    }
