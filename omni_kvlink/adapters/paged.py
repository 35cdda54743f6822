"""Paged caches: the pools of an engine such as vLLM, with a block table or a slot mapping."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.adapters.base import CacheAdapter, PayloadStream, cache_of
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.kv_checks import CACHES
from omni_kvlink.payload.overlap import check_distinct
from omni_kvlink.payload.paged import (
    IndexLike,
    PagedTensor,
    PoolLayers,
    block_table_of,
    paged_layers,
)
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_memory import storage_address
from omni_kvlink.payload.views import TensorView, dense, write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


@dataclasses.dataclass(frozen=True, eq=False)
class PagedCache:
    """One sequence in an engine's pools.

    For pools that hold both K and V, `split_stacked` and `split_packed` return the first two.

    Args:
        key_cache: one pool `[num_blocks, block_size, kv_heads, head_dim]` per layer, any strides;
            or latents, `[num_blocks, block_size, latent_dim]`.
        value_cache: the same for V; None for latents.
        block_size: tokens of a block.
        block_ids: the sequence's blocks, in its order.
        slot_mapping: or a slot per token: slot % block_size of block slot // block_size.
    """

    key_cache: PoolLayers
    value_cache: PoolLayers | None
    block_size: int
    block_ids: IndexLike = None
    slot_mapping: IndexLike = None


class PagedAdapter(CacheAdapter[PagedCache]):
    """Converts pools of blocks to and from `KVCacheTransferData`."""

    def export(
        self, cache: PagedCache, *, request_id: str, metadata: KVMetadata | Mapping[str, Any]
    ) -> KVCacheTransferData:
        """Return the sequence without copying it: the one copy, of `put`, reads the blocks."""
        return KVCacheTransferData.from_paged(request_id, metadata=metadata, **_pools(cache))

    def load(self, data: KVCacheTransferData, into: PagedCache) -> PagedCache:
        """Copy a cache into its blocks; see `inject`."""
        self.inject(data, **_pools(into))
        return into

    def targets(self, cache: PagedCache) -> Callable[[PayloadStream], KVCacheTransferData]:
        """Return the `into` of `KVConsumer.get` that fills blocks, of any size, as it is written.

        SchemaError, in `get`, if the table or a pool does not fit; nothing was written then.
        """

        def targets(stream: PayloadStream) -> KVCacheTransferData:
            metadata = dataclasses.replace(cache_of(stream).metadata, block_size=cache.block_size)
            return self.export(cache, request_id="targets", metadata=metadata)

        return targets

    def inject(
        self,
        data: KVCacheTransferData,
        key_cache: PoolLayers,
        value_cache: PoolLayers | None,
        *,
        block_size: int,
        block_ids: IndexLike = None,
        slot_mapping: IndexLike = None,
    ) -> None:
        """Copy a cache, received or of this process, into the caller's pools.

        Only the sequence's own slots are written: other blocks, and the slots after the last token
        in its block, do not change. Blocks may differ in ids and size from those that the cache was
        exported from. The arguments are those of `KVCacheTransferData.from_paged`.

        Raises:
            SchemaError: a table or a pool does not fit the data, or a byte would be written twice;
                raised before any is written.
        """
        expected = data.metadata.num_layers
        for name, pools in (("K", key_cache), ("V", value_cache)):
            if pools is not None and len(pools) != expected:
                raise SchemaError(f"{name}: {len(pools)} pools for {expected} layers")
        if data.is_empty:
            return
        lens, layout = data.metadata.kv_lens, data.metadata.layout
        table = block_table_of(
            lens, block_size=block_size, block_ids=block_ids, slot_mapping=slot_mapping
        )
        layers = paged_layers(key_cache, value_cache, table, layout)
        pairs = [
            pair
            for part, targets in layers.items()
            for pair in zip(targets, data.layer_blocks[CACHES[part]], strict=True)
        ]
        _check_targets(pairs)
        for target, tokens in pairs:
            assert tokens is not None  # the data is not empty
            write(target, dense(tokens))


def _pools(cache: PagedCache) -> dict[str, Any]:
    if not isinstance(cache, PagedCache):
        raise SchemaError(f"a {type(cache).__name__}, wanted a PagedCache of the engine's pools")
    return vars(cache)


def _check_targets(pairs: Sequence[tuple[PagedTensor, TensorView | None]]) -> None:
    """Raise SchemaError, before a byte is written, if pools do not fit or overlap."""
    storages = {_storage(tokens) for _, tokens in pairs if tokens is not None}
    for target, tokens in pairs:
        assert tokens is not None
        label, pool = target.where, target.pool
        if (target.shape, target.dtype) != (tokens.shape, tokens.dtype):
            raise SchemaError(
                f"{label}: a pool of {pool.dtype} {list(pool.shape)} "
                f"for tokens of {tokens.dtype} {list(tokens.shape)}"
            )
        if _storage(target) in storages:
            raise SchemaError(f"{label}: the data lies in the pools themselves; clone it first")
    check_distinct([target for target, _ in pairs], lambda number: pairs[number][0].where)


def _storage(view: TensorView) -> tuple[torch.device, int]:
    memory = view.pool if isinstance(view, PagedTensor) else view
    return memory.device, storage_address(memory)
