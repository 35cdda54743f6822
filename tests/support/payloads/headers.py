"""Payload headers written by hand, sharing no code with the encoder: right ones and wrong ones."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from omni_kvlink._native.crc32c import numpy_crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGN = 256
SIZE = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I64": 8}
BLANK = '"header_crc32c":"00000000"'
QUOTED_BLANK = BLANK.replace('"', '\\"').encode()


def branch(name: str = "kv", **other: Any) -> dict[str, Any]:
    """Two layers of three tokens, two heads of four float32: 96 bytes a tensor."""
    return {
        "name": name,
        "kv_lens": [3],
        "ropes": [3],
        "num_layers": 2,
        "seq_len": 3,
        "dtype": "float32",
        "shape": [3, 2, 4],
        **other,
    }


def note(tensors: int = 4, **other: Any) -> dict[str, Any]:
    """The object that travels as a string in `__metadata__`, its own digest still blank."""
    return {
        "version": [1, 0],
        "header_crc32c": "00000000",
        "request_id": "r",
        "bundle": False,
        "branches": [branch()],
        "digest": "crc32c",
        "digests": ["00000000"] * tensors,
        "producer": {"library": "0", "host": "h"},
        **other,
    }


def names(branch_name: str = "kv", layers: int = 2) -> list[str]:
    return [f"{branch_name}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def entry(start: int, stop: int, shape: Sequence[Any] = (3, 2, 4), dtype: Any = "F32") -> Any:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def spans(tensor_names: Sequence[str], shape: Sequence[int] = (3, 2, 4), dtype: str = "F32") -> Any:
    """Entries for tensors of one shape, each on the next multiple of 256, pads between them."""
    size = SIZE[dtype]
    for side in shape:
        size *= side
    entries: dict[str, Any] = {}
    at = 0
    for number, name in enumerate(tensor_names):
        if at % ALIGN:
            stop = at + -at % ALIGN
            entries[f"pad.{number}"] = entry(at, stop, [stop - at], "U8")
            at = stop
        entries[name] = entry(at, at + size, shape, dtype)
        at += size
    return entries


def text(entries: dict[str, Any] | None = None, the_note: Any = None) -> bytes:
    """The header's JSON, unpadded, its digest blank."""
    entries = spans(names()) if entries is None else entries
    the_note = note() if the_note is None else the_note
    inner = the_note if isinstance(the_note, str) else dump(the_note)
    return dump({"__metadata__": {"kvlink": inner}, **entries}).encode()


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def sealed(header: bytes, data: int = 3 * 256 + 96) -> bytes:
    """A whole payload: padded, its header's digest right, `data` zero bytes behind it."""
    header += b" " * (-(len(header) + 8) % ALIGN)
    at = header.find(QUOTED_BLANK)
    if at >= 0:
        at += len(QUOTED_BLANK) - 10
        header = header[:at] + b"%08x" % numpy_crc32c(header) + header[at + 8 :]
    return struct.pack("<Q", len(header)) + header + bytes(data)


def payload(the_note: Any = None, entries: dict[str, Any] | None = None, **how: int) -> bytes:
    return sealed(text(entries, the_note), **how)
