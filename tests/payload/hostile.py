"""Hostile headers: the frame around the JSON, its encoding, spans, shapes and dtypes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from headers import branch, dump, names, note, payload, sealed, spans, text

Case = tuple[str, str, Callable[[], bytes]]
"""Name, a pattern of the error's text, and how to make the payload."""

CASES: list[Case] = []


def case(name: str, pattern: str, make: Callable[[], bytes]) -> None:
    CASES.append((name, pattern, make))


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def first(**fields: Any) -> dict[str, Any]:
    """The plain entries, with other fields in the first."""
    entries = dict(spans(names()))
    entries["kv.0.key"] = {**entries["kv.0.key"], **fields}
    return entries


def tensors(**fields: Any) -> bytes:
    return payload(None, first(**fields))


def raw(old: str, new: str | bytes, header: bytes | None = None) -> bytes:
    """The plain header with one piece of its text replaced, its digest right again."""
    header = text() if header is None else header
    assert old.encode() in header, old
    return sealed(header.replace(old.encode(), new if isinstance(new, bytes) else new.encode(), 1))


def inner(old: str, new: str) -> bytes:
    """The same for the manifest's JSON, before it became a string."""
    the_note = dump(note(branches=[branch(extra={"x": 1})]))
    assert old in the_note, old
    return payload(the_note.replace(old, new, 1))


def reordered(order: list[str]) -> bytes:
    return payload(note(len(order)), spans(order), data=256 * (len(order) - 1) + 96)


def one(**fields: Any) -> bytes:
    return payload(note(branches=[branch(**fields)]))


def bundle(*branches: dict[str, Any], tensors: int = 4) -> bytes:
    return payload(note(tensors, bundle=True, branches=list(branches)))


def alias(name: str, of: str, **other: Any) -> dict[str, Any]:
    return branch(name, shape=[], reuse={"of": of, **other.pop("how", {})}, **other)


# ---- the frame
case("nothing", "at least 8 bytes", lambda: b"")
case("seven bytes", "at least 8 bytes", lambda: bytes(7))
case("all zero", "header length 0", lambda: bytes(4096))
case("all ones", "header length", lambda: b"\xff" * 4096)
case("random bytes", "header length", lambda: random.Random(1).randbytes(4096))
case("length 0", "header length 0", lambda: framed(b"") + bytes(256))
case("length 1", "header length 1", lambda: framed(b"{") + bytes(256))
case("length 2^63", "header length", lambda: struct.pack("<Q", 2**63) + text())
case("length of 100 MB", "header length", lambda: struct.pack("<Q", 10**8) + bytes(4096))
case("100 MB header", "header length", lambda: framed(b" " * 10**8))
case("length past the end", "reaches past", lambda: struct.pack("<Q", 2040) + text())
case("truncated header", "reaches past", lambda: payload()[:700])
case("truncated data", "end at byte", lambda: payload(data=3 * 256 + 95))
case("data behind the tensors", "end at byte", lambda: payload(data=3 * 256 + 97))
case("data not aligned", "multiple of 256", lambda: framed(text() + b" ", bytes(864)))
case("empty object", "no kvlink manifest", lambda: sealed(b"{}"))
case("empty array", "begin with", lambda: sealed(b"[]"))
case("lone quote", "begin with", lambda: sealed(b'"'))
case("quote in an object", "not a kvlink", lambda: sealed(b'{"'))
case("byte order mark", "begin with", lambda: sealed(b"\xef\xbb\xbf" + text()))
case("UTF-16", "UTF-8|begin with", lambda: sealed(text().decode().encode("utf-16")))
case("space in front", "begin with", lambda: sealed(b" " + text()))
case("garbage behind", "not a kvlink", lambda: sealed(text() + b"x"))
case("two objects", "not a kvlink", lambda: sealed(text() + text()))
case("zero padding", "not a kvlink", lambda: sealed(text() + bytes(8)))
case("cut JSON", "not a kvlink", lambda: sealed(text()[:-1]))
case("header digest wrong", "digest", lambda: payload().replace(b"   ", b" \n ", 1))
case("header digest blank", "digest", lambda: framed(text() + b" " * (-(len(text()) + 8) % 256)))

# ---- bad UTF-8
for _where, _old in (("a name", "kv.0.key"), ("the note", "producer"), ("a value", "F32")):
    for _what, _bytes in (
        ("a stray byte", b"\xff"),
        ("an overlong form", b"\xc0\xaf"),
        ("a surrogate", b"\xed\xa0\x80"),
        ("a cut sequence", b"\xe2\x82"),
    ):
        case(f"{_what} in {_where}", "UTF-8", lambda o=_old, b=_bytes: raw(o, b))
case("stray byte in an unknown field", "UTF-8", lambda: raw('"dtype"', b'"x":"\xff","dtype"'))
case("lone surrogate", "not a kvlink", lambda: raw('"kv.0.key"', '"\\ud800"'))
case("lone surrogate in the note", "not a kvlink", lambda: inner('"r"', '"\\udc00"'))

