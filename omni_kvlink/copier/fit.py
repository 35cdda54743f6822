"""The checks of every copier before it writes into tensors: that they fit, and are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.overlap import check_distinct
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import address_of, extent_of
from omni_kvlink.payload.views import check_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


def check_targets(
    views: Sequence[TensorView], manifest: Manifest, region: Region
) -> list[TensorView]:
    """Return views as of `check_fit`, if each byte of them is written at most once.

    SchemaError if one shares memory with another one or with the payload, or two elements of one.
    """
    views = check_fit(views, manifest, region)
    for view, spec in zip(views, manifest.tensors, strict=True):
        memory = view.pool if isinstance(view, PagedTensor) else view
        start = address_of(memory, spec.where, writing=True)
        end = region.address + region.nbytes
        is_near = memory.is_cpu or region.device != "cpu"  # a device's addresses are its own
        if is_near and start < end and region.address < start + extent_of(memory):
            raise SchemaError(f"{spec.where()}: the target lies in the payload itself")
    check_distinct(views, lambda number: manifest.tensors[number].where())
    return views
