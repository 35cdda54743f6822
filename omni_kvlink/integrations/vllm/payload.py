"""A prompt's cache on the link: whole blocks as they lie in the engine's pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.blocks import BlockFormat
from omni_kvlink.integrations.vllm.step import Cache
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData

HEAD, LAST = "head", "last"
"""The branches: the block of the prompt's last token, and all before it, where there are any."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """An engine's blocks as bytes.

    Attributes:
        format: what they mean.
        layers: one pool `[num_blocks, block_size, row]` of uint8 a layer.
    """

    format: BlockFormat
    layers: Sequence[torch.Tensor]

    def head(self, cache: Cache) -> int:
        """Blocks before the one of the last token."""
        return (cache.tokens - 1) // self.format.block_size

    def split(self, cache: Cache) -> dict[str, list[int]]:
        """A cache's blocks by branch; a branch without any is left out."""
        head = self.head(cache)
        if len(cache.blocks) <= head:
            raise SchemaError(
                f"{len(cache.blocks)} blocks for {cache.tokens} tokens; wanted {head + 1}"
            )
        parts = {HEAD: cache.blocks[:head], LAST: cache.blocks[head : head + 1]}
        return {name: blocks for name, blocks in parts.items() if blocks}

    def pages(self, blocks: Sequence[int]) -> BlockTable:
        """All rows of these blocks."""
        size = self.format.block_size
        return BlockTable.of_blocks(blocks, block_size=size, tokens=len(blocks) * size)

    def place(self, layer: int, pages: BlockTable) -> PagedTensor:
        return PagedTensor(self.layers[layer], pages, f"layer {self.format.layers[layer]}")

    def bundle(self, cache: Cache) -> KVCacheBundle:
        """A cache to be sent, where it lies. `kv_lens` counts the rows of whole blocks."""
        size = self.format.block_size
        branches = {}
        start = 0
        for name, blocks in self.split(cache).items():
            rows = len(blocks) * size
            start += rows
            branches[name] = KVCacheTransferData.from_paged(
                cache.key,
                self.layers,
                None,
                block_size=size,
                block_ids=blocks,
                metadata={
                    "kv_lens": [rows],
                    "ropes": [min(start, cache.tokens)],
                    "layout": "ND",
                    "extra": self._said(cache),
                },
            )
        return KVCacheBundle(cache.key, branches)

    def check(self, manifest: Manifest, cache: Cache, *, peer: str) -> None:
        """Refuse a cache of another prompt, or of blocks that this engine reads differently.

        Raises:
            SchemaError: both sides named.
        """
        wanted = self._said(cache)
        for branch in manifest.branches:
            self.format.check(branch.extra.get("format"), peer=peer)
            for name in ("tokens", "prompt"):
                mine, theirs = wanted[name], branch.extra.get(name)
                if mine != theirs:
                    raise SchemaError(
                        f"{peer} computed {manifest.request_id!r} from another prompt: "
                        f"{name} is {theirs!r:.80} there and {mine!r} here"
                    )
        sent = {branch.name: branch.seq_len for branch in manifest.branches}
        size = self.format.block_size
        here = {name: len(blocks) * size for name, blocks in self.split(cache).items()}
        if sent != here or any(b.layout != "ND" for b in manifest.branches):
            raise SchemaError(f"{peer} sent rows {sent}; wanted {here}")

    def _said(self, cache: Cache) -> dict[str, Any]:
        return {
            "format": self.format.to_dict(),
            "tokens": cache.tokens,
            "prompt": cache.prompt,
        }
