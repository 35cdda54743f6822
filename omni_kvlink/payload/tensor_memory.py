"""Tensors and memory: the address of a tensor's bytes, and tensors that are views of a region.

An address is checked when a payload is made and when it is taken: between the two a tensor may be
given another storage, and its storage may be cut or freed. No other file asks torch for an address.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch.nn.parameter import is_lazy

from omni_kvlink._native import dlpack
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layout_cache import KnownHeader, LayoutCache
    from omni_kvlink.payload.manifest import Manifest, TensorSpec

Where: TypeAlias = "str | Callable[[], str]"
"""Names a tensor in an error, or returns its name."""

# torch before 2.13 has no `const_data_ptr`, and copies a copy-on-write storage when it is asked.
_const_data_ptr: Callable[[torch.Tensor], int]
_const_data_ptr = getattr(torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr)
_is_cow: Callable[[torch.Tensor], bool] | None = getattr(torch._C, "_is_cow_tensor", None)
_storage_of, _nbytes_of = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes

_is_neg, _offset_of = torch.Tensor.is_neg, torch.Tensor.storage_offset
_KIND = operator.attrgetter("shape", "dtype", "layout", "is_nested")
_is_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous

_TORCH_FUNCTIONS = (
    torch.Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_function_impl,
)
"""The `__torch_function__` of classes that replace none of torch's functions."""

_CURES = {
    "to_local": "give its part of this rank, .to_local()",
    "wait": "give what .wait() returns",
    "get_data": "give .get_data() and .get_mask()",
    "dequantize": "give .dequantize(), or the tensors in it",
    "to_dense": "give .to_dense(), or the tensors in it",
}
"""The cures, by the method of the tensor's class that gives what can be sent."""


_BY_CODE: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in DTYPES.items()}
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in _BY_CODE.items()}
ALL_DTYPES = ", ".join(DTYPES)
_MAKE = dlpack.maker_of(torch.Tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch, such as "bfloat16"; SchemaError if it cannot be sent."""
    if dtype not in _NAMES:
        raise SchemaError(f"dtype {dtype} cannot be sent; use one of {ALL_DTYPES}")
    return _NAMES[dtype]


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors code of a dtype, such as "BF16"; SchemaError if it cannot be sent."""
    return DTYPES[dtype_name(dtype)]


def check_strided(tensor: object, where: str) -> torch.Tensor:
    """Return a tensor in plain, strided memory of its own; SchemaError for anything else.

    A tensor of a class that replaces torch's functions is returned as the plain tensor that it is.
    """
    plain = plain_tensor(tensor, where)
    check_memory(plain, where)
    return plain


def check_memory(plain: torch.Tensor, where: str) -> None:
    """Raise SchemaError, as of `check_strided`, for a tensor that `plain_tensor` has returned."""
    if plain.layout is not torch.strided:
        raise SchemaError(f"{where} is a {plain.layout} on {plain.device}, not dense memory")
    if plain.is_nested:
        raise SchemaError(f"{where} is a nested tensor: send the tensors in it, or pad it")
    address_of(plain, where)


def address_of(tensor: torch.Tensor, where: Where, *, writing: bool = False) -> int:
    """The address of a tensor's first element; its storage holds that and all others.

    For `writing`, what a copy-on-write storage shares is copied first. The address of a tensor
    without elements means nothing. SchemaError if the tensor has no memory of its own, or its
    storage was freed or cut.
    """
    try:
        nbytes = _nbytes_of(_storage_of(tensor))
        address = tensor.data_ptr() if writing else _const_data_ptr(tensor)
    except RuntimeError:  # NotImplementedError, too
        nbytes = address = 0
    extent = extent_of(tensor)
    if extent and not address:
        raise SchemaError(f"{_name(where)} has no memory of its own: {_reason(tensor, nbytes)}")
    needed = int(tensor.storage_offset()) * tensor.dtype.itemsize + extent
    if extent and needed > nbytes:
        raise SchemaError(
            f"{_name(where)}: its storage was cut to {nbytes} bytes, it needs {needed}"
        )
    return address


def extent_of(tensor: torch.Tensor) -> int:
    """Bytes from the first byte of a tensor to behind its last one; 0 if it has no elements."""
    if tensor.is_contiguous():
        return tensor.nbytes
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum([(size - 1) * stride for size, stride in sides])) * tensor.dtype.itemsize


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor in checked memory."""
    return _const_data_ptr(tensor) - int(tensor.storage_offset()) * tensor.dtype.itemsize


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors in checked memory are the same elements, read in the same way."""
    one, other = (
        (_const_data_ptr(view), view.stride(), view.shape, view.dtype, view.device, view.is_neg())
        for view in (a, b)
    )
    return one == other


def readable(tensor: torch.Tensor, where: Where) -> torch.Tensor:
    """The tensor for torch to read: without a graph, all of its elements there.

    SchemaError as of `address_of`; also for a negated tensor of a dtype that torch does not negate.
    """
    address_of(tensor, where)
    if tensor.is_neg() and not _can_negate(tensor.dtype):
        raise SchemaError(f"{_name(where)}: {tensor.dtype} cannot be negated, give resolve_neg()")
    return tensor.detach()


