"""Between bytes and tensors: the dtype table, and the library's only `torch.frombuffer`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.branch import DTYPES
from omni_kvlink.payload.manifest import TensorSpec

_BY_CODE: dict[str, torch.dtype] = {
    code: dtype
    for name, code in DTYPES.items()
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}
_NAMES = {dtype: name for name in DTYPES if (dtype := getattr(torch, name)) is not None}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without the prefix, such as "bfloat16".

    Raises:
        SchemaError: the format has no code for the dtype.
    """
    if dtype not in _NAMES:
        raise SchemaError(f"dtype {dtype} cannot be sent; wanted one of {', '.join(DTYPES)}")
    return _NAMES[dtype]


def dtype_code(dtype: torch.dtype) -> str:
    """safetensors' code of a dtype, such as "BF16".

    Raises:
        SchemaError: the format has no code for the dtype.
    """
    return DTYPES[dtype_name(dtype)]


def tensor_view(region: Region, spec: TensorSpec, data: int) -> torch.Tensor:
    """One tensor as it lies in the region; see `tensor_views`."""
    return tensor_views(region, [spec], data)[0]


def tensor_views(region: Region, specs: Sequence[TensorSpec], data: int) -> list[torch.Tensor]:
    """Tensors as they lie in the region, no byte copied.

    They share the region's span, so the region lives, and its finalizer waits, until the last
    tensor made here is gone. A ctypes span, not a memoryview, because torch warns about every
    readonly buffer and then ignores the flag; readonly memory is protected by its mapping.

    Args:
        region: the payload.
        specs: which tensors.
        data: where the data section starts, in bytes.
    """
    flat = byte_tensor(region)  # one buffer for all, and one call a tensor: a payload has hundreds
    typed: dict[str, torch.Tensor] = {}
    views = []
    for spec in specs:
        if spec.dtype not in typed:
            dtype = _BY_CODE[spec.dtype]
            typed[spec.dtype] = flat[: region.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        whole = typed[spec.dtype]
        first = (data + spec.start) // whole.itemsize
        views.append(whole.as_strided(spec.shape, _contiguous(spec.shape), first))
    return views


def byte_tensor(region: Region) -> torch.Tensor:
    """The region as uint8 `[nbytes]`; it lives as long as the tensor."""
    return torch.frombuffer(region.span, dtype=torch.uint8)  # type: ignore[call-overload, unused-ignore,no-any-return]


@functools.lru_cache(maxsize=64)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
