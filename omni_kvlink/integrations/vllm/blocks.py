"""Blocks of an engine's pools as bytes, and what must be alike for them to mean the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from omni_kvlink.errors import SchemaError, UnavailableError


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """What decides how the bytes of a block are read; travels with each cache.

    Attributes:
        vllm: the engine's version: it decides how a block is laid out inside.
        model: names the weights.
        kind: the kind of cache, vLLM's word.
        dtype: torch's name.
        block_size: tokens of a block.
        kv_heads, head_size: of a layer.
        block_nbytes: bytes of one block of one layer.
        layout: of the whole pool, vLLM's word.
        isa: instruction set that the attention kernel packs a block for.
        layers: names, in order.
    """

    vllm: str
    model: str
    kind: str
    dtype: str
    block_size: int
    kv_heads: int
    head_size: int
    block_nbytes: int
    layout: str
    isa: str
    layers: list[str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def check(self, theirs: object, *, peer: str) -> None:
        """Raises SchemaError if a producer's blocks are others; names both sides of each field."""
        if not isinstance(theirs, Mapping):
            raise SchemaError(f"{peer} sent a cache that is no vLLM connector's")
        wrong = [
            f"{name} is {theirs.get(name)!r:.200} there and {mine!r:.200} here"
            for name, mine in self.to_dict().items()
            if theirs.get(name) != mine
        ]
        if wrong:
            raise SchemaError(f"the blocks of {peer} do not fit this engine: {'; '.join(wrong)}")


def byte_pools(
    kv_caches: Mapping[str, torch.Tensor], *, num_blocks: int, block_size: int
) -> dict[str, torch.Tensor]:
    """Each layer's pool as bytes, `[num_blocks, block_size, row]` of uint8; the engine's memory.

    Nothing is said about the order of the bytes in a block: a row is one of `block_size` equal
    shares of it, and only whole blocks mean something. Of layers that share a pool, the first.

    Args:
        kv_caches: by the layer's name, `[num_blocks, …]` with any strides.

    Raises:
        UnavailableError: the pools are not in the CPU's memory.
        SchemaError: a block is not one piece of memory.
    """
    pools: dict[str, torch.Tensor] = {}
    taken: set[tuple[int, int]] = set()
    for name, cache in kv_caches.items():
        if not cache.is_cpu:
            raise UnavailableError(
                f"layer {name} lies on {cache.device}: this connector has only run with vLLM's "
                "CPU backend, and takes no other"
            )
        place = (cache.data_ptr(), cache.stride(0))
        if place not in taken:
            taken.add(place)
            pools[name] = _bytes_of(cache, name, num_blocks, block_size)
    return pools


def _bytes_of(cache: torch.Tensor, name: str, num_blocks: int, block_size: int) -> torch.Tensor:
    size = cache.element_size()
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    nbytes = size
    for stride, length in inner:
        if length > 1 and stride * size != nbytes:
            raise SchemaError(f"layer {name}: a block of strides {cache.stride()} is not one piece")
        nbytes *= length
    if cache.shape[0] != num_blocks or nbytes % block_size or cache.stride(0) * size < nbytes:
        raise SchemaError(
            f"layer {name}: a pool {list(cache.shape)} of {num_blocks} blocks "
            f"of {block_size} tokens is not known"
        )
    flat = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    row = nbytes // block_size
    return flat.as_strided(
        (num_blocks, block_size, row),
        (cache.stride(0) * size, row, 1),
        int(cache.storage_offset()) * size,
    )