def writable(tensor: torch.Tensor, where: Where) -> torch.Tensor:
    """The tensor for torch to write to: without a graph, all of its elements there."""
    address_of(tensor, where, writing=True)
    return tensor.detach()


def are_whole(
    tensors: Sequence[torch.Tensor], itemsizes: Sequence[int], sizes: Sequence[int]
) -> bool:
    """Whether contiguous tensors of these bytes lie within their storages, and are read as stored.

    Also False for what only a closer look tells; RuntimeError for a tensor without storage.
    """
    if _is_cow is None:
        return False
    for tensor, itemsize, nbytes in zip(tensors, itemsizes, sizes):  # noqa: B905 (one is another's length)
        if _is_cow(tensor) or _is_neg(tensor):
            return False
        if _nbytes_of(_storage_of(tensor)) < _offset_of(tensor) * itemsize + nbytes:
            return False
    return True


def are_alike(tensors: Sequence[object], first: object) -> bool:
    """Whether all are contiguous tensors like the first one, as the link sends them.

    Also False for what only a closer look tells. A few calls a tensor, as in `are_whole`.
    """
    if type(first) is not torch.Tensor or {*map(type, tensors)} != {torch.Tensor}:
        return False
    plain = cast("Sequence[torch.Tensor]", tensors)
    try:
        alike = first.shape, first.dtype, torch.strided, False
        if first.dtype not in _NAMES or {*map(_KIND, plain)} != {alike}:
            return False
        sizes = [first.itemsize] * len(plain), [first.nbytes] * len(plain)
        is_whole = all(map(_is_contiguous, plain)) and are_whole(plain, *sizes)
        return is_whole and first.nbytes > 0 and all(map(_const_data_ptr, plain))
    except RuntimeError:
        return False


def dense_addresses(views: Sequence[object], specs: Sequence[TensorSpec]) -> list[int] | None:
    """The addresses of contiguous host tensors; None unless each has its spec's shape and dtype.

    SchemaError as of `address_of`. One call for all tensors: a call for each would cost a small
    payload more than the tests.
    """
    if len(views) != len(specs):
        return None
    addresses = list[int]()
    for view, spec in zip(views, specs, strict=True):
        if not isinstance(view, torch.Tensor):
            return None
        tensor = view.detach()  # the same memory, whatever shape the caller's gets from now on
        if tensor.shape != spec.shape or CODES.get(tensor.dtype) != spec.dtype:
            return None
        if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
            return None
        addresses.append(address_of(tensor, spec.where))
    return addresses


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


def open_copy(
    region: Region, head: memoryview, request_id: str, layouts: LayoutCache
) -> tuple[KnownHeader, list[torch.Tensor]] | None:
    """The header of a payload, and its tensors as views: see `LayoutCache.open_copy`."""
    return layouts.open_copy(region, head, request_id, _MAKE)


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


@functools.lru_cache(maxsize=64)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def plain_tensor(tensor: object, where: str) -> torch.Tensor:
    """Return a tensor as of `check_strided`, perhaps without memory; SchemaError if it is none."""
    if type(tensor) is torch.Tensor:
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise SchemaError(f"{where} is a {type(tensor).__name__}, wanted a torch.Tensor")
    kind = type(tensor)
    if is_lazy(tensor):
        raise SchemaError(f"{where} is a {kind.__name__}, which has no shape: run its module first")
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_nested:
            return tensor
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            cures = [cure for name, cure in _CURES.items() if _has_own(kind, name)]
            raise SchemaError(
                f"{where} has no memory of its own: it is a {kind.__name__}, whose values other "
                f"tensors hold, or none (a fake tensor); {(*cures, 'give a plain tensor')[0]}"
            )
        function = kind.__torch_function__
        is_torchs = getattr(function, "__func__", function) in _TORCH_FUNCTIONS
        return tensor if is_torchs else tensor.detach()


def _has_own(kind: type[torch.Tensor], name: str) -> bool:
    return getattr(kind, name, None) is not getattr(torch.Tensor, name, None)


def _reason(tensor: torch.Tensor, nbytes: int) -> str:
    """Why a tensor with elements has no address, and what to send instead."""
    if tensor.is_meta:
        return "it is on torch's meta device; give one on a device with memory"
    if tensor._is_zerotensor():
        return "it is a zero tensor of torch's autograd; give its clone()"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "it is a value inside torch.func (vmap, grad, jvp); give a tensor from outside"
    if nbytes:
        return "its values are not there yet, or in another tensor; give a plain tensor"
    return "its storage was freed (as FSDP or an engine that sleeps do); give it memory again first"


def _can_negate(dtype: torch.dtype) -> bool:
    try:
        torch.neg(torch.zeros(1, dtype=dtype))
    except RuntimeError:  # NotImplementedError, too
        return False
    return True


def _name(where: Where) -> str:
    return where if isinstance(where, str) else where()
