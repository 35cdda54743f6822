"""The header of a KV cache that vLLM-Omni's manager has packed into bytes.

The format is 4 bytes of length, a JSON header, and the tensors. The connector sends these bytes
unchanged; it reads the header only to refuse an incomplete cache: the manager silently leaves out
block ids that its pool does not have.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Count = Annotated[int, msgspec.Meta(ge=0)]

_FIELDS = {"rid", "bids", "meta", "td", "nl"}
_PARTS = {"key_cache": "K", "value_cache": "V"}


class PackedEntry(msgspec.Struct):
    """One tensor of the header: name, dtype, shape, offset, bytes; `x` marks an absent tensor."""

    n: str
    d: str = ""
    s: tuple[Count, ...] = ()
    o: Count = 0
    b: Count = 0
    x: bool = False


class PackedHeader(msgspec.Struct):
    """The header: request id, block ids, metadata, tensors, number of layers."""

    rid: str
    bids: list[Any]
    meta: dict[str, Any]
    td: list[PackedEntry]
    nl: Count


def header_of(flat: torch.Tensor) -> tuple[PackedHeader, int] | None:
    """Decode a packed cache's header; return it with the offset of the first tensor.

    Returns None if the bytes, uint8 `[nbytes]` on any device, are not a packed cache.

    Raises:
        SchemaError: the bytes are packed, but the header has wrong fields.
    """
    if flat.numel() < 6:
        return None
    start = 4 + int.from_bytes(bytes(flat[:4].tolist()), "big")
    if start > flat.numel() or flat[4] != ord("{"):
        return None
    try:
        header = msgspec.json.decode(bytes(flat[4:start].tolist()))
    except msgspec.DecodeError:
        return None
    if not header.keys() >= _FIELDS:
        return None
    try:
        return msgspec.convert(header, PackedHeader), start
    except msgspec.ValidationError as error:
        raise SchemaError(f"packed KV cache: {error}") from None


def check_packed(flat: torch.Tensor, header: PackedHeader, start: int) -> None:
    """Check that a packed cache is complete; SchemaError names the layer, and K or V."""
    if len(header.td) != 2 * header.nl:
        raise SchemaError(f"packed KV cache: {len(header.td)} tensors for {header.nl} layers")
    shapes: dict[tuple[str, int], torch.Size] = {}
    for entry in header.td:
        part, _, index = entry.n.rpartition("_")
        if part not in _PARTS or not index.isascii() or not index.isdigit():
            raise SchemaError(f"packed KV cache: {entry.n!r} is not the K or V of a layer")
        label = f"layer {index}, {_PARTS[part]}"
        if (part, int(index)) in shapes:
            raise SchemaError(f"{label} appears twice")
        if not entry.x:
            shapes[part, int(index)] = _shape_of(entry, flat.numel() - start, label)
    parts = [[shapes.get((part, i)) for i in range(header.nl)] for part in _PARTS]
    check_complete(list(zip(*parts, strict=True)), header.bids, header.meta)


def check_complete(
    layers: Sequence[tuple[torch.Size | None, ...]],
    block_ids: Sequence[Any],
    metadata: Mapping[str, Any],
) -> None:
    """Check that no part of a cache was left out before it reached the connector.

    `layers` has the shapes of each layer's K and V, tokens first; None for an absent tensor.

    Raises:
        SchemaError: a part is missing; the error names layer, K or V, and both sizes.
    """
    if not layers:
        raise SchemaError("a KV cache without layers")
    for index, pair in enumerate(layers):
        for shape, part in zip(pair, "KV", strict=True):
            if shape is None:
                raise SchemaError(f"layer {index}, {part} is missing")
        if pair[0] != pair[1]:
            k, v = (list(shape or ()) for shape in pair)
            raise SchemaError(f"layer {index}: K is {k}, V is {v}")
    lengths = {pair[0][0] for pair in layers if pair[0]}
    tokens = metadata.get("seq_len", min(lengths, default=0))
    for index, (key, _) in enumerate(layers):
        if not key or key[0] != tokens or not tokens:
            raise SchemaError(
                f"layer {index} has {key[0] if key else 0} tokens, but seq_len is {tokens}: the "
                "manager left out blocks that its pool does not have, or had too few"
            )
    _check_blocks(block_ids, tokens, metadata.get("block_size", 0))


def _check_blocks(block_ids: Sequence[Any], tokens: int, block_size: Any) -> None:
    if not block_ids or not isinstance(block_size, int) or block_size < 1:
        return  # the cache does not come from a block pool
    used = -(-tokens // block_size)
    if len(block_ids) < used:
        raise SchemaError(
            f"{len(block_ids)} blocks of {block_size} tokens for {tokens} tokens; {used} are needed"
        )
    seen: set[int] = set()
    for block in block_ids:
        if not isinstance(block, int) or block < 0:
            raise SchemaError(f"block id {block!r} is invalid: the manager left that block out")
        if block in seen and len(seen) < used:
            raise SchemaError(
                f"block id {block} appears twice among the blocks that hold the tokens"
            )
        seen.add(block)


def _shape_of(entry: PackedEntry, nbytes: int, label: str) -> torch.Size:
    """The entry's shape; SchemaError if its bytes are not all present."""
    dtype = getattr(torch, entry.d, None)
    if not isinstance(dtype, torch.dtype):
        raise SchemaError(f"{label}: {entry.d!r} is not a dtype")
    stop = entry.o + entry.b
    if entry.b != math.prod(entry.s) * dtype.itemsize or stop > nbytes:
        raise SchemaError(f"{label}: bytes {entry.o}…{stop} are not its {list(entry.s)} {dtype}")
    return torch.Size(entry.s)
