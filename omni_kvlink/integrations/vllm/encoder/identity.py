"""The weights and settings behind an encoder output, and the check that a received one fits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import vllm

from omni_kvlink import Payload, TensorTransferData
from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.identity import model_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from omni_kvlink.integrations.vllm.adapters import AdapterIdentities

OUTPUT = "output"
"""The name of the payload's tensor."""

_SHARED = ("model", "revision", "quantization", "compute_dtype")
"""The fields of `model_identity` that an encoder depends on, too."""


@dataclasses.dataclass(frozen=True)
class ExpectedOutput:
    """The encoder output that a request needs."""

    item: str  # vLLM's identifier of the media item
    embeds: int  # rows
    adapter: str  # see `tower_adapter`


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
        **{field: model_fields[field] for field in _SHARED},
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


def check_output(
    data: Payload, expected: ExpectedOutput, identity: Mapping[str, str], *, peer: str
) -> torch.Tensor:
    """Return the encoder output in a payload, a view, if it is the one that is expected.

    Raises:
        SchemaError: it is another one, or this engine would have computed another one.
    """
    remote = data.metadata.get("identity") if isinstance(data, TensorTransferData) else None
    if not isinstance(data, TensorTransferData) or not isinstance(remote, Mapping):
        raise SchemaError(f"{peer} sent {data.request_id!r}, which is no encoder output")
    expected_identity = {**identity, "adapter": expected.adapter}
    if differences := [
        f"{name} is {remote.get(name)!r:.200} there, {value!r:.200} here"
        for name, value in expected_identity.items()
        if remote.get(name) != value
    ]:
        raise SchemaError(f"the encoder of {peer} is not this engine's: {'; '.join(differences)}")
    if data.metadata.get("item") != expected.item:
        raise SchemaError(
            f"{peer} sent the encoder output of item {data.metadata.get('item')!r:.200}; "
            f"expected that of {expected.item!r:.200}"
        )
    output = data.tree.get(OUTPUT)
    if not isinstance(output, torch.Tensor) or output.dim() != 2 or len(output) != expected.embeds:
        raise SchemaError(f"{peer} sent {data!r} for {expected.embeds} embeddings")
    return output


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
