"""Whether parts make a whole, and fit where they shall go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branch import Shard
from omni_kvlink.payload.metadata import KVMetadata
from omni_kvlink.payload.schema import SINGLE, KVCacheTransferData
from omni_kvlink.topology.shards import Payload, first_head, request_of, shard_in, suffix, label

_PLACED = ("kv_lens", "ropes", "num_layers", "dtype", "layout")
"""Metadata that a target has in common with what is written into it."""
_SAME = (*_PLACED, "block_size", "image_shape", "extra")
"""Metadata that the parts of one cache have in common."""


def check_parts(parts: Sequence[Payload], shard: Shard) -> str:
    """They are all the heads, once each, of one request; gives its id."""
    start, stop = shard.heads
    if not parts:
        raise SchemaError(f"{label(shard)}: no parts")
    request_id, at = request_of(parts[0]), start
    for part in sorted(parts, key=first_head):
        sent = shard_in(part)
        first, last = sent.heads
        if part.request_id != request_id + suffix(sent):
            raise SchemaError(f"{label(sent)}: {part.request_id!r} is no part of {request_id!r}")
        if first < at or last > stop:
            why = "come twice" if first >= start and last <= stop else f"are outside {start}…{stop}"
            raise SchemaError(f"{label(sent)}: they {why}")
        if first > at:
            raise SchemaError(f"{label(shard)}: heads {at}…{first} are missing")
        _check_alike(parts[0], part, _SAME, label(sent))
        at = last
    if at != stop:
        raise SchemaError(f"{label(shard)}: heads {at}…{stop} are missing")
    return request_id


def check_target(part: Payload, target: Payload) -> None:
    """Refuse a target of other lengths, positions or branches; whoever copies checks the rest."""
    _check_alike(part, target, _PLACED, "the target")


def _check_alike(part: Payload, other: Payload, fields: Sequence[str], who: str) -> None:
    """Refuse two whose branches are not those of one cache."""
    mine, theirs = _described(part), _described(other)
    if type(part) is not type(other):
        raise SchemaError(f"{who} is a {type(other).__name__}, a part {type(part).__name__}")
    if list(mine) != list(theirs):
        raise SchemaError(f"{who}: branches {', '.join(theirs)}, those of a part {', '.join(mine)}")
    for name, (reference, row, metadata) in mine.items():
        its_reference, its_row, its_metadata = theirs[name]
        if reference != its_reference:
            raise SchemaError(f"{who}: branch {name!r} is not the same reference as in a part")
        for field in fields:
            expected, found = getattr(metadata, field), getattr(its_metadata, field)
            if expected != found:
                raise SchemaError(
                    f"{who}: branch {name!r} has {field} {found!r:.100}, in a part {expected!r:.100}"
                )
        if row != its_row:
            raise SchemaError(
                f"{who}: branch {name!r} has head_dim {list(its_row)}, in a part {list(row)}"
            )


Described: TypeAlias = tuple[tuple[str, str, int], tuple[int, ...], KVMetadata]


def _described(data: Payload) -> dict[str, Described]:
    """By branch: what it refers to, the shape of one head (or latent), and its metadata."""
    if isinstance(data, KVCacheTransferData):
        return {SINGLE: _description(data, ("", "", 0))}
    found = {}
    for name, branch in data.branches.items():
        if isinstance(branch, KVCacheTransferData):
            reference = ("", "", 0)
        else:
            reference = (type(branch).__name__, branch.branch, getattr(branch, "tokens", 0))
        found[name] = _description(data[name], reference)
    return found


def _description(cache: KVCacheTransferData, reference: tuple[str, str, int]) -> Described:
    shapes = [view.shape for view in cache.tensors()]
    return reference, tuple(shapes[0][-1:]) if shapes else (), cache.metadata
