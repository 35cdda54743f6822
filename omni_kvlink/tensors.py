"""Between bytes and tensors: the dtype table, and the library's only `torch.frombuffer`."""

from __future__ import annotations

import math

import torch

from .branch import DTYPES
from .errors import SchemaError
from .memory import Region
from .wire import TensorSpec

_BY_CODE: dict[str, torch.dtype] = {
    code: dtype
    for name, code in DTYPES.items()
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}
_NAMES = {dtype: name for name in DTYPES if (dtype := getattr(torch, name)) is not None}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without the prefix, such as "bfloat16".

    Raises:
        SchemaError: a dtype that no KV cache has.
    """
    if dtype not in _NAMES:
        raise SchemaError(f"dtype {dtype} cannot be sent; wanted one of {', '.join(DTYPES)}")
    return _NAMES[dtype]


def tensor_view(region: Region, spec: TensorSpec, data: int) -> torch.Tensor:
    """The tensor as it lies in the region, no byte copied.

    It shares the region's span, so the region lives, and its finalizer waits, until the last
    tensor made here is gone. A ctypes span, not a memoryview, because torch warns about every
    readonly buffer and then ignores the flag; readonly memory is protected by its mapping.

    Args:
        region: the payload.
        spec: which tensor.
        data: where the data section starts, in bytes.
    """
    flat = torch.frombuffer(
        region.span,  # type: ignore[call-overload, unused-ignore]
        dtype=_BY_CODE[spec.dtype],
        count=math.prod(spec.shape),
        offset=data + spec.start,
    )
    return flat.view(spec.shape)