# ---- spans, shapes, dtypes
case("overlap", "spans", lambda: tensors(data_offsets=[0, 97], shape=[97], dtype="U8"))
case("overlap with the next", "spans", lambda: raw("[96,256]", "[90,256]"))
case("hole", "spans", lambda: raw("[96,256]", "[97,256]"))
case("first hole", "spans", lambda: tensors(data_offsets=[1, 97]))
case("backwards", "spans", lambda: tensors(data_offsets=[96, 0]))
case("offset 2^63", "not a kvlink", lambda: tensors(data_offsets=[0, 2**63]))
case("offset 2^64", "not a kvlink", lambda: tensors(data_offsets=[0, 2**64]))
case("offset 2^53", "spans", lambda: tensors(data_offsets=[0, 2**53]))
case("offset negative", "not a kvlink", lambda: tensors(data_offsets=[-96, 0]))
case("offset float", "not a kvlink", lambda: tensors(data_offsets=[0, 96.5]))
case("offset exponent", "not a kvlink", lambda: raw("[0,96]", "[0,9.6e1x]"))
case("offset NaN", "not a kvlink", lambda: tensors(data_offsets=[0, float("nan")]))
case("offset Infinity", "not a kvlink", lambda: tensors(data_offsets=[0, float("inf")]))
case("offset string", "not a kvlink", lambda: tensors(data_offsets=["0", "96"]))
case("offset true", "not a kvlink", lambda: tensors(data_offsets=[False, True]))
case("offset null", "not a kvlink", lambda: tensors(data_offsets=None))
case("offset with leading zero", "not a kvlink", lambda: raw("[0,96]", "[0,096]"))
case("one offset", "not a kvlink", lambda: tensors(data_offsets=[96]))
case("three offsets", "not a kvlink", lambda: tensors(data_offsets=[0, 96, 96]))
case("no offsets", "lacks", lambda: raw(',"data_offsets":[0,96]', ""))
case("no dtype", "lacks", lambda: raw('"dtype":"F32",', ""))
case("10^5 digits", "not a kvlink", lambda: raw("[0,96]", "[0," + "9" * 10**5 + "]"))
case("10^5 digits in a shape", "not a kvlink", lambda: raw("[3,2,4]", "[" + "9" * 10**5 + "]"))
case("10^5 digits in extra", "not a kvlink", lambda: inner('"x":1', '"x":' + "7" * 10**5))
case("10^6 decimals in extra", "not a kvlink|length", lambda: inner('"x":1', "1." + "7" * 10**6))
case("exponent 10^9", "not a kvlink", lambda: inner('"x":1', '"x":1e1000000000'))
case("rank 10^6", "header length", lambda: tensors(shape=[1] * 10**6))
case("rank 10^5", "rank 100000", lambda: tensors(shape=[1] * 10**5))
case("rank 9", "rank 9", lambda: tensors(shape=[3, 2, 4, 1, 1, 1, 1, 1, 1]))
case("product overflow 2^64", "spans", lambda: tensors(shape=[2**32, 2**32]))
case("product overflow 2^424", "spans", lambda: tensors(shape=[2**53] * 8))
case("product that wraps to 96", "spans", lambda: tensors(shape=[2**32 + 3, 2**32, 2]))
case("shape negative", "not a kvlink", lambda: tensors(shape=[-3, -2, 4]))
case("shape float", "not a kvlink", lambda: tensors(shape=[3.0, 2, 4]))
case("shape 0", "spans", lambda: tensors(shape=[0, 2, 4]))
case("shape an object", "not a kvlink", lambda: tensors(shape=None))
case("shape not the branch's", "branch says", lambda: tensors(shape=[3, 4, 2]))
case("rank not the branch's", "branch says", lambda: tensors(shape=[24]))
case("dtype not the branch's", "branch says", lambda: tensors(dtype="U8", shape=[3, 2, 16]))
for _dtype, _shape in (("F64", [3, 2, 2]), ("I64", [3, 4]), ("BOOL", [96])):
    case(f"dtype {_dtype!r}", "branch says", lambda d=_dtype, s=_shape: tensors(dtype=d, shape=s))
for _dtype in ("C64", "F4", "f32", "", "torch.float32", "__class__", "os.system", "F32\0"):
    case(f"dtype {_dtype!r}", "has dtype", lambda d=_dtype: tensors(dtype=d))
case("dtype of 500 kB", "has dtype", lambda: tensors(dtype="F" * 500_000))
case("dtype a number", "not a kvlink", lambda: tensors(dtype=7))
case("dtype null", "not a kvlink", lambda: tensors(dtype=None))
case("dtype a list", "not a kvlink", lambda: tensors(dtype=["F32"]))
case("tensor is null", "not a kvlink", lambda: payload(None, {**first(), "kv.0.key": None}))
case("tensor is a list", "not a kvlink", lambda: payload(None, {**first(), "kv.0.key": []}))
case("tensor is a kvlink string", "lacks", lambda: tensors(kvlink="x"))
