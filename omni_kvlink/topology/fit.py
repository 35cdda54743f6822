"""Checks that parts are complete and fit into their target."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.schema import SINGLE, KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.topology.shards import first_head, label, request_of, shard_in, suffix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.payload.bundle import KVPayload
    from omni_kvlink.payload.manifest import Shard

_TARGET_FIELDS = ("kv_lens", "ropes", "num_layers", "dtype", "layout")
"""Metadata that must be equal in a target and in the parts written into it."""
_PART_FIELDS = (*_TARGET_FIELDS, "block_size", "image_shape", "extra")
"""Metadata that must be equal in all parts of one cache."""


def check_parts(parts: Sequence[KVPayload], shard: Shard) -> str:
    """Check that the parts are all heads of a shard, once each, of one request; return its id.

    Raises:
        SchemaError: heads are missing, repeated or outside the shard, or the parts differ.
    """
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
        _check_alike(parts[0], part, _PART_FIELDS, label(sent))
        at = last
    if at != stop:
        raise SchemaError(f"{label(shard)}: heads {at}…{stop} are missing")
    return request_id


def check_target(part: KVPayload, target: KVPayload) -> None:
    """Raise SchemaError if lengths, positions or branches of a target differ from a part's."""
    _check_alike(part, target, _TARGET_FIELDS, "the target")


def _check_alike(part: KVPayload, other: KVPayload, fields: Sequence[str], name: str) -> None:
    """Raise SchemaError if two payloads do not have the branches of one cache."""
    own, others = _described(part), _described(other)
    if type(part) is not type(other):
        raise SchemaError(f"{name} is a {type(other).__name__}, a part {type(part).__name__}")
    if list(own) != list(others):
        raise SchemaError(f"{name}: branches {', '.join(others)}, those of a part {', '.join(own)}")
    for branch, (reference, row, metadata) in own.items():
        its_reference, its_row, its_metadata = others[branch]
        if reference != its_reference:
            raise SchemaError(f"{name}: branch {branch!r} is not the same reference as in a part")
        for field in fields:
            expected, found = getattr(metadata, field), getattr(its_metadata, field)
            if expected != found:
                raise SchemaError(
                    f"{name}: branch {branch!r} has {field} {found!r:.100}, "
                    f"in a part {expected!r:.100}"
                )
        if row != its_row:
            raise SchemaError(
                f"{name}: branch {branch!r} has head_dim {list(its_row)}, in a part {list(row)}"
            )


Described: TypeAlias = tuple[tuple[str, str, int], tuple[int, ...], KVMetadata]


def _described(data: KVPayload) -> dict[str, Described]:
    """Return by branch its reference, the shape of one head (or latent), and its metadata."""
    if isinstance(data, KVCacheTransferData):
        return {SINGLE: _description(data, ("", "", 0))}
    found = {}
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
        found[name] = _description(data[name], reference)
    return found


def _description(cache: KVCacheTransferData, reference: tuple[str, str, int]) -> Described:
    shapes = [view.shape for view in cache.tensors()]
    return reference, tuple(shapes[0][-1:]) if shapes else (), cache.metadata
