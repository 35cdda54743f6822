"""Heads of a cache: taken out as views, and put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branch import Shard
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.schema import SINGLE, KVCacheTransferData
from omni_kvlink.payload.views import TensorView, dense
from omni_kvlink.topology.fit import check_parts, check_target
from omni_kvlink.topology.shards import (
    P,
    Payload,
    caches_of,
    first_head,
    heads_of,
    heads_in,
    rank_of,
    request_of,
    shard_in,
    suffix,
    label,
)


def slice_heads(data: P, start: int, stop: int) -> P:
    """Some heads of a cache or bundle, as views of the same tensors or pages, `shard` set.

    Of a payload it is the part to send, named by `Part.key`; of the receiver's own tensors it is
    where such a part belongs. A bundle's prefixes and twins stay what they are.

    Args:
        start, stop: numbered as in the whole model; without `shard`, the cache holds all heads.

    Raises:
        SchemaError: the cache does not hold these heads, or has latents and not `0, 1` is wanted.
    """
    shard = Shard(*rank_of(data), (start, stop))
    request_id = request_of(data) + suffix(shard)
    caches = {name: _sliced(cache, shard, request_id) for name, cache in caches_of(data).items()}
    return _rebuilt(data, caches, request_id, shard)


def head_targets(parts: Sequence[Payload], *, into: P) -> list[P]:
    """Where each part belongs in the receiver's own tensors or pages: `received.scatter(target)`.

    Args:
        parts: of one request, in any order.
        into: what they are to fill, of the same lengths; without `shard`, all heads.

    Raises:
        SchemaError: as for `merge_heads`, or `into` has other lengths, positions or branches.
    """
    whole = Shard(*rank_of(into), heads_in(into))
    check_parts(parts, whole)
    check_target(parts[0], into)
    return [slice_heads(into, *shard_in(part).heads) for part in parts]


def blank_heads(part: P, shard: Shard, *, device: torch.device) -> P:
    """New tensors for all heads of `shard` of the cache or bundle that a part is of.

    `head_targets(parts, into=…)` then says where each part belongs in them.
    """
    heads = shard.heads[1] - shard.heads[0]
    request_id = request_of(part)

    def blank(view: TensorView | None, *, has_heads: bool) -> TensorView | None:
        if view is None:
            return None
        tokens, *row = view.shape
        row = [heads, *row[1:]] if has_heads else row
        return torch.empty((tokens, *row), dtype=view.dtype, device=device)

    caches = {}
    for name, cache in caches_of(part).items():
        has_heads = cache.metadata.layout != "ND"
        blocks = {
            kind: [blank(view, has_heads=has_heads) for view in layers]
            for kind, layers in cache.layer_blocks.items()
        }
        metadata = dataclasses.replace(cache.metadata, shard=shard)
        caches[name] = KVCacheTransferData(request_id, blocks, (), metadata)
    return _rebuilt(part, caches, request_id, shard)


def merge_heads(parts: Sequence[P], shard: Shard) -> P:
    """All heads of `shard` in one cache or bundle; one part alone is borrowed, more are copied.

    Where the tensors exist already, `head_targets` saves this copy.

    Args:
        parts: of one request, in any order.
        shard: what the receiver holds, such as `Topology.receiver` gives.

    Raises:
        SchemaError: heads are missing, come twice or are not wanted, or the parts are of several
            requests, lengths or positions; names rank and heads.
    """
    request_id = check_parts(parts, shard)
    ordered = [caches_of(part) for part in sorted(parts, key=first_head)]
    caches = {
        name: _merged([caches[name] for caches in ordered], shard, request_id)
        for name in ordered[0]
    }
    return _rebuilt(parts[0], caches, request_id, shard)


def _rebuilt(data: P, caches: dict[str, KVCacheTransferData], request_id: str, shard: Shard) -> P:
    """The same with other tensors; its references are of other heads now, too."""
    if isinstance(data, KVCacheTransferData):
        return caches[SINGLE]
    branches: dict[str, BundleBranch] = {}
    for name, branch in data.branches.items():
        if isinstance(branch, KVCacheTransferData):
            branches[name] = caches[name]
        elif branch.metadata is None:
            branches[name] = branch
        else:
            metadata = dataclasses.replace(branch.metadata, shard=shard)
            branches[name] = dataclasses.replace(branch, metadata=metadata)
    return KVCacheBundle(request_id, branches)


def _sliced(cache: KVCacheTransferData, shard: Shard, request_id: str) -> KVCacheTransferData:
    start, stop = shard.heads
    first, last = heads_of(cache) or shard.heads
    is_latent = cache.metadata.layout == "ND"
    if is_latent and (start, stop) != (0, 1):
        raise SchemaError(
            f"{label(shard)}: a latent has no heads to slice, every rank holds all of it; "
            "give the topology heads=1"
        )
    if not first <= start < stop <= last:
        raise SchemaError(
            f"{label(shard)}: the cache holds heads {first}…{last}; metadata.shard says which"
        )
    blocks = {
        name: [
            layer if layer is None or is_latent else _views(layer, start - first, stop - first)
            for layer in layers
        ]
        for name, layers in cache.layer_blocks.items()
    }
    metadata = dataclasses.replace(cache.metadata, shard=shard)
    return KVCacheTransferData(request_id, blocks, cache.block_ids, metadata)


def _views(view: TensorView, start: int, stop: int) -> TensorView:
    if isinstance(view, PagedTensor):
        return PagedTensor(view.pool[:, :, start:stop], view.pages, view.where)
    return view[:, start:stop]


def _merged(
    parts: Sequence[KVCacheTransferData], shard: Shard, request_id: str
) -> KVCacheTransferData:
    """The parts are checked, and in the order of the heads."""
    blocks: dict[str, list[TensorView | None]] = {}
    for name in parts[0].layer_blocks:
        layers = zip(*(part.layer_blocks[name] for part in parts), strict=True)
        blocks[name] = [_joined(views) for views in layers]
    metadata = dataclasses.replace(parts[0].metadata, shard=shard)
    return KVCacheTransferData(request_id, blocks, (), metadata)


def _joined(views: Sequence[TensorView | None]) -> TensorView | None:
    """None where the caches are empty."""
    found = [view for view in views if view is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.cat([dense(view) for view in found], dim=1)
