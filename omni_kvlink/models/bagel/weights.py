"""Loading a checkpoint's tensors: every name and shape is checked before any is read."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from omni_kvlink.models.bagel.shards import Cut


class CheckpointError(SchemaError):
    """A checkpoint file lacks tensors that its configuration requires."""


def table_side(path: Path, key: str, default: int) -> int:
    """Return the cells along one side of the square position table `key`, or the default."""
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
    """Load the tensors of a module that was built on the meta device.

    Args:
        module: to be filled.
        path: the safetensors file.
        known: all names that the file may have, including those that this module does not use.
        dtype: of the loaded weights, whatever the file has.
        device: of the loaded weights.
        float32: names that stay float32.
        cuts: the parts to read of tensors that are not needed as a whole.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: names are missing or unknown, or tensors have other shapes; lists all.
    """
    expected = {
        name: cuts[name].whole if name in cuts else tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
    }
    with _open(path, str(device)) as file:
        _check(path.name, file, expected, set(known))
        tensors: dict[str, Tensor] = {
            name: _read(file, name, cuts.get(name)).to(torch.float32 if name in float32 else dtype)
            for name in expected
        }
    module.requires_grad_(False)
    module.load_state_dict(tensors, assign=True)
    module.eval()


def _read(file: Any, name: str, cut: Cut | None) -> Tensor:
    read: Tensor = file.get_tensor(name) if cut is None else file.get_slice(name)[cut.index]
    return read.contiguous()


def _check(where: str, file: Any, expected: dict[str, tuple[int, ...]], known: set[str]) -> None:
    present = set(file.keys())
    complaints = []
    for title, names in (
        ("missing", expected.keys() - present),
        ("unexpected", present - known - expected.keys()),
    ):
        if names:
            complaints.append(f"{len(names)} {title}: {_few(sorted(names))}")
    for name in sorted(expected.keys() & present):
        shape = tuple(file.get_slice(name).get_shape())
        if shape != expected[name]:
            complaints.append(f"{name} has shape {shape}, wanted {expected[name]}")
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
