"""What crosses between two processes of an engine, as plain values that MessagePack can write."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from omni_kvlink import errors as library_errors
from omni_kvlink.engine import errors as engine_errors
from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig, StageConfig
from omni_kvlink.engine.outputs import (
    ARSchedulerOutput,
    BatchRunnerOutput,
    DiffusionOutput,
    DiffusionSchedulerOutput,
    KVSent,
    ModelRunnerOutput,
    RunnerOutput,
)
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.errors import SchemaError, WireError

Stow: TypeAlias = Callable[[torch.Tensor], dict[str, Any]]
"""Puts a tensor's bytes somewhere; says where, in plain values."""

Fetch: TypeAlias = Callable[[Mapping[str, Any]], torch.Tensor]
"""The tensor that a `Stow` put there."""

_KIND = "~"
"""The key of a map that stands for something else than a map."""

_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        ARSchedulerOutput,
        BatchRunnerOutput,
        DiffusionOutput,
        DiffusionSchedulerOutput,
        KVSent,
        ModelRunnerOutput,
        OmniDiffusionRequest,
        OmniDiffusionSamplingParams,
        RunnerOutput,
    )
}

_CONFIGS = {kind.__name__: kind for kind in (OmniARConfig, OmniDiffusionConfig)}

_LOCAL = {"past_key_values", "is_cancelled", "generator"}
"""Fields of those that stay in their process."""


def pack(value: Any, stow: Stow | None = None) -> Any:
    """Plain values for this: numbers, texts, lists, maps, tensors, errors, requests, outputs.

    Args:
        stow: where tensors go; they stand among the values, as bytes, if None.

    Raises:
        SchemaError: it has something in it that cannot cross.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, list):
        return [pack(item, stow) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [pack(item, stow) for item in value]}
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", **(stow or inline)(value)}
    if isinstance(value, BaseException):
        return {_KIND: "error", **pack_error(value)}
    if isinstance(value, Mapping) and _KIND not in value:
        return {_key(key): pack(item, stow) for key, item in value.items()}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise SchemaError(f"{name} cannot cross to another process: {value!r:.100}")
    fields = [field.name for field in dataclasses.fields(value) if field.name not in _LOCAL]
    return {_KIND: name, **{field: pack(getattr(value, field), stow) for field in fields}}


def _key(key: Any) -> str | int:
    if isinstance(key, (str, int)):
        return key
    raise SchemaError(f"a key of a map is a text or a number, not {key!r:.100}")


def unpack(value: Any, fetch: Fetch | None = None) -> Any:
    """What `pack` was given.

    Args:
        fetch: the tensors that its `stow` took.

    Raises:
        WireError: it has something in it that `pack` does not write.
    """
    if isinstance(value, list):
        return [unpack(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: unpack(item, fetch) for key, item in value.items()}
    kind = value.pop(_KIND)
    if kind == "tensor":
        return (fetch or from_inline)(value)
    if kind == "error":
        return unpack_error(value)
    fields = {key: unpack(item, fetch) for key, item in value.items()}
    if kind == "tuple":
        return tuple(fields["items"])
    if kind not in _CLASSES:
        raise WireError(f"nothing called {kind!r} crosses between processes")
    return _CLASSES[kind](**fields)


def pack_config(config: StageConfig) -> dict[str, Any]:
    """A stage's configuration and its kind."""
    return {"kind": type(config).__name__, "config": msgspec.to_builtins(config)}


def unpack_config(values: Mapping[str, Any]) -> StageConfig:
    found: StageConfig = msgspec.convert(values["config"], _CONFIGS[values["kind"]])
    return found


def pack_error(error: BaseException) -> dict[str, Any]:
    """An error's class by name, its words, and its plain attributes."""
    facts = {name: value for name, value in vars(error).items() if isinstance(value, (str, float))}
    facts |= {name: value for name, value in vars(error).items() if isinstance(value, int)}
    return {"kind": type(error).__name__, "text": str(error), "facts": facts}


def unpack_error(values: Mapping[str, Any]) -> Exception:
    """The same error, of this library or Python's own; any other comes as RequestFailed."""
    name, text = values["kind"], values["text"]
    for home in (library_errors, engine_errors, builtins):
        kind = getattr(home, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            break
    else:
        return engine_errors.RequestFailed(f"{name}: {text}")
    try:
        error = kind(text)
    except TypeError:  # it is made of more than words
        return engine_errors.RequestFailed(f"{name}: {text}")
    vars(error).update(values["facts"])
    return error


def renamed(error: BaseException, prefix: str) -> Exception:
    """The same error, with words before its own."""
    packed = pack_error(error)
    return unpack_error({**packed, "text": prefix + packed["text"]})


def inline(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor's shape and bytes; on the CPU afterwards."""
    return {**form_of(tensor), "bytes": flat_bytes(tensor).tobytes()}


def flat_bytes(tensor: torch.Tensor) -> Any:
    """A tensor's bytes, uint8 of NumPy; its own where it is dense and on the CPU."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def from_inline(values: Mapping[str, Any]) -> torch.Tensor:
    """Raises WireError if the bytes are not such a tensor's."""
    tensor = torch.empty(values["shape"], dtype=dtype_of(values))
    flat, raw = tensor.reshape(-1).view(torch.uint8).numpy(), values["bytes"]
    if len(raw) != flat.size:
        raise WireError(f"{len(raw)} bytes for a tensor of {flat.size}")
    flat[:] = np.frombuffer(raw, np.uint8)
    return tensor


def form_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape and dtype, as plain values."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def dtype_of(values: Mapping[str, Any]) -> torch.dtype:
    """Raises WireError if there is no such dtype."""
    dtype = getattr(torch, values["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"no dtype {values['dtype']!r}")
    return dtype
