"""Caches that are divided by heads, as the ranks of a stage hold them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from omni_kvlink import (
    KVCacheBundle,
    KVCacheTransferData,
    Shard,
)
from omni_kvlink.payload.views import dense
from support.payloads.random_caches import bits, cache


def whole(request_id: str = "r", *, heads: int = 4, **fields: Any) -> KVCacheTransferData:
    return cache(request_id, shape=(5, heads, 3), dtype="bfloat16", **fields)


def shard_of_cache(data: KVCacheTransferData, shard: Shard) -> KVCacheTransferData:
    """What one rank has of a model's cache: tensors of its own, as its engine has them."""
    blocks = {
        name: [
            dense(layer)[:, slice(*shard.heads)].clone() for layer in layers if layer is not None
        ]
        for name, layers in data.layer_blocks.items()
    }
    metadata = dataclasses.replace(data.metadata, shard=shard)
    return KVCacheTransferData(data.request_id, blocks, (), metadata)


def shard_of_latent(data: KVCacheTransferData, shard: Shard) -> KVCacheTransferData:
    metadata = dataclasses.replace(data.metadata, shard=shard)
    return KVCacheTransferData(data.request_id, data.layer_blocks, (), metadata)


def blank_like(data: KVCacheTransferData) -> KVCacheTransferData:
    blocks = {
        name: [torch.zeros(layer.shape, dtype=layer.dtype) for layer in layers if layer is not None]
        for name, layers in data.layer_blocks.items()
    }
    return KVCacheTransferData(data.request_id, blocks, (), data.metadata)


def contents(data: KVCacheTransferData | KVCacheBundle) -> list[bytes]:
    return [bits(dense(view)) for view in data.tensors()]
