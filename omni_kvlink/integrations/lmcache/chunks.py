"""LMCache's chunks as payloads: the name of a key, the bytes and the layout of a memory object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryObj

PART = "chunk"
"""The name of a payload's one tensor: the chunk's bytes, uint8 of shape [bytes]."""


def name_of(key: ObjectKey) -> str:
    """The name of a chunk under its identity: its hash, and whose part of the cache it is.

    `kv_rank` is the number of workers and the worker's.
    """
    return f"lmcache/{key.chunk_hash.hex()}/{key.kv_rank:08x}/{key.object_group_id:x}"


def layout_of(chunk: MemoryObj) -> dict[str, Any]:
    """Describe the bytes of a memory object: one shape and dtype for each group of layers."""
    meta = chunk.metadata
    shapes = [meta.shape] if meta.shapes is None else meta.shapes
    dtypes = [meta.dtype] if meta.dtypes is None else meta.dtypes
    return {
        "shapes": [list(shape) for shape in shapes],
        "dtypes": [str(dtype) for dtype in dtypes],
        "format": meta.fmt.name,
    }


def bytes_of(chunk: MemoryObj) -> torch.Tensor:
    """The logical bytes of a memory object of the host, as uint8 of shape [bytes]; no copy.

    Padding behind them is not among them.
    """
    return torch.frombuffer(chunk.byte_array, dtype=torch.uint8)
