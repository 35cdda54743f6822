"""Heads of a cache: sliced as views, checked and merged."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branches import Shard
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.schema import SINGLE, KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.views import TensorView, dense
from omni_kvlink.topology.shards import (
    P,
    caches_of,
    first_head,
    heads_in,
    heads_of,
    label,
    rank_of,
    request_of,
    shard_in,
    suffix,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.payload.bundle import KVPayload

_TARGET_FIELDS = ("kv_lens", "ropes", "num_layers", "dtype", "layout")
"""Metadata that must be equal in a target and in the parts written into it."""
_PART_FIELDS = (*_TARGET_FIELDS, "block_size", "image_shape", "extra")
"""Metadata that must be equal in all parts of one cache."""

_Described: TypeAlias = tuple[tuple[str, str, int], tuple[int, ...], KVMetadata]
"""A branch: what it refers to, the shape of one head (or latent), and its metadata."""


def slice_heads(data: P, start: int, stop: int) -> P:
    """Return some heads of a cache or bundle as views of the same tensors, with `shard` set.

    Of a payload it is the part to send, named by `Part.key`; of the receiver's own tensors it is
    the target of such a part. A bundle's references stay references.

    Args:
        data: the cache or bundle; without `shard` in its metadata it has all heads.
        start: first head, numbered as in the whole model.
        stop: the head after the last one.

    Raises:
        SchemaError: the cache does not have these heads, or has latents and they are not `0, 1`.
    """
    shard = Shard(*rank_of(data), (start, stop))
    request_id = request_of(data) + suffix(shard)
    caches = {name: _sliced(cache, shard, request_id) for name, cache in caches_of(data).items()}
    return _rebuilt(data, caches, request_id, shard)


def head_targets(parts: Sequence[KVPayload], *, into: P) -> list[P]:
    """Return the target of each part in the receiver's own tensors, for `received.scatter(target)`.

    Args:
        parts: of one request, in any order.
        into: the cache or bundle to be filled, with the same lengths; without `shard`, all heads.

    Raises:
        SchemaError: as for `merge_heads`, or `into` has other lengths, positions or branches.
    """
    shard = Shard(*rank_of(into), heads_in(into))
    _check_parts(parts, shard)
    _check_alike(parts[0], into, _TARGET_FIELDS, "the target")
    return [slice_heads(into, *shard_in(part).heads) for part in parts]


def blank_heads(part: P, shard: Shard, *, device: torch.device) -> P:
    """Allocate tensors for all heads of `shard` of the cache or bundle that a part belongs to.

    `head_targets(parts, into=…)` returns the targets of the parts in them.
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
    """Merge parts into one cache or bundle; a single part is borrowed, several are copied.

    If the target tensors exist already, `head_targets` avoids this copy.

    Args:
        parts: of one request, in any order.
        shard: of the receiver, such as `Topology.receiver` returns.

    Raises:
        SchemaError: heads are missing, repeated or outside the shard, or the parts are of several
            requests, lengths or positions; names rank and heads.
    """
    request_id = _check_parts(parts, shard)
    ordered = [caches_of(part) for part in sorted(parts, key=first_head)]
    caches = {
        name: _merged([caches[name] for caches in ordered], shard, request_id)
        for name in ordered[0]
    }
    return _rebuilt(parts[0], caches, request_id, shard)


def _check_parts(parts: Sequence[KVPayload], shard: Shard) -> str:
    """Check that the parts are all heads of a shard, once each, of one request; return its id."""
    start, stop = shard.heads
    if not parts:
        raise SchemaError(f"{label(shard)}: no parts")
    request_id, position = request_of(parts[0]), start
    for part in sorted(parts, key=first_head):
        sent = shard_in(part)
        first, last = sent.heads
        if part.request_id != request_id + suffix(sent):
            raise SchemaError(f"{label(sent)}: {part.request_id!r} is no part of {request_id!r}")
        if first < position or last > stop:
            why = "come twice" if first >= start and last <= stop else f"are outside {start}…{stop}"
            raise SchemaError(f"{label(sent)}: they {why}")
        if first > position:
            raise SchemaError(f"{label(shard)}: heads {position}…{first} are missing")
        _check_alike(parts[0], part, _PART_FIELDS, label(sent))
        position = last
    if position != stop:
        raise SchemaError(f"{label(shard)}: heads {position}…{stop} are missing")
    return request_id


