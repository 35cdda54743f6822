"""The blocks of an engine's KV pools as bytes, and the format that both sides must share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from omni_kvlink.errors import SchemaError, UnavailableError


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """The properties that decide how a block's bytes are read; sent with each cache.

    Attributes:
        vllm: vLLM's version; it decides the layout inside a block.
        model: the name of the weights.
        kind: the class of vLLM's KV cache spec.
        dtype: torch's dtype name.
        block_size: tokens per block.
        kv_heads: KV heads per layer.
        head_size: elements per head.
        block_nbytes: bytes of one block of one layer.
        layout: vLLM's name of the pool's layout.
        isa: the instruction set for which the CPU attention kernel packs a block.
        layers: the layers' names, in order.
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
        """The fields as JSON values."""
        return dataclasses.asdict(self)

    def check(self, theirs: object, *, peer: str) -> None:
        """Compare with the format that a producer sent.

        Raises:
            SchemaError: a field differs; the error gives both values.
        """
        if not isinstance(theirs, Mapping):
            raise SchemaError(f"{peer} sent a cache that no vLLM connector made")
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
    """View each layer's pool as uint8 `[num_blocks, block_size, row]`, without a copy.

    The order of the bytes inside a block is opaque: a row is one of `block_size` equal slices of
    the block, and only whole blocks have a meaning. Of layers that share a pool, the first is
    returned.

    Args:
        kv_caches: the pools by layer name, `[num_blocks, …]` with any strides.
        num_blocks: blocks per pool.
        block_size: tokens per block.

    Raises:
        UnavailableError: a pool is not in host memory.
        SchemaError: a block is not one contiguous piece of memory.
    """
    pools: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, cache in kv_caches.items():
        if not cache.is_cpu:
            raise UnavailableError(
                f"layer {name} is on {cache.device}: this connector supports vLLM's CPU backend "
                "only"
            )
        memory = (cache.data_ptr(), cache.stride(0))
        if memory not in seen:
            seen.add(memory)
            pools[name] = _bytes_of(cache, name, num_blocks, block_size)
    return pools


def _bytes_of(cache: torch.Tensor, name: str, num_blocks: int, block_size: int) -> torch.Tensor:
    size = cache.element_size()
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    nbytes = size
    for stride, length in inner:
        if length > 1 and stride * size != nbytes:
            raise SchemaError(
                f"layer {name}: a block with strides {cache.stride()} is not contiguous"
            )
        nbytes *= length
    if cache.shape[0] != num_blocks or nbytes % block_size or cache.stride(0) * size < nbytes:
        raise SchemaError(
            f"layer {name}: a pool {list(cache.shape)} of {num_blocks} blocks "
            f"of {block_size} tokens has an unknown layout"
        )
    flat = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    row = nbytes // block_size
    return flat.as_strided(
        (num_blocks, block_size, row),
        (cache.stride(0) * size, row, 1),
        int(cache.storage_offset()) * size,
    )
