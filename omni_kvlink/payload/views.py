"""`TensorView`: a tensor or a paged tensor, and the bytes that it covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

from omni_kvlink._native import host
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import (
    ALL_DTYPES,
    CODES,
    Where,
    address_of,
    check_memory,
    dtype_code,
    extent_of,
    plain_tensor,
    readable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest, TensorSpec

TensorView: TypeAlias = torch.Tensor | PagedTensor
"""Has `shape`, `dtype`, `device` and `nbytes`."""

Views: TypeAlias = "Sequence[TensorView]"


def check_view(view: object, where: str) -> TensorView:
    """Return a tensor, as of `check_strided`, or a plan that `blank` made.

    SchemaError if it cannot be sent.
    """
    plain = view if isinstance(view, PagedTensor) else plain_tensor(view, where)
    if plain.dtype not in CODES:
        raise SchemaError(f"{where}: dtype {plain.dtype} cannot be sent; use one of {ALL_DTYPES}")
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
    if view.shape != spec.shape or CODES.get(view.dtype) != spec.dtype:
        dtype_code(view.dtype)  # one that cannot be sent is refused as such
        raise SchemaError(
            f"{spec.where()}: {view.dtype} {list(view.shape)}, "
            f"the manifest says {spec.dtype} {list(spec.shape)}"
        )


def is_dense(view: TensorView) -> TypeGuard[torch.Tensor]:
    """Whether a view is a contiguous tensor in the host's memory."""
    return (
        isinstance(view, torch.Tensor)
        and view.is_cpu
        and view.is_contiguous()
        and not view.is_neg()
    )


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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = readable(tensor, "a tensor that is compared").resolve_neg().contiguous()
    # A side of one may have any stride in a contiguous tensor, but view(dtype) demands 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
