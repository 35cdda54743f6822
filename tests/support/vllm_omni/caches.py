"""Pools of blocks as engines have them, and what a receiver must get, by a rule of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import torch

HEAD_DIM = 16
LAYOUTS = ("stacked", "paired", "stacked inside", "packed")


@dataclasses.dataclass(frozen=True)
class Cache:
    """One request's cache in pools; small numbers, but every element of a pool differs.

    Args:
        layout: "stacked" [2, blocks, …], "paired" (K, V), "stacked inside" [blocks, 2, …], or
            "packed" [blocks, heads, block_size, 2 * head_dim].
        heads: the KV heads of the whole model; `shard` of `shards` has a part of them.
    """

    layout: str = "stacked"
    dtype: str = "float32"
    block_ids: tuple[int, ...] = (9, 2, 7, 0)
    seq_len: int = 27
    seed: int = 1
    layers: int = 3
    heads: int = 4
    block_size: int = 8
    blocks: int = 11
    shard: int = 0
    shards: int = 1

    def _whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the whole model, [blocks, block_size, heads, head_dim]."""
        shape = (2, self.blocks, self.block_size, self.heads, HEAD_DIM)
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        mixed = (numbers * 7919 + layer * 104_729 + self.seed * 31) % 65_521 - 32_760
        values = mixed.to(getattr(torch, self.dtype)) / 64  # whole numbers: the same everywhere
        return values[0], values[1]

    def _part(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.chunk(self.shards, dim=axis)[self.shard]

    def pools(self) -> list[Any]:
        """What the engine hands to the manager: one entry a layer."""
        wholes = map(self._whole, range(self.layers))
        return [self._pool(self._part(k, 2), self._part(v, 2)) for k, v in wholes]

    def _pool(self, key: torch.Tensor, value: torch.Tensor) -> Any:
        if self.layout == "stacked":
            return torch.stack([key, value])
        if self.layout == "paired":
            return key.clone(), value.clone()
        if self.layout == "stacked inside":
            return torch.stack([key, value], dim=1)
        assert self.layout == "packed"
        return torch.cat([key, value], dim=-1).transpose(1, 2).contiguous()

    def expected(self) -> dict[str, list[str]]:
        """Fingerprints of what a receiver must have, token by token."""
        found: dict[str, list[str]] = {"key_cache": [], "value_cache": []}
        for layer in range(self.layers):
            for name, pool in zip(found, self._whole(layer), strict=True):
                rows = [
                    pool[self.block_ids[token // self.block_size], token % self.block_size]
                    for token in range(self.seq_len)
                ]
                found[name].append(fingerprint(self._part(torch.stack(rows), 1)))
        return found


def fingerprint(tensor: torch.Tensor) -> str:
    """Shape, dtype and every byte."""
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(raw).hexdigest()}"
