"""`gather_into`: copies tensors into a payload, except those that its memory holds already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.tensor_memory import address_of, dtype_code
from omni_kvlink.system.waits import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.copier import Copier
    from omni_kvlink.memory.region import Lease
    from omni_kvlink.payload.manifest import Manifest, TensorSpec
    from omni_kvlink.payload.views import TensorView


def gather_into(
    copier: Copier,
    views: Sequence[TensorView],
    plan: Manifest,
    lease: Lease,
    deadline: float = NEVER,
) -> tuple[list[str], bool]:
    """Copy tensors into a payload, except those in their places.

    Returns the digests of all, and whether any tensor was copied.

    SchemaError if a tensor is not what the plan says, or lies in another tensor's place;
    TransferTimeout if the deadline (`time.monotonic`) passed before.
    """
    if len(views) != len(plan.tensors):
        raise SchemaError(f"{len(views)} tensors, the plan has {len(plan.tensors)}")
    region, pairs = lease.region, list(zip(views, plan.tensors, strict=True))
    in_place = [_is_in_place(view, spec, plan, lease) for view, spec in pairs]
    if not any(in_place):
        digests_of_all = copier.gather(views, plan, region, deadline=deadline)
        return digests_of_all, any(spec.nbytes for spec in plan.tensors)
    digests = dict.fromkeys((spec.name for spec in plan.tensors), "")
    ready = [spec for spec, is_ready in zip(plan.tensors, in_place, strict=True) if is_ready]
    rest = [pair for pair, is_ready in zip(pairs, in_place, strict=True) if not is_ready]
    if rest:
        specs = [spec for _, spec in rest]
        new_views = [view for view, _ in rest]
        new = copier.gather(new_views, plan.only(specs), region, deadline=deadline)
        digests.update(zip((spec.name for spec in specs), new, strict=True))
    if plan.has_digests:
        new = copier.digest(plan.only(ready), region, deadline=deadline)
        digests.update(zip((spec.name for spec in ready), new, strict=True))
    # A tensor without elements lies nowhere, and is never in place; nothing of it is copied.
    return list(digests.values()), any(spec.nbytes for _, spec in rest)


def _is_in_place(view: TensorView, spec: TensorSpec, plan: Manifest, lease: Lease) -> bool:
    if not isinstance(view, torch.Tensor) or not view.is_cpu or view.is_neg():
        return False
    at = address_of(view, spec.where) - lease.region.address
    if at == plan.header_nbytes + spec.start and view.is_contiguous():
        # A tensor that the plan does not know is left to the copier, which says so.
        return tuple(view.shape) == spec.shape and dtype_code(view.dtype) == spec.dtype
    if 0 <= at < lease.capacity:
        where = "lies in the payload's memory, but not contiguous at its own place"
        raise SchemaError(f"{spec.where()} {where}")
    return False
