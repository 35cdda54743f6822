"""Tensors outside and inside a payload: dtypes, dense and paged views, the bytes they cover."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

from omni_kvlink._native import dlpack, host
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.dtypes import DTYPES
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import (
    Where,
    address_of,
    check_memory,
    extent_of,
    plain_tensor,
    readable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import KnownHeader, Manifest, TensorSpec

TensorView: TypeAlias = torch.Tensor | PagedTensor
"""Has `shape`, `dtype`, `device` and `nbytes`."""

Views: TypeAlias = "Sequence[TensorView]"

_BY_CODE: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in DTYPES.items()}
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in _BY_CODE.items()}
_ALL_NAMES = ", ".join(DTYPES)
_MAKE = dlpack.maker_of(torch.Tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch, such as "bfloat16"; SchemaError if it cannot be sent."""
    if dtype not in _NAMES:
        raise SchemaError(f"dtype {dtype} cannot be sent; use one of {_ALL_NAMES}")
    return _NAMES[dtype]


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors code of a dtype, such as "BF16"; SchemaError if it cannot be sent."""
    return DTYPES[dtype_name(dtype)]


def check_view(view: object, where: str) -> TensorView:
    """Return a tensor, as of `check_strided`, or a plan that `blank` made.

    SchemaError if it cannot be sent.
    """
    plain = view if isinstance(view, PagedTensor) else plain_tensor(view, where)
    if plain.dtype not in _NAMES:
        raise SchemaError(f"{where}: dtype {plain.dtype} cannot be sent; use one of {_ALL_NAMES}")
    if isinstance(plain, torch.Tensor) and not plain.is_meta:
        check_memory(plain, where)
    return plain


def check_fit(views: Views, manifest: Manifest, region: Region) -> list[TensorView]:
    """Return views as of `aliases`; SchemaError unless they and the region match the manifest."""
    check_sizes(views, manifest, region)
    fitting = aliases(views)
    for view, spec in zip(fitting, manifest.tensors, strict=True):
        check_view_fits(view, spec)
    return fitting


def aliases(views: Views) -> list[TensorView]:
    """The same memory, whatever shape, strides and storage the caller's tensors get from now on.

    What remains to be checked, where an address is taken, is whether the storage was cut or freed.
    """
    return [view.detach() if isinstance(view, torch.Tensor) else view for view in views]


def check_sizes(views: Views, manifest: Manifest, region: Region) -> None:
    """Raise SchemaError unless the region holds the payload, and each tensor has a view."""
    if region.nbytes < manifest.nbytes:
        raise SchemaError(f"a payload of {manifest.nbytes} bytes in a region of {region.nbytes}")
    if len(views) != len(manifest.tensors):
        raise SchemaError(f"{len(views)} tensors, the manifest has {len(manifest.tensors)}")


def check_view_fits(view: TensorView, spec: TensorSpec) -> None:
    """Raise SchemaError unless a view has bytes, and the shape and dtype of its spec."""
    if not isinstance(view, TensorView):
        raise SchemaError(f"{spec.where()}: a {type(view).__name__}, wanted a torch.Tensor")
    if not isinstance(view, PagedTensor) and view.is_meta:
        raise SchemaError(
            f"{spec.where()} has no bytes: it is on torch's meta device, "
            "as the plans of blank() are; give a tensor on a device with memory"
        )
    if view.shape != spec.shape or _CODES.get(view.dtype) != spec.dtype:
        dtype_code(view.dtype)  # one that cannot be sent is refused as such
        raise SchemaError(
            f"{spec.where()}: {view.dtype} {list(view.shape)}, "
            f"the manifest says {spec.dtype} {list(spec.shape)}"
        )


def tensor_view(region: Region, spec: TensorSpec, data: int) -> torch.Tensor:
    """One tensor of a payload whose data section starts at byte `data`; see `tensor_views`."""
    return tensor_views(region, [spec], data)[0]


def payload_views(
    region: Region, payload: Manifest | KnownHeader, numbers: range | None = None
) -> list[torch.Tensor]:
    """The tensors of a payload with these numbers, all by default, as views; see `tensor_views`.

    The native library makes them in one call, if it has the layout. For each tensor that torch
    makes, torch gives the interpreter's lock away: in a process with another busy thread it takes
    milliseconds to get it back.
    """
    numbers = range(len(payload.tensors)) if numbers is None else numbers
    data, layout = payload.header_nbytes, payload.layout
    if layout is not None and layout.packed is not None and _MAKE and region.device == "cpu":
        span = region.address + data, region.nbytes - data
        return layout.packed.make_views(*span, numbers, region.span, _MAKE)
    return tensor_views(region, payload.tensors[numbers.start : numbers.stop], data)


def tensor_views(region: Region, specs: Sequence[TensorSpec], data: int) -> list[torch.Tensor]:
    """Tensors of a payload as views of its region; its data section starts at byte `data`.

    They share the region's span, so the region lives, and its finalizer waits, until the last
    tensor made here is gone. A ctypes span, not a memoryview, because torch warns about every
    readonly buffer and then ignores the flag; readonly memory is protected by its mapping.
    """
    typed: dict[str, torch.Tensor] = {}  # one call a tensor: a payload has hundreds
    views = []
    for spec in specs:
        elements = typed.get(spec.dtype)
        if elements is None:
            elements = typed[spec.dtype] = _typed_tensor(region, _BY_CODE[spec.dtype])
        first = (data + spec.start) // elements.itemsize
        views.append(elements.as_strided(spec.shape, _contiguous_strides(spec.shape), first))
    return views


def _typed_tensor(region: Region, dtype: torch.dtype) -> torch.Tensor:
    """The whole elements of a region."""
    count = region.nbytes // dtype.itemsize
    if region.device == "cpu":
        return torch.frombuffer(region.span, dtype=dtype, count=count)  # type: ignore[call-overload, unused-ignore,no-any-return]
    return byte_tensor(region)[: count * dtype.itemsize].view(dtype)


def byte_tensor(region: Region) -> torch.Tensor:
    """The region as uint8 `[nbytes]`, on its device; it lives as long as the tensor."""
    if region.device == "cpu":
        return _typed_tensor(region, torch.uint8)
    return torch.as_tensor(_CudaBytes(region), device=region.device)


class _CudaBytes:
    """A region of a device's memory in the form that torch takes, and keeps as long as a tensor."""

    def __init__(self, region: Region):
        self._span, data = region.span, (region.address, False)
        form = {"shape": (region.nbytes,), "typestr": "|u1", "data": data, "version": 3}
        self.__cuda_array_interface__ = form


