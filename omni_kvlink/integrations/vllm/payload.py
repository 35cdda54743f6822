"""A prompt's cache as a payload: whole blocks, read from and written to the engine's pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import (
    BlockTable,
    BundleBranch,
    KVCacheBundle,
    PagedTensor,
    TensorTransferData,
)
from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.blocks import BlockFormat

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm.step import PromptCache
    from omni_kvlink.lowlevel import Manifest

HEAD, LAST = "head", "last"
"""The branches: the block of the prompt's last token, and the blocks before it, if any."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """An engine's KV pools as bytes.

    Attributes:
        format: how the bytes of a block are read.
        layers: one pool per layer, uint8 `[num_blocks, block_size, row]`.
    """

    format: BlockFormat
    layers: Sequence[torch.Tensor]

    def head(self, cache: PromptCache) -> int:
        """The number of blocks before the last token's block."""
        return (cache.tokens - 1) // self.format.block_size

    def split(self, cache: PromptCache) -> dict[str, list[int]]:
        """The cache's block ids by branch; a branch without blocks is left out.

        Raises:
            SchemaError: the cache has fewer blocks than its tokens need.
        """
        head = self.head(cache)
        if len(cache.blocks) <= head:
            raise SchemaError(
                f"{len(cache.blocks)} blocks for {cache.tokens} tokens; {head + 1} are needed"
            )
        parts = {HEAD: cache.blocks[:head], LAST: cache.blocks[head : head + 1]}
        return {name: blocks for name, blocks in parts.items() if blocks}

    def block_table(self, blocks: Sequence[int]) -> BlockTable:
        """The block table of all rows of these blocks."""
        size = self.format.block_size
        return BlockTable.of_blocks(blocks, block_size=size, tokens=len(blocks) * size)

    def layer_view(self, layer: int, block_table: BlockTable) -> PagedTensor:
        """The rows of a block table in one layer's pool."""
        return PagedTensor(self.layers[layer], block_table, f"layer {self.format.layers[layer]}")

    def bundle(self, cache: PromptCache) -> KVCacheBundle:
        """Describe a cache in the pools as a payload: per branch, the rows of whole blocks."""
        branches: dict[str, BundleBranch] = {}
        for name, blocks in self.split(cache).items():
            table = self.block_table(blocks)
            views = {
                layer: self.layer_view(index, table)
                for index, layer in enumerate(self.format.layers)
            }
            branches[name] = TensorTransferData(cache.key, views, self._metadata(cache))
        return KVCacheBundle(cache.key, branches)

    def check(self, manifest: Manifest, cache: PromptCache, *, peer: str) -> None:
        """Check that a received cache belongs to the prompt and has this engine's block format.

        Raises:
            SchemaError: it does not; the error gives both values.
        """
        expected = self._metadata(cache)
        for branch in manifest.branches:
            self.format.check(branch.extra.get("format"), peer=peer)
            for name in ("tokens", "prompt"):
                mine, theirs = expected[name], branch.extra.get(name)
                if mine != theirs:
                    raise SchemaError(
                        f"{peer} computed {manifest.request_id!r} from another prompt: "
                        f"{name} is {theirs!r:.80} there and {mine!r} here"
                    )
        rows = {
            branch.name: {spec.shape[0] for spec in manifest.tensors_of(branch)}
            for branch in manifest.branches
        }
        size = self.format.block_size
        here = {name: {len(blocks) * size} for name, blocks in self.split(cache).items()}
        trees = [list(branch.tree or ()) for branch in manifest.branches]
        if rows != here or any(tree != self.format.layers for tree in trees):
            raise SchemaError(f"{peer} sent rows {rows}; expected {here} of each layer")

    def _metadata(self, cache: PromptCache) -> dict[str, Any]:
        return {
            "format": self.format.to_dict(),
            "tokens": cache.tokens,
            "prompt": cache.prompt,
        }
