"""Pools divided by KV head, for a peer of another tensor-parallel size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.pools import Pools, block_nbytes
from omni_kvlink.integrations.vllm.ranks import EngineRank
from omni_kvlink.topology import shard_of

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm.pools import GroupFormat
    from omni_kvlink.integrations.vllm.ranks import RankPart


@dataclasses.dataclass(frozen=True)
class HeadPools:
    """A rank's pools, and the parts of them that go to, or come from, the ranks of a peer.

    Args:
        pools: of whole blocks.
        caches: vLLM's view of each layer's pool, `[num_blocks, heads, tokens, content]` with any
            strides. A CPU kernel packs a block's tokens and content, within each head.
        rank: this engine's.
        peer_tp: tensor-parallel size of the peer; 0 is this engine's.
        model_heads: KV heads of the model.
    """

    pools: Pools
    caches: Mapping[str, torch.Tensor]
    rank: EngineRank
    peer_tp: int
    model_heads: int

    def parts(self, *, sends: bool) -> list[Pools]:
        """The pools of each part that this rank sends, or reads; may be none.

        Raises:
            SchemaError: the blocks, or the heads, cannot be divided so; the error says why.
        """
        parts = self.rank.parts(self._heads(), self.peer_tp, sends=sends)
        return [self._part(part) for part in parts]

    def _heads(self) -> int:
        """KV heads of the whole model, the same in each group; 1 where a rank has all of it."""
        if self.peer_tp in (0, self.rank.tp_size):
            return 1
        counts = {self._heads_of(group) for group in self.pools.format.groups}
        if len(counts) != 1:
            raise self._error(f"its groups have {sorted(counts)} KV heads")
        return counts.pop()

    def _heads_of(self, group: GroupFormat) -> int:
        if group.state:
            raise self._error("a recurrent state is not divided by KV head")
        if "MLA" in group.kind:
            return 1
        if group.kv_heads > 1:
            return group.kv_heads * self.rank.tp_size
        return min(self.model_heads, self.rank.tp_size)  # neighbours may have the same head

    def _part(self, part: RankPart) -> Pools:
        if part.heads is None:
            return dataclasses.replace(self.pools, part=part)
        shard = shard_of(self.rank.tp_rank, self.rank.tp_size, heads=self._heads())
        start, stop = (head - shard.heads[0] for head in part.heads)  # within this rank
        pools = [
            {name: self._view(group, name)[:, :, start:stop] for name in layers}
            for group, layers in zip(self.pools.format.groups, self.pools.pools, strict=True)
        ]
        groups = [
            dataclasses.replace(
                group,
                kv_heads=stop - start,
                block_nbytes=block_nbytes(layers),
                shape=[*group.shape[:1], stop - start, *group.shape[2:]],
            )
            for group, layers in zip(self.pools.format.groups, pools, strict=True)
        ]
        format = dataclasses.replace(self.pools.format, groups=groups)
        return dataclasses.replace(self.pools, part=part, pools=pools, format=format)

    def _view(self, group: GroupFormat, name: str) -> torch.Tensor:
        """A layer's pool as bytes `[num_blocks, block_size, heads, content]`."""
        cache = self.caches[name]
        expected = group.kv_heads, group.block_size
        if cache.dim() != 4 or tuple(cache.shape[1:3]) != expected or cache.stride(3) != 1:
            raise self._error(
                f"layer {name}, a pool {list(cache.shape)} with strides {cache.stride()}, is not "
                f"[num_blocks, {expected[0]} heads, {expected[1]} tokens, content]"
            )
        return cache.view(torch.uint8).transpose(1, 2)

    def _error(self, reason: str) -> SchemaError:
        return SchemaError(
            f"the cache of {self.rank.tp_size} ranks cannot be divided for peer_tp {self.peer_tp}: "
            f"{reason}; use engines of one tensor-parallel size, and leave peer_tp out"
        )
