"""Memory for a copy of a payload on another device."""

from __future__ import annotations

import torch

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVPayload


def empty_like(data: KVPayload, device: torch.device) -> KVPayload:
    """A payload of the same shapes, dtypes and metadata, its tensors uninitialized on `device`."""
    if isinstance(data, KVCacheTransferData):
        return _empty_cache(data, device)
    return KVCacheBundle(
        data.request_id,
        {
            name: _empty_cache(branch, device)
            if isinstance(branch, KVCacheTransferData)
            else branch
            for name, branch in data.branches.items()
        },
    )


def _empty_cache(data: KVCacheTransferData, device: torch.device) -> KVCacheTransferData:
    blocks = {
        name: [
            None if layer is None else torch.empty(layer.shape, dtype=layer.dtype, device=device)
            for layer in layers
        ]
        for name, layers in data.layer_blocks.items()
    }
    return KVCacheTransferData(data.request_id, blocks, data.block_ids, data.metadata)
