"""What the layers of the stepped engine write into their pools and read there, by cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK, HEADS, ROW = 32, 2, 8
SIZES = {"num_kv_heads": HEADS, "head_size": ROW // 2, "dtype": torch.float32}
LATENT = {"num_kv_heads": 1, "head_size": 12, "dtype": torch.float32}


def full(*layers: str, block: int = BLOCK) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([*layers], FullAttentionSpec(block_size=block, **SIZES))


def sliding(window: int, *layers: str, block: int = BLOCK) -> KVCacheGroupSpec:
    spec = SlidingWindowSpec(block_size=block, sliding_window=window, **SIZES)
    return KVCacheGroupSpec([*layers], spec)


def chunked(chunk: int, *layers: str) -> KVCacheGroupSpec:
    spec = ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=chunk, **SIZES)
    return KVCacheGroupSpec([*layers], spec)


def latent(*layers: str) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([*layers], MLAAttentionSpec(block_size=BLOCK, **LATENT))


def sliding_latent(window: int, *layers: str) -> KVCacheGroupSpec:
    spec = SlidingWindowMLASpec(block_size=BLOCK, sliding_window=window, **LATENT)
    return KVCacheGroupSpec([*layers], spec)


def uniform(*layers: str) -> KVCacheGroupSpec:
    """One group whose layers have latents of different sizes."""
    specs = {
        name: MLAAttentionSpec(block_size=BLOCK, **{**LATENT, "head_size": 4 + 4 * number})
        for number, name in enumerate(layers)
    }
    return KVCacheGroupSpec([*layers], UniformTypeKVCacheSpecs(BLOCK, specs))


def state(*layers: str, block: int, mode: str) -> KVCacheGroupSpec:
    spec = MambaSpec(
        block_size=block, shapes=((3,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )
    return KVCacheGroupSpec([*layers], spec)


class AttentionLayer:
    """Writes each token's number into its slot, another one for each head."""

    def __init__(self, spec: Any, blocks: int, layout: str = "LBHNC", first_head: int = 0):
        self.size: int = spec.block_size
        self._window: int = getattr(spec, "sliding_window", None) or 0
        self._chunk: int = getattr(spec, "attention_chunk_size", None) or 0
        row = spec.state_content_size_bytes // 4
        heads = spec.num_kv_heads
        self._heads = 1000.0 * torch.arange(first_head, first_head + heads)[None, :, None]
        self.pool = torch.zeros(blocks, heads, spec.block_size, row)
        if layout == "LBNHC":
            self.pool = torch.zeros(blocks, spec.block_size, heads, row).transpose(1, 2)

    def forward(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> bool:
        """Compute the tokens from `start` on; whether those that the first one sees were there."""
        first = self._first(start)
        positions, table = torch.arange(first, len(tokens)), torch.tensor(blocks)
        numbers = torch.tensor([1.0 + token for token in tokens[first:]])[:, None, None]
        numbers = numbers + self._heads
        slots = table[positions // self.size], positions % self.size
        seen = slice(0, start - first)
        found = self.pool[slots[0][seen], :, slots[1][seen]]
        self.pool[slots[0][start - first :], :, slots[1][start - first :]] = numbers[
            start - first :
        ].expand(-1, *self.pool.shape[1::2])
        return torch.equal(found, numbers[seen].expand_as(found))

    def _first(self, position: int) -> int:
        if self._window:
            return max(0, position - self._window + 1)
        return position // self._chunk * self._chunk if self._chunk else 0


class StateLayer:
    """Keeps a number that depends on all tokens so far, in their order."""

    def __init__(self, spec: Any, blocks: int):
        self.size = spec.block_size
        self.pool = torch.zeros(blocks, 1, 1, 3)

    def forward(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> bool:
        """Compute the tokens from `start` on; whether the state before them was there."""
        before = int(self.pool[blocks[(start - 1) // self.size]].max()) if start else 0
        self.pool[blocks[(len(tokens) - 1) // self.size]] = _fold(tokens[start:], before)
        return before == _fold(tokens[:start], 0)


def _fold(tokens: Sequence[int], before: int) -> int:
    for token in tokens:
        before = (31 * before + token + 1) % 65521
    return before


def layers_of(
    groups: Sequence[KVCacheGroupSpec],
    blocks: int,
    layout: str = "LBHNC",
    first_heads: Sequence[int] = (),
) -> dict[str, AttentionLayer | StateLayer]:
    """The layers of all groups, in the order of the model: that of their names.

    `first_heads` are, by group, the numbers of the first KV head that is here.
    """
    found: dict[str, AttentionLayer | StateLayer] = {}
    for group, first in zip(groups, first_heads or [0] * len(groups), strict=True):
        for name in group.layer_names:
            spec: Any = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name)
            spec = spec or group.kv_cache_spec
            is_state = isinstance(spec, MambaSpec)
            found[name] = (
                StateLayer(spec, blocks)
                if is_state
                else AttentionLayer(spec, blocks, layout, first)
            )
    return dict(sorted(found.items()))