def is_dense(view: TensorView) -> TypeGuard[torch.Tensor]:
    """Whether a view is a contiguous tensor in the host's memory."""
    return (
        isinstance(view, torch.Tensor)
        and view.is_cpu
        and view.is_contiguous()
        and not view.is_neg()
    )


def dense_addresses(views: Views, specs: Sequence[TensorSpec]) -> list[int] | None:
    """The addresses of contiguous host tensors; None unless each has its spec's shape and dtype.

    SchemaError as of `address_of`. One call for all tensors: a call for each would cost a small
    payload more than the tests.
    """
    if len(views) != len(specs):
        return None
    addresses = list[int]()
    for view, spec in zip(aliases(views), specs, strict=True):
        if not isinstance(view, torch.Tensor) or not view.is_cpu or view.is_neg():
            return None
        if view.shape != spec.shape or _CODES.get(view.dtype) != spec.dtype:
            return None
        if not view.is_contiguous():
            return None
        addresses.append(address_of(view, spec.where))
    return addresses


def dense(view: TensorView) -> torch.Tensor:
    """The tensor itself; for a paged tensor a new one."""
    return view.dense() if isinstance(view, PagedTensor) else view


def first_tokens(view: TensorView, tokens: int) -> TensorView:
    """A view of the first `tokens` tokens; no byte is copied."""
    return view.first(tokens) if isinstance(view, PagedTensor) else view[:tokens]


def same_bytes(a: TensorView, b: TensorView) -> bool:
    """Bit-exact equality, NaN payloads and signed zeros included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes_of(dense(a)), _bytes_of(dense(b)))


def write(paged: PagedTensor, tokens: torch.Tensor) -> None:
    """Copy tokens of the same shape and dtype, on any device, into the blocks of a paged tensor.

    SchemaError if the two share memory.
    """
    packed: host.PackedView = ()
    if paged.device.type == "cpu" and is_dense(tokens) and not host.missing():
        packed = paged.packed(paged.where, writing=True)
    if not packed:
        paged.fill(tokens)
        return
    batch = host.CopyBatch(address_of(tokens, "the tokens to write"), tokens.nbytes)
    batch.add(0, tokens.nbytes, packed, digest=False)
    try:
        batch.scatter(b"")
    except host.CopyFailed as failed:
        raise SchemaError(f"{paged.where}: {failed}") from None


def packed_view(view: TensorView, where: Where, *, writing: bool = False) -> host.PackedView:
    """Address, sizes and strides of a tensor, as the native and the CUDA library take them.

    Empty if they cannot address it: a negated tensor, or one with too many dimensions. SchemaError
    as of `address_of`.
    """
    if isinstance(view, PagedTensor):
        return view.packed(where, writing=writing)
    if view.is_neg():
        return ()
    if view.is_contiguous():
        return host.packed_flat_view(address_of(view, where, writing=writing), view.nbytes)
    if view.dim() > host.DIMS:
        return ()
    address, size = address_of(view, where, writing=writing), view.element_size()
    return host.packed_view(
        address,
        extent_of(view),  # the library checks the strides against it
        size,
        sizes=view.shape,
        strides=[stride * size for stride in view.stride()],
    )


@functools.lru_cache(maxsize=64)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = readable(tensor, "a tensor that is compared").resolve_neg().contiguous()
    # A side of one may have any stride in a contiguous tensor, but view(dtype) demands 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
