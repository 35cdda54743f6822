"""Places: where a cache lies outside a payload, as a dense tensor or in pages."""

from __future__ import annotations

from typing import TypeAlias

import torch

from omni_kvlink._native import host
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.paged import PagedTensor

TensorView: TypeAlias = torch.Tensor | PagedTensor
"""Has `shape`, `dtype`, `device` and `nbytes`."""


def dense(place: TensorView) -> torch.Tensor:
    """The tensor itself; for pages a new one."""
    return place.dense() if isinstance(place, PagedTensor) else place


def first_tokens(place: TensorView, tokens: int) -> TensorView:
    """The first `tokens` tokens, no byte copied."""
    return place.first(tokens) if isinstance(place, PagedTensor) else place[:tokens]


def same_bytes(a: TensorView, b: TensorView) -> bool:
    """Bit-exact equality, NaN payloads and signed zeros included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_plain_bytes(dense(a)), _plain_bytes(dense(b)))


def write(place: PagedTensor, tokens: torch.Tensor) -> None:
    """Copy tokens into their pages, by the compiled library where it can.

    Args:
        tokens: of the place's shape and dtype, on any device.

    Raises:
        SchemaError: the two share memory.
    """
    words = packed_view(place)
    if not words or not tokens.is_cpu or not _is_flat(tokens) or host.missing():
        place.fill(tokens)
        return
    call = host.CopyBatch(tokens.data_ptr(), tokens.nbytes)
    call.add(0, tokens.nbytes, words, digest=False)
    try:
        call.scatter(b"")
    except host.CopyFailed as failed:
        raise SchemaError(f"{place.where}: {failed}") from None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether writing to one element may change another; by strides, so that it is cheap."""
    reach = 1
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(side for side in sides if side[1] > 1):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def packed_view(place: TensorView, on: str = "cpu") -> host.PackedView:
    """The place as the compiled libraries take it; empty if only torch can reach it.

    Args:
        on: the type of the device whose memory the library can reach.
    """
    if place.device.type != on:
        return ()
    if isinstance(place, PagedTensor):
        return _paged_view(place)
    if _is_flat(place):
        return host.packed_flat_view(place.data_ptr(), place.nbytes)
    return _strided_view(place)


def _is_flat(tensor: torch.Tensor) -> bool:
    return not tensor.is_neg() and tensor.is_contiguous()


def _strided_view(tensor: torch.Tensor) -> host.PackedView:
    """Bounded by the tensor's storage, so that the library can check the strides against it."""
    if tensor.is_neg() or tensor.dim() > host.DIMS:
        return ()
    size, storage = tensor.element_size(), tensor.untyped_storage()
    return host.packed_view(
        storage.data_ptr(),
        storage.nbytes(),
        size,
        offset=int(tensor.storage_offset()) * size,
        sizes=tensor.shape,
        strides=[stride * size for stride in tensor.stride()],
    )


def _paged_view(paged: PagedTensor) -> host.PackedView:
    pool, pages = paged.pool, paged.pages
    inner = 2 if pages.by_slot else 1  # the dimensions that are not looked up
    unused = host.DIMS - 1 - (pool.dim() - inner)
    if pool.is_neg() or unused < 0:
        return ()
    size, storage = pool.element_size(), pool.untyped_storage()
    strides = [stride * size for stride in pool.stride()]
    view = host.packed_view(
        storage.data_ptr(),
        storage.nbytes(),
        size,
        offset=int(pool.storage_offset()) * size,
        sizes=(len(pages.index), *(1,) * unused, *pool.shape[inner:]),
        strides=(strides[0], *(0,) * unused, *strides[inner:]),
    )
    if not pages.by_slot:
        return host.packed_indexed_view(view, pages.address, limit=pool.shape[0])
    return host.packed_indexed_view(
        view,
        pages.address,
        limit=pool.shape[0] * pages.block_size,
        split=pages.block_size,
        stride=strides[1],
    )


def _plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_neg().contiguous()
    # Sides of one may have any stride in a contiguous tensor, and a dtype's view wants 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
