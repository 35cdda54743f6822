"""One layer's KV pool as bytes, at the places that vLLM's spec and layout give its blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes, group_kernel_blocks

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """The dimensions of one block of a layer, as its spec has them; equal on both sides.

    Scales that are computed per token lie in the content, so that they are sent with it.
    """

    kernel_blocks: int  # blocks of the attention kernel
    heads: int  # of each of them; K and V may have one each
    states: int  # tokens, or states of several tokens
    content: int  # bytes of one state of one head: K, V and scales, or a latent

    @classmethod
    def of(cls, spec: KVCacheSpec, cache: torch.Tensor, num_blocks: int, name: str) -> BlockShape:
        """The shape of a layer's blocks.

        Raises:
            SchemaError: the pool is not `[blocks, heads, states, content]` as the spec has it.
        """
        ratio = cache.shape[0] // num_blocks
        shape = (*cache.shape[:-1], cache.shape[-1] * cache.element_size())
        divides = ratio and spec.block_size % ratio == 0
        kernel_block = spec.block_size // ratio if divides else spec.block_size
        expected: Any = compute_layer_kv_cache_shape_bytes(spec, num_blocks, kernel_block)
        if shape != expected:
            raise SchemaError(
                f"layer {name}: a pool {list(cache.shape)} of {cache.dtype}; its "
                f"{type(spec).__name__} of {num_blocks} blocks has {list(expected)} bytes"
            )
        return cls(ratio, *expected[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return math.prod(dataclasses.astuple(self))


def bytes_of_blocks(
    cache: torch.Tensor, name: str, *, num_blocks: int, block_size: int
) -> torch.Tensor:
    """View a pool, `[blocks, …]` with any strides and on any device, as bytes without a copy.

    It is uint8 `[num_blocks, rows, row]`: `rows` are the contiguous pieces of a block, the first
    in memory first; or, if there is one, `block_size` equal slices of it. Their order is the same
    for equal layouts only.

    Raises:
        SchemaError: a block is neither one piece nor equal pieces at equal distances.
    """
    size = cache.element_size()
    if cache.shape[0] % num_blocks:
        raise _unknown(cache, name, num_blocks, block_size)
    grouped = group_kernel_blocks(cache, num_blocks)
    run, pieces = _pieces(grouped, name)
    stride = grouped.stride(0) * size
    if len(pieces) > 1 or not _is_disjoint([(stride, num_blocks), *pieces], run):
        raise _unknown(cache, name, num_blocks, block_size)
    rows = 1 if run % block_size else block_size
    ((step, rows),) = pieces or [(run // rows, rows)]
    row = run if pieces else run // rows
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    start = int(cache.storage_offset()) * size
    return flat.as_strided((num_blocks, rows, row), (stride, step, 1), start)


def _pieces(grouped: torch.Tensor, name: str) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of a contiguous piece of a block; and stride and number of the pieces, if several."""
    run = size = grouped.element_size()
    inner = zip(grouped.stride()[1:], grouped.shape[1:], strict=True)
    dims = sorted((stride * size, length) for stride, length in inner if length > 1)
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    if run < grouped.shape[-1] * size:
        raise SchemaError(
            f"layer {name}: a block with strides {grouped.stride()} is not contiguous"
        )
    return run, dims


def _is_disjoint(dims: list[tuple[int, int]], run: int) -> bool:
    """Whether no two pieces of `run` bytes at these strides share a byte."""
    reach = run
    for stride, length in sorted(dims):  # each steps over all that the smaller strides reach
        if stride < reach and length > 1:
            return False
        reach += (length - 1) * stride
    return True


def _unknown(cache: torch.Tensor, name: str, num_blocks: int, block_size: int) -> SchemaError:
    return SchemaError(
        f"layer {name}: a pool {list(cache.shape)} of {num_blocks} blocks "
        f"of {block_size} tokens has an unknown layout"
    )
