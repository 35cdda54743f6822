"""The heads that a cache has according to its metadata, and the names of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.bundle import KVCacheBundle, KVPayload
from omni_kvlink.payload.schema import SINGLE, KVCacheTransferData

if TYPE_CHECKING:
    from omni_kvlink.payload.branches import Shard

P = TypeVar("P", KVCacheTransferData, KVCacheBundle, KVPayload)


def suffix(shard: Shard) -> str:
    """Return what the key of a part adds to its request's id."""
    return f"/rank{shard.rank}of{shard.world}:{shard.heads[0]}-{shard.heads[1]}"


def request_of(data: KVPayload) -> str:
    """Return the id of the request that a payload, or a part, belongs to."""
    for cache in caches_of(data).values():
        if cache.metadata.shard is not None:
            return data.request_id.removesuffix(suffix(cache.metadata.shard))
    return data.request_id


def label(shard: Shard) -> str:
    """Name a shard in an error."""
    return f"rank {shard.rank} of {shard.world}, heads {shard.heads[0]}…{shard.heads[1]}"


def caches_of(data: KVPayload) -> dict[str, KVCacheTransferData]:
    """Return the caches that have tensors of their own, by branch."""
    if isinstance(data, KVCacheTransferData):
        return {SINGLE: data}
    branches = data.branches.items()
    return {name: cache for name, cache in branches if isinstance(cache, KVCacheTransferData)}


def rank_of(data: KVPayload) -> tuple[int, int]:
    """Return the rank and world that all branches have; an empty branch need not have them."""
    shards = [
        cache.metadata.shard
        for cache in caches_of(data).values()
        if cache.metadata.shard or not cache.is_empty
    ]
    ranks = {(shard.rank, shard.world) if shard else (0, 1) for shard in shards} or {(0, 1)}
    if len(ranks) > 1:
        raise SchemaError(f"the branches are of several ranks: {sorted(ranks)} (rank, world)")
    return ranks.pop()


def heads_in(data: KVPayload) -> tuple[int, int]:
    """Return the heads of the first branch that has any; slicing checks every branch."""
    ranges = [heads for cache in caches_of(data).values() if (heads := heads_of(cache))]
    return ranges[0] if ranges else (0, 1)


def heads_of(cache: KVCacheTransferData) -> tuple[int, int] | None:
    """Return the heads of a cache; None if it is empty and has no shard."""
    if cache.metadata.shard is not None:
        return cache.metadata.shard.heads
    if cache.is_empty:
        return None
    return 0, 1 if cache.metadata.layout == "ND" else int(cache.tensors()[0].shape[1])


def shard_in(part: KVPayload) -> Shard:
    """Return the one shard of all branches of a part."""
    shards = {cache.metadata.shard for cache in caches_of(part).values()}
    shard = shards.pop() if len(shards) == 1 else None
    if shard is None:
        raise SchemaError(f"{part!r} is no part: its metadata.shard is missing, or not one")
    return shard


def first_head(part: KVPayload) -> int:
    """Return the first head of a part."""
    return shard_in(part).heads[0]