def _check_alike(part: KVPayload, other: KVPayload, fields: Sequence[str], name: str) -> None:
    """Raise SchemaError if two payloads do not have the branches of one cache."""
    branches, other_branches = _described(part), _described(other)
    if type(part) is not type(other):
        raise SchemaError(f"{name} is a {type(other).__name__}, a part {type(part).__name__}")
    if list(branches) != list(other_branches):
        raise SchemaError(
            f"{name}: branches {', '.join(other_branches)}, those of a part {', '.join(branches)}"
        )
    for branch, (reference, row, metadata) in branches.items():
        its_reference, its_row, its_metadata = other_branches[branch]
        if reference != its_reference:
            raise SchemaError(f"{name}: branch {branch!r} is not the same reference as in a part")
        for field in fields:
            expected, actual = getattr(metadata, field), getattr(its_metadata, field)
            if expected != actual:
                raise SchemaError(
                    f"{name}: branch {branch!r} has {field} {actual!r:.100}, "
                    f"in a part {expected!r:.100}"
                )
        if row != its_row:
            raise SchemaError(
                f"{name}: branch {branch!r} has head_dim {list(its_row)}, in a part {list(row)}"
            )


def _described(data: KVPayload) -> dict[str, _Described]:
    """Describe each branch, so that two payloads can be compared."""
    if isinstance(data, KVCacheTransferData):
        return {SINGLE: _description(data, ("", "", 0))}
    descriptions = {}
    for name, branch in data.branches.items():
        if isinstance(branch, TensorTransferData):
            raise SchemaError(
                f"branch {name!r} is a TensorTransferData, which has no heads: "
                "send it as a payload of its own"
            )
        if isinstance(branch, KVCacheTransferData):
            reference = ("", "", 0)
        else:
            reference = (type(branch).__name__, branch.branch, getattr(branch, "tokens", 0))
        descriptions[name] = _description(data[name], reference)
    return descriptions


def _description(cache: KVCacheTransferData, reference: tuple[str, str, int]) -> _Described:
    shapes = [view.shape for view in cache.tensors()]
    return reference, tuple(shapes[0][-1:]) if shapes else (), cache.metadata


def _rebuilt(data: P, caches: dict[str, KVCacheTransferData], request_id: str, shard: Shard) -> P:
    """Return the payload with other tensors, and its references' shard changed."""
    if isinstance(data, KVCacheTransferData):
        return caches[SINGLE]
    branches: dict[str, BundleBranch] = {}
    for name, branch in data.branches.items():
        if isinstance(branch, KVCacheTransferData):
            branches[name] = caches[name]
        elif isinstance(branch, TensorTransferData) or branch.metadata is None:
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
        return PagedTensor(view.pool[:, :, start:stop], view.block_table, view.where)
    return view[:, start:stop]


def _merged(
    parts: Sequence[KVCacheTransferData], shard: Shard, request_id: str
) -> KVCacheTransferData:
    """Merge checked parts, given in the order of their heads."""
    blocks: dict[str, list[TensorView | None]] = {}
    for name in parts[0].layer_blocks:
        layers = zip(*(part.layer_blocks[name] for part in parts), strict=True)
        blocks[name] = [_joined(views) for views in layers]
    metadata = dataclasses.replace(parts[0].metadata, shard=shard)
    return KVCacheTransferData(request_id, blocks, (), metadata)


def _joined(views: Sequence[TensorView | None]) -> TensorView | None:
    """Concatenate views along the heads; None if the caches are empty."""
    present_views = [view for view in views if view is not None]
    if len(present_views) < 2:
        return present_views[0] if present_views else None
    return torch.cat([dense(view) for view in present_views], dim=1)
