"""Encodes requests, outputs, errors and tensors, and nothing else, as values for MessagePack."""

from __future__ import annotations

import builtins
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from omni_kvlink import errors as library_errors
from omni_kvlink.engine import errors as engine_errors
from omni_kvlink.engine import outputs
from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig, StageConfig
from omni_kvlink.engine.inputs.prompt import EmbedsPrompt
from omni_kvlink.engine.ipc.rpc import Call, Reply, Start
from omni_kvlink.engine.lora.request import LoRARequest
from omni_kvlink.engine.outputs import ARSchedulerOutput
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.engine.tokens.events import StepEvent, TokenEvent
from omni_kvlink.engine.tokens.outputs import KVConnectorOutput, KVSent, LogprobsLists
from omni_kvlink.errors import KVLinkError, SchemaError, WireError

WriteTensor: TypeAlias = Callable[[torch.Tensor], dict[str, Any]]
"""Writes a tensor's bytes somewhere; returns plain values that say where, for a `ReadTensor`."""
ReadTensor: TypeAlias = Callable[[Mapping[str, Any]], torch.Tensor]
_KIND = "~"
"""Key that marks a map as an encoded object; its value is the object's type."""

_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Reply,
        ARSchedulerOutput,
        outputs.BatchRunnerOutput,
        Call,
        outputs.DiffusionOutput,
        outputs.DiffusionSchedulerOutput,
        EmbedsPrompt,
        KVConnectorOutput,
        KVSent,
        LoRARequest,
        LogprobsLists,
        outputs.ModelRunnerOutput,
        OmniDiffusionRequest,
        OmniDiffusionSamplingParams,
        outputs.RunnerOutput,
        Start,
        StepEvent,
        TokenEvent,
        outputs.StepSchedulerOutput,
    )
}
_CONFIGS = {kind.__name__: kind for kind in (OmniARConfig, OmniDiffusionConfig)}
_NOT_SENT = {
    *("past_key_values", "lora", "is_cancelled", "generator", "token_log", "emit"),
    "req_id_to_index",
}
"""Fields of `_CLASSES` that have a meaning in their own process only, or are made of others."""


def pack(value: Any, write: WriteTensor | None = None) -> Any:
    """Encode numbers, texts, lists, sets, maps, tensors, errors, requests, outputs as plain values.

    `write` writes the tensors; by default their bytes are among the values. Raises SchemaError if
    the value contains an object of another type.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, list):
        return [pack(item, write) for item in value]
    if isinstance(value, (tuple, set)):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {_KIND: kind, "items": [pack(item, write) for item in value]}
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", **(write or inline_tensor)(value)}
    if isinstance(value, BaseException):
        return {_KIND: "error", **pack_error(value)}
    if isinstance(value, Mapping) and _KIND not in value:
        return {_key(key): pack(item, write) for key, item in value.items()}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise SchemaError(f"{name} cannot be sent to another process: {value!r:.100}")
    fields = [name for name in _field_names(value) if name not in _NOT_SENT]
    return {_KIND: name, **{field: pack(getattr(value, field), write) for field in fields}}


def _field_names(value: Any) -> Iterable[str]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    return (field.name for field in dataclasses.fields(value))


def _key(key: Any) -> str | int:
    if isinstance(key, (str, int)):
        return key
    raise SchemaError(f"the keys of a map are texts or numbers, not {key!r:.100}")


def unpack(value: Any, read: ReadTensor | None = None) -> Any:
    """Decode what `pack` has encoded; consumes the maps in it.

    `read` reads the tensors that `pack`'s `write` wrote. Raises WireError if the values contain
    something that `pack` does not write.
    """
    try:
        return _unpack(value, read or read_inline_tensor)
    except SchemaError as error:  # of a class's constructor
        raise WireError(f"a message holds what is not sent: {error}") from None
    except KVLinkError:
        raise
    except Exception as error:  # of a class's constructor, of torch: fields that do not fit
        raise WireError(f"a message holds what is not sent: {error!r:.200}") from None


def _unpack(value: Any, read: ReadTensor) -> Any:
    if isinstance(value, list):
        return [_unpack(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _unpack(item, read) for key, item in value.items()}
    kind = value.pop(_KIND)
    if kind == "tensor":
        return read(value)
    if kind == "error":
        return unpack_error(value)
    fields = {key: _unpack(item, read) for key, item in value.items()}
    if kind in ("tuple", "set"):
        return tuple(fields["items"]) if kind == "tuple" else set(fields["items"])
    if kind not in _CLASSES:
        raise WireError(f"objects of type {kind!r} are not sent between processes")
    if issubclass(_CLASSES[kind], msgspec.Struct):
        return msgspec.convert(fields, _CLASSES[kind])
    return _CLASSES[kind](**fields)


def pack_config(config: StageConfig) -> dict[str, Any]:
    """Encode a stage's configuration."""
    return {"kind": type(config).__name__, "config": msgspec.to_builtins(config)}


def unpack_config(values: Mapping[str, Any]) -> StageConfig:
    """Decode what `pack_config` has encoded; SchemaError if it is invalid."""
    return _CONFIGS[values["kind"]].read(values["config"])


def pack_error(error: BaseException) -> dict[str, Any]:
    """Encode an error: its class's name, its text, and its attributes that are plain values."""
    plain = {
        name: value for name, value in vars(error).items() if isinstance(value, (str, int, float))
    }
    return {"kind": type(error).__name__, "text": str(error), "attributes": plain}


def unpack_error(values: Mapping[str, Any]) -> Exception:
    """Decode an error; one that is neither Python's nor this library's becomes RequestFailed."""
    name, text = values["kind"], values["text"]
    for module in (library_errors, engine_errors, builtins):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            break
    else:
        return engine_errors.RequestFailed(f"{name}: {text}")
    try:
        error = kind(text)
    except TypeError:  # its constructor takes more than a text
        return engine_errors.RequestFailed(f"{name}: {text}")
    vars(error).update(values["attributes"])
    return error


def with_prefix(error: BaseException, prefix: str) -> Exception:
    """A copy of an error with a prefix before its text."""
    packed = pack_error(error)
    return unpack_error({**packed, "text": prefix + packed["text"]})


def inline_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Encode a tensor with its bytes; it is on the CPU when it is decoded."""
    return {**tensor_spec(tensor), "bytes": tensor_bytes(tensor).tobytes()}


def read_inline_tensor(values: Mapping[str, Any]) -> torch.Tensor:
    """Decode what `inline_tensor` has encoded; raises WireError if the bytes do not fit."""
    shape, dtype, raw = values["shape"], dtype_of(values), values["bytes"]
    nbytes = math.prod(shape) * dtype.itemsize
    if len(raw) != nbytes:  # before memory is allocated for it
        raise WireError(f"{len(raw)} bytes for a tensor of {nbytes}")
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(raw, np.uint8)
    return tensor


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """A tensor's bytes as a NumPy array of uint8; no copy if it is dense and on the CPU."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def tensor_spec(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor's shape and dtype as plain values."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def dtype_of(values: Mapping[str, Any]) -> torch.dtype:
    """The dtype in a `tensor_spec`; raises WireError if torch has no such dtype."""
    dtype = getattr(torch, values["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"torch has no dtype {values['dtype']!r}")
    return dtype
