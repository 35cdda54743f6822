"""Loading a checkpoint's tensors: every name and shape is checked before any is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.shards import Cut


class CheckpointError(SchemaError):
    """A checkpoint file does not hold the tensors that its configuration calls for."""


def table_side(path: Path, key: str, default: int) -> int:
    """Cells along one side of the square position table `key`; the default where there is none."""
    with _open(path, "cpu") as file:
        if key not in file.keys():  # noqa: SIM118 - the file is no mapping
            return default
        rows: int = file.get_slice(key).get_shape()[0]
    side = math.isqrt(rows)
    if side**2 != rows:
        raise CheckpointError(f"{path.name}: {key} has {rows} rows, which is no square")
    return side


def load_weights(
    module: nn.Module,
    path: Path,
    *,
    known: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    float32: frozenset[str] = frozenset(),
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> None:
    """Fills a module that was built on the meta device.

    Args:
        known: all names that may be in the file, those that this module does not use included.
        dtype: of the loaded weights, whatever the file holds.
        float32: names that stay float32 instead.
        cuts: of which tensors a piece is wanted; nothing else of them is read.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a name is missing or unknown, or a tensor has another shape; all are named.
    """
    wanted = {
        name: cuts[name].whole if name in cuts else tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
    }
    with _open(path, str(device)) as file:
        _check(path.name, file, wanted, set(known))
        tensors: dict[str, Tensor] = {
            name: _read(file, name, cuts.get(name)).to(torch.float32 if name in float32 else dtype)
            for name in wanted
        }
    module.requires_grad_(False)
    module.load_state_dict(tensors, assign=True)
    module.eval()


def _read(file: Any, name: str, cut: Cut | None) -> Tensor:
    read: Tensor = file.get_tensor(name) if cut is None else file.get_slice(name)[cut.index]
    return read.contiguous()


def _check(where: str, file: Any, wanted: dict[str, tuple[int, ...]], known: set[str]) -> None:
    present = set(file.keys())
    complaints = []
    for title, names in (
        ("missing", wanted.keys() - present),
        ("unexpected", present - known - wanted.keys()),
    ):
        if names:
            complaints.append(f"{len(names)} {title}: {_few(sorted(names))}")
    for name in sorted(wanted.keys() & present):
        shape = tuple(file.get_slice(name).get_shape())
        if shape != wanted[name]:
            complaints.append(f"{name} has shape {shape}, wanted {wanted[name]}")
    if complaints:
        raise CheckpointError(f"{where}: {_few(complaints, '; ')}")


def _few(names: list[str], separator: str = ", ", limit: int = 12) -> str:
    shown = separator.join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _open(path: Path, device: str) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {path.parent}")
    try:
        return safe_open(str(path), framework="pt", device=device)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
