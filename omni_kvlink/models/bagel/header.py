"""The header of a safetensors file: names, shapes and dtypes of its tensors, not their bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Set
    from pathlib import Path

_MAX_HEADER_NBYTES = 100 << 20  # safetensors' own limit
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes that a network can be loaded from


class CheckpointError(SchemaError):
    """A checkpoint file lacks tensors that its configuration requires."""


class TensorInfo(msgspec.Struct, frozen=True):
    """One entry of a header: `dtype` as safetensors names it, `data_offsets` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file by name.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is no safetensors file, or its size is not the one its header requires,
            as after a download that ended early.
    """
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {path.parent}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MAX_HEADER_NBYTES else b""
    try:
        entries: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        entries.pop("__metadata__", None)
        tensors = msgspec.convert(entries, dict[str, TensorInfo])
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
    needed = 8 + length + max((info.data_offsets[1] for info in tensors.values()), default=0)
    if path.stat().st_size != needed:
        raise CheckpointError(
            f"{path.name} has {path.stat().st_size:,} bytes, its header requires {needed:,}: "
            "fetch it again"
        )
    return tensors


def complaints(
    tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Say which tensors are missing, or have another shape or dtype than a network can load."""
    missing, wrong = sorted(expected.keys() - tensors.keys()), list[str]()
    for name in sorted(expected.keys() & tensors.keys()):
        info = tensors[name]
        if info.shape != expected[name]:
            wrong.append(f"{name} has shape {info.shape}, wanted {expected[name]}")
        elif info.dtype not in _SIZES:
            wrong.append(f"{name} has dtype {info.dtype}; there are {', '.join(_SIZES)}")
        elif math.prod(info.shape) * _SIZES[info.dtype] != _nbytes(info):
            wrong.append(f"{name} has {_nbytes(info)} bytes for {info.dtype} {info.shape}")
    return [f"{len(missing)} missing: {join_names(missing)}", *wrong] if missing else wrong


def unread(tensors: Mapping[str, TensorInfo], names: Set[str]) -> list[str]:
    """Return the tensors that no stage reads, sorted."""
    return sorted(tensors.keys() - names)


def join_names(names: list[str], separator: str = ", ", limit: int = 12) -> str:
    """Join names; of many, the first and how many more there are."""
    shown = separator.join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _nbytes(info: TensorInfo) -> int:
    return info.data_offsets[1] - info.data_offsets[0]
