"""A KV cache as vLLM-Omni's manager packs it: 4 bytes of length, a JSON header, the tensors.

It travels as the bytes it is. Its header is read here only to refuse what is incomplete: the
manager leaves out block ids that its pool does not have, and sends what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branch import Count

_FIELDS = {"rid", "bids", "meta", "td", "nl"}
_PARTS = {"key_cache": "K", "value_cache": "V"}


class PackedEntry(msgspec.Struct):
    """One tensor: name, dtype, shape, first byte, bytes; or, with `x`, that there is none."""

    n: str
    d: str = ""
    s: tuple[Count, ...] = ()
    o: Count = 0
    b: Count = 0
    x: bool = False


class Packed(msgspec.Struct):
    """The header: request, block ids, metadata, tensors, layers."""

    rid: str
    bids: list[Any]
    meta: dict[str, Any]
    td: list[PackedEntry]
    nl: Count


def header_of(flat: torch.Tensor) -> tuple[Packed, int] | None:
    """The header of a packed cache and where its tensors start; None if this is something else.

    Args:
        flat: uint8 `[nbytes]`, on any device.

    Raises:
        SchemaError: it is packed, but the header is not the manager's.
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
        return msgspec.convert(header, Packed), start
    except msgspec.ValidationError as error:
        raise SchemaError(f"packed KV cache: {error}") from None


def check_packed(flat: torch.Tensor, header: Packed, start: int) -> None:
    """Refuse a packed cache that is not complete.

    Raises:
        SchemaError: a layer is missing, K and V differ, tokens are missing; names layer, K or V.
    """
    if len(header.td) != 2 * header.nl:
        raise SchemaError(f"packed KV cache: {len(header.td)} tensors for {header.nl} layers")
    found: dict[tuple[str, int], torch.Size] = {}
    for entry in header.td:
        part, _, index = entry.n.rpartition("_")
        if part not in _PARTS or not index.isascii() or not index.isdigit():
            raise SchemaError(f"packed KV cache: {entry.n!r} is no layer's K or V")
        where = f"layer {index}, {_PARTS[part]}"
        if (part, int(index)) in found:
            raise SchemaError(f"{where} stands twice")
        if not entry.x:
            found[part, int(index)] = _shape_of(entry, flat.numel() - start, where)
    parts = [[found.get((part, i)) for i in range(header.nl)] for part in _PARTS]
    check_complete(list(zip(*parts, strict=True)), header.bids, header.meta)


def check_complete(
    layers: Sequence[tuple[torch.Size | None, ...]],
    block_ids: Sequence[Any],
    metadata: Mapping[str, Any],
) -> None:
    """Refuse a cache of which something was left out on the way to the connector.

    Args:
        layers: the shapes of each layer's K and V, tokens first; None where there is none.
        block_ids, metadata: as the manager gives them.

    Raises:
        SchemaError: names layer, K or V, what was found and wanted.
    """
    if not layers:
        raise SchemaError("a KV cache without layers")
    for index, pair in enumerate(layers):
        for shape, part in zip(pair, "KV", strict=True):
            if shape is None:
                raise SchemaError(f"layer {index}, {part} is missing")
        if pair[0] != pair[1]:
            raise SchemaError(f"layer {index}: K is {_text(pair[0])}, V is {_text(pair[1])}")
    lengths = {pair[0][0] for pair in layers if pair[0]}
    wanted = metadata.get("seq_len", min(lengths, default=0))
    for index, (key, _) in enumerate(layers):
        if not key or key[0] != wanted or not wanted:
            raise SchemaError(
                f"layer {index} has {key[0] if key else 0} tokens, but seq_len is {wanted}: blocks "
                "that the pool does not have were left out, or there were too few"
            )
    _check_blocks(block_ids, wanted, metadata.get("block_size", 0))


def _check_blocks(block_ids: Sequence[Any], tokens: int, block_size: Any) -> None:
    if not block_ids or not isinstance(block_size, int) or block_size < 1:
        return  # not from a pool of blocks
    used = -(-tokens // block_size)
    if len(block_ids) < used:
        raise SchemaError(
            f"{len(block_ids)} blocks of {block_size} tokens for {tokens} tokens; wanted {used}"
        )
    seen: set[int] = set()
    for block in block_ids:
        if not isinstance(block, int) or block < 0:
            raise SchemaError(f"block id {block!r} is none: the manager left that block out")
        if block in seen and len(seen) < used:
            raise SchemaError(f"block id {block} stands twice among those that hold the tokens")
        seen.add(block)


def _shape_of(entry: PackedEntry, nbytes: int, where: str) -> torch.Size:
    """Raises SchemaError if the entry's bytes are not all there."""
    dtype = getattr(torch, entry.d, None)
    if not isinstance(dtype, torch.dtype):
        raise SchemaError(f"{where}: {entry.d!r} is no dtype")
    stop = entry.o + entry.b
    if entry.b != math.prod(entry.s) * dtype.itemsize or stop > nbytes:
        raise SchemaError(f"{where}: bytes {entry.o}…{stop} are not its {list(entry.s)} {dtype}")
    return torch.Size(entry.s)


def _text(shape: torch.Size | None) -> str:
    return str(list(shape or ()))
