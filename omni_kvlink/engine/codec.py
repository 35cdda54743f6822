"""Requests, outputs and errors as plain values, for stages in processes of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from .. import errors as library_errors
from ..errors import KVLinkError, SchemaError
from . import errors as engine_errors
from .outputs import DiffusionOutput, KVSent
from .request import OmniDiffusionRequest, Prompt
from .sampling import OmniDiffusionSamplingParams

_LOCAL = ("past_key_values", "is_cancelled", "prompt", "sampling_params")
"""Fields of a request that stay in its process, or are written apart."""


def pack_request(request: OmniDiffusionRequest) -> dict[str, Any]:
    """A request without what belongs to its process."""
    names = [field.name for field in dataclasses.fields(request) if field.name not in _LOCAL]
    wishes = dataclasses.replace(request.sampling_params, generator=None)
    return {
        **{name: getattr(request, name) for name in names},
        "prompt": [_pack_item(item) for item in as_items(request.prompt)],
        "sampling_params": dataclasses.asdict(wishes),
    }


def unpack_request(values: Mapping[str, Any]) -> OmniDiffusionRequest:
    wishes = dict(values["sampling_params"])
    if wishes["cfg_interval"] is not None:
        wishes["cfg_interval"] = tuple(wishes["cfg_interval"])
    return OmniDiffusionRequest(
        **{
            **values,
            "prompt": [_unpack_item(item) for item in values["prompt"]],
            "sampling_params": OmniDiffusionSamplingParams(**wishes),
        }
    )


def pack_output(output: DiffusionOutput) -> dict[str, Any]:
    """An output with its images as bytes and its error as words."""
    return {
        "request_id": output.request_id,
        "output": None if output.output is None else pack_tensor(output.output),
        "error": None if output.error is None else pack_error(output.error),
        "text": output.text,
        "kv_sent": None if output.kv_sent is None else dataclasses.asdict(output.kv_sent),
        "seconds": output.seconds,
    }


def unpack_output(values: Mapping[str, Any]) -> DiffusionOutput:
    sent = values["kv_sent"]
    return DiffusionOutput(
        request_id=values["request_id"],
        output=None if values["output"] is None else unpack_tensor(values["output"]),
        error=None if values["error"] is None else unpack_error(values["error"]),
        text=values["text"],
        kv_sent=None if sent is None else msgspec.convert(sent, KVSent),
        seconds=values["seconds"],
    )


def pack_error(error: BaseException) -> dict[str, Any]:
    """An error's class by name, its words, and its plain attributes."""
    facts = {name: value for name, value in vars(error).items() if isinstance(value, (str, float))}
    return {"kind": type(error).__name__, "text": str(error), "facts": facts}


def unpack_error(values: Mapping[str, Any]) -> KVLinkError:
    """The same error; one that is not of this library's family comes as RequestFailed."""
    kind = getattr(library_errors, values["kind"], getattr(engine_errors, values["kind"], None))
    if not (isinstance(kind, type) and issubclass(kind, KVLinkError)):
        return engine_errors.RequestFailed(f"{values['kind']}: {values['text']}")
    error = kind(values["text"])
    vars(error).update(values["facts"])
    return error


def pack_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """A uint8 tensor's shape and bytes."""
    if tensor.dtype is not torch.uint8:
        raise SchemaError(f"an image is uint8, not {tensor.dtype}")
    return {"shape": list(tensor.shape), "bytes": tensor.contiguous().cpu().numpy().tobytes()}


def unpack_tensor(values: Mapping[str, Any]) -> torch.Tensor:
    flat = torch.tensor(memoryview(values["bytes"]), dtype=torch.uint8)
    return flat.reshape(values["shape"])


def as_items(prompt: Prompt) -> Sequence[str | torch.Tensor]:
    """A prompt's texts and images, one by one."""
    return [prompt] if isinstance(prompt, (str, torch.Tensor)) else prompt


def _pack_item(item: str | torch.Tensor) -> Any:
    return item if isinstance(item, str) else pack_tensor(item)


def _unpack_item(item: Any) -> str | torch.Tensor:
    return item if isinstance(item, str) else unpack_tensor(item)
