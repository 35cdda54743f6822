"""Hostile headers: frame, encoding, spans, dtypes, depth, duplicates, branches, trees, size.

Run as a program, it measures the memory that refusing each large case takes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

from omni_kvlink.errors import WireError
from omni_kvlink.payload.format import MAX_HEADER
from omni_kvlink.payload.manifest import Manifest
from support.payloads.headers import (
    ALIGN,
    branch,
    dump,
    entry,
    names,
    note,
    payload,
    sealed,
    spans,
    text,
)

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
        case(f"{_what} in {_where}", "UTF-8", partial(raw, _old, _bytes))
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
    case(f"dtype {_dtype!r}", "branch says", partial(tensors, dtype=_dtype, shape=_shape))
for _dtype in ("C64", "F4", "f32", "", "torch.float32", "__class__", "os.system", "F32\0"):
    case(f"dtype {_dtype!r}", "has dtype", partial(tensors, dtype=_dtype))
case("dtype of 500 kB", "has dtype", lambda: tensors(dtype="F" * 500_000))
case("dtype a number", "not a kvlink", lambda: tensors(dtype=7))
case("dtype null", "not a kvlink", lambda: tensors(dtype=None))
case("dtype a list", "not a kvlink", lambda: tensors(dtype=["F32"]))
case("tensor is null", "not a kvlink", lambda: payload(None, {**first(), "kv.0.key": None}))
case("tensor is a list", "not a kvlink", lambda: payload(None, {**first(), "kv.0.key": []}))
case("tensor is a kvlink string", "lacks", lambda: tensors(kvlink="x"))

# ---- depth
_DEEP = "nested deeper|not a kvlink|too much|begin with"
for _open, _close in (("[", "]"), ('{"a":', "}")):
    for _depth in (500, 990, 1000, 10**5):
        _extra = f'"x":{_open * _depth}1{_close * _depth}'
        case(f"depth {_depth} of {_open} in extra", _DEEP, partial(inner, '"x":1', _extra))
    _nest = _open * 10**5
    _field = f'"x":{_nest},'
    case(f"{_open} 10^5 times", _DEEP, partial(sealed, _nest.encode()))
    case(f"{_open} 10^5 times, a field", _DEEP, partial(raw, '"dtype"', _field + '"dtype"'))
    case(f"{_open} 10^5 times, the note", _DEEP, partial(payload, _nest))
    case(f"{_open} 10^5 times, metadata", _DEEP, partial(raw, '"kvlink"', _field + '"kvlink"'))
case("depth 33 of extra", "nested deeper", lambda: inner('"x":1', '"x":' + "[" * 32 + "]" * 32))


# ---- names that stand twice
_FIRST = '"kv.0.key":' + dump(entry(0, 96))
case("tensor twice", "twice", lambda: raw(_FIRST, f"{_FIRST},{_FIRST}"))
case("tensor twice, escaped", "twice", lambda: raw(_FIRST, f'"kv.0.\\u006bey":{{}},{_FIRST}'))
case("pad twice", "twice", lambda: raw('"pad.1"', '"pad.1":{"dtype":"U8"},"pad.1"'))
case("__metadata__ twice", "twice", lambda: raw("{", '{"__metadata__":{},'))
case("__metadata__ last", "no kvlink|twice", lambda: sealed(text()[:-1] + b',"__metadata__":{}}'))
case("kvlink twice", "twice", lambda: raw('"kvlink"', '"kvlink":"","kvlink"'))
case("kvlink twice, escaped", "twice", lambda: raw('"kvlink"', '"\\u006bvlink":"","kvlink"'))
case("dtype twice", "twice", lambda: raw('"dtype"', '"dtype":"F32","dtype"'))
case("dtype twice, escaped", "twice", lambda: raw('"dtype"', '"d\\u0074ype":"U8","dtype"'))
case("shape twice", "twice", lambda: raw('"shape"', '"shape":[],"shape"'))
case("unknown field twice", "twice", lambda: raw('"dtype"', '"x":1,"x":1,"dtype"'))
case("unknown field inside twice", "twice", lambda: raw('"dtype"', '"x":[{"y":1,"y":1}],"dtype"'))
case("note field twice", "twice", lambda: inner('"request_id"', '"request_id":"q","request_id"'))
case("note field escaped", "twice", lambda: inner('"bundle"', '"b\\u0075ndle":true,"bundle"'))
case(
    "note digest twice",
    "twice|digest",
    lambda: inner('"header_crc', '"header_crc32c":"","header_crc'),
)
case("branch field twice", "twice", lambda: inner('"ropes"', '"ropes":[9],"ropes"'))
case("extra key twice", "twice", lambda: inner('"x":1', '"x":1,"x":1'))
case("producer key twice", "twice", lambda: inner('"host"', '"library":"1","host"'))

# ---- which layers there are
case("layer missing", "kv.1.key", lambda: reordered(names()[:2]))
case("layer too many", "belongs to no branch", lambda: reordered(names(layers=3)))
case("layer skipped", "kv.1.key", lambda: reordered([*names()[:2], "kv.2.key", "kv.2.value"]))
case("layers in another order", "kv.0.key", lambda: reordered(names()[2:] + names()[:2]))
case("V before K", "kv.0.key", lambda: reordered(["kv.0.value", "kv.0.key", *names()[2:]]))
case("V missing", "kv.0.value", lambda: reordered(["kv.0.key", *names()[2:]]))
case("last V missing", "found nothing", lambda: reordered(names()[:3]))
case("wrong part", "kv.0.value", lambda: reordered(["kv.0.key", "kv.0.query", *names()[2:]]))
case("latent in NHD", "kv.0.key", lambda: reordered(["kv.0.latent", *names()[1:]]))
case("layer 00", "kv.0.key", lambda: reordered(["kv.00.key", *names()[1:]]))
case("layer -1", "kv.0.key", lambda: reordered(["kv.-1.key", *names()[1:]]))
case("layer 10^30", "kv.0.key", lambda: reordered([f"kv.{10**30}.key", *names()[1:]]))
case("a name that is a path", "kv.0.key", lambda: reordered(["../../etc/passwd", *names()[1:]]))
case("a tensor of no branch", "belongs to no branch", lambda: reordered([*names(), "other"]))
case("no tensors", "digests|expected", lambda: payload(None, {}, data=0))
case("tensors for an empty branch", "belongs", lambda: one(seq_len=0, kv_lens=[0], shape=[]))

# ---- padding
case("padding as data", "no padding", lambda: reordered(["pad.0", *names()[1:]]))
case("padding of 256 bytes", "no padding", lambda: _padded(256, "U8", [256]))
case("padding of 1 MiB and 1", "no padding", lambda: _padded(1 << 20 | 1, "U8", [1 << 20 | 1]))
case(
    "padding of 2^50 bytes",
    "behind the last",
    lambda: _padded(160 + 2**50, "U8", [160 + 2**50], 160),
)
case("padding of the wrong dtype", "no padding", lambda: _padded(160, "I8", [160]))
case("padding of rank 2", "no padding", lambda: _padded(160, "U8", [16, 10]))
case("padding too short", "no padding", lambda: _padded(80, "U8", [80]))
case(
    "padding of no bytes",
    "no padding",
    lambda: raw("{", '{"pad.9":' + dump(entry(0, 0, [0], "U8")) + ","),
)
case("padding at the end", "behind the last", lambda: _padding_last())
case("no padding", "multiple of 256", lambda: _unpadded())


_NO_BYTES = dump(entry(0, 0, [0], "U8"))


def _padded(size: int, dtype: str, shape: list[int], data: int = -1) -> bytes:
    entries = {"kv.0.key": entry(0, 96), "pad.0": entry(96, 96 + size, shape, dtype)}
    return payload(note(1), entries, data=96 + (size if data < 0 else data))


def _padding_last() -> bytes:
    return payload(None, {**first(), "pad.9": entry(864, 1024, [160], "U8")}, data=1024)


def _unpadded() -> bytes:
    entries = {name: entry(96 * n, 96 * n + 96) for n, name in enumerate(names())}
    return payload(None, entries, data=4 * 96)


# ---- the note
case("note missing", "no kvlink", lambda: sealed(dump(first()).encode()))
case("note null", "not a kvlink", lambda: raw('{"kvlink":', '{"kvlink":null,"x":'))
case("note an object", "not a kvlink", lambda: raw('{"kvlink":', '{"kvlink":{},"x":'))
case("note empty", "not a kvlink", lambda: payload(""))
case("note a number", "not a kvlink", lambda: payload("7"))
case("note not JSON", "not a kvlink", lambda: payload("__import__('os').system('true')"))
case("note with a tensor's fields", "no kvlink", lambda: raw('{"kvlink"', '{"dtype":"U8","kvlink"'))
case("metadata null", "not a kvlink", lambda: sealed(b'{"__metadata__":null}'))
case("metadata a list", "not a kvlink", lambda: sealed(b'{"__metadata__":[]}'))
for _field in ("version", "header_crc32c", "request_id", "branches", "digests", "producer"):
    _lacking = {name: value for name, value in note().items() if name != _field}
    case(f"note without {_field}", "not a kvlink", partial(payload, _lacking))
for _name, _version in (("empty", []), ("a string", "1.0"), ("floats", [1.0, 0]), ("null", None)):
    case(f"version {_name}", "not a kvlink", partial(payload, note(version=_version)))
case("version 2", r"2\.0", lambda: payload(note(version=[2, 0])))
case("version -1", r"-1\.0", lambda: payload(note(version=[-1, 0])))
case("request id empty", "request id", lambda: payload(note(request_id="")))
case("request id too long", "request id", lambda: payload(note(request_id="r" * 1025)))
case("request id a number", "not a kvlink", lambda: payload(note(request_id=7)))
case("producer of numbers", "not a kvlink", lambda: payload(note(producer={"pid": 7})))
case("bundle a number", "not a kvlink", lambda: payload(note(bundle=0)))

# ---- digests
case("digest too short", "digest is not", lambda: _digest("0000000"))
case("digest too long", "digest is not", lambda: _digest("0" * 16))
case("digest not hexadecimal", "digest is not", lambda: _digest("0000000g"))
case("digest in capitals", "digest is not", lambda: _digest("0000000A"))
case("digest of other digits", "digest is not", lambda: _digest("٠٠٠٠٠٠٠٠"))
case("one digest missing", "digest is not", lambda: _digest(""))
case("a digest too many", "5 digests", lambda: payload(note(5)))
case("a digest too few", "3 digests", lambda: payload(note(3)))
case("digests off, but there", "does not go", lambda: payload(note(digest="off")))
case("digests on, but none", "does not go", lambda: payload(note(digests=[""] * 4)))
case("digest of another kind", "does not go", lambda: payload(note(digest="md5")))


def _digest(first_digest: str) -> bytes:
    return payload(note(digests=[first_digest, *["00000000"] * 3]))


# ---- branches
case("no branch", "0 branches", lambda: bundle())
case("300 branches", "300 branches", lambda: bundle(*_many_branches(300)))
case(
    "two branches, no bundle", "exactly one branch", lambda: payload(note(branches=[branch()] * 2))
)
case("two branches of one name", "same name", lambda: bundle(branch(), branch()))
for _bad in (
    "",
    "a.b",
    "a/b",
    "../a",
    "pad",
    "a b",
    "é",
    "a\n",
    "-a",
    "0",
    "a" * 65,
    "__metadata__.",
):
    case(f"branch name {_bad!r}", "name is", partial(one, name=_bad))
case("kv_lens not seq_len", "add up", lambda: one(kv_lens=[2]))
case("kv_lens empty", "ropes|add up", lambda: one(kv_lens=[]))
case("kv_lens of 100,000 numbers", "add up", lambda: one(kv_lens=[7] * 100_000))
case("ropes too few", "0 ropes", lambda: one(ropes=[]))
case("ropes too many", "2 ropes", lambda: one(ropes=[1, 2]))
case("ropes negative", "not a kvlink", lambda: one(ropes=[-1]))
case("tokens not the shape's", "of 4 tokens", lambda: one(seq_len=4, kv_lens=[4]))
case("num_layers 0", "num_layers 0", lambda: one(num_layers=0))
case("num_layers 2^53", "num_layers", lambda: one(num_layers=2**53))
case("num_layers 3, two there", "found nothing", lambda: one(num_layers=3))
case("layout unknown", "layout", lambda: one(layout="HND"))
case("layout and shape", "shape", lambda: one(layout="ND"))
case("dtype of the branch", "dtype", lambda: one(dtype="torch.float32"))
case("dtype of the branch empty", "dtype", lambda: one(dtype=""))
case("branch of no elements", "shape", lambda: one(shape=[3, 0, 4]))
case("shard of other heads", "heads", lambda: one(shard={"rank": 0, "world": 1, "heads": [0, 3]}))
case("shard rank", "rank 2 of 2", lambda: one(shard={"rank": 2, "world": 2, "heads": [0, 2]}))
case("block_ids negative", "not a kvlink", lambda: one(block_ids=[-1]))
case("image_shape", "not a kvlink", lambda: one(image_shape=[1, 2, 3]))
case("extra a list", "not a kvlink", lambda: one(extra=[]))
case("extra NaN", "not a kvlink", lambda: one(extra={"x": float("nan")}))
case("alias to missing", "no tensors of its own", lambda: bundle(branch(), alias("b", "gone")))
case("alias of an alias", "no tensors", lambda: bundle(branch(), alias("b", "kv"), alias("c", "b")))
case("alias of itself", "no tensors of its own", lambda: bundle(branch(), alias("b", "b")))
case("aliases in a ring", "no tensors", lambda: bundle(branch(), alias("b", "c"), alias("c", "b")))
case(
    "alias in a single cache",
    "exactly one branch",
    lambda: payload(note(branches=[alias("a", "a")])),
)
case("alias of too many tokens", "reuses 4", lambda: bundle(branch(), _prefix(4)))
case("alias of no tokens", "reuses 0", lambda: bundle(branch(), _prefix(0)))
case("alias of an empty branch", "reuses", lambda: _alias_of_empty())
case(
    "alias of other length",
    "its own length",
    lambda: bundle(branch(), alias("b", "kv", how={"tokens": 2})),
)
case(
    "alias of other layers", "num_layers", lambda: bundle(branch(), alias("b", "kv", num_layers=3))
)
case("alias of other dtype", "dtype", lambda: bundle(branch(), alias("b", "kv", dtype="int8")))
case(
    "alias with a shape",
    "shape",
    lambda: bundle(branch(), {**alias("b", "kv"), "shape": [3, 2, 4]}),
)


def _many_branches(count: int) -> list[dict[str, Any]]:
    return [branch(), *(alias(f"b{n}", "kv") for n in range(count - 1))]


def _prefix(tokens: int, seq_len: int | None = None) -> dict[str, Any]:
    own = tokens if seq_len is None else seq_len
    return alias("b", "kv", how={"tokens": tokens}, kv_lens=[own], seq_len=own)


def _alias_of_empty() -> bytes:
    nothing = branch("e", kv_lens=[0], seq_len=0, shape=[])
    return bundle(branch(), nothing, alias("b", "e", kv_lens=[0], seq_len=0))


# ---- trees of tensors
TREE = {"a": [0, {"b": 0}], "c": 0}
TREE_NAMES = ["tensors/a/0", "tensors/a/1/b", "tensors/c"]


def tree_branch(tree: Any = None, name: str = "tensors", **other: Any) -> dict[str, Any]:
    lengths = {"kv_lens": [], "ropes": [], "num_layers": 0, "seq_len": 0}
    return {"name": name, **lengths, "tree": TREE if tree is None else tree, **other}


def tree_payload(tree: Any = None, tensor_names: list[str] | None = None, **other: Any) -> bytes:
    """A payload of three int64 tensors of five elements; without arguments it is valid."""
    order = TREE_NAMES if tensor_names is None else tensor_names
    branches = [tree_branch(tree, **other)]
    the_note = note(len(order), version=[1, 1], branches=branches)
    return payload(the_note, spans(order, [5], "I64"), data=256 * (len(order) - 1) + 40)


def tree_text(old: str, new: str) -> bytes:
    """The valid payload with a piece of the note replaced."""
    the_note = dump(note(3, version=[1, 1], branches=[tree_branch(extra={"x": 1})]))
    assert old in the_note, old
    return payload(the_note.replace(old, new, 1), spans(TREE_NAMES, [5], "I64"), data=552)


def renamed(number: int, name: str) -> bytes:
    order = list(TREE_NAMES)
    order[number] = name
    return tree_payload(None, order)


case("tree: a path twice", "twice", lambda: tree_text('"c":0', '"c":0,"c":0'))
case("tree: a path twice, escaped", "twice", lambda: tree_text('"b":0', '"b":0,"\\u0062":0'))
case(
    "tree: two keys, one path",
    "expected tensor",
    lambda: tree_payload({"a/0": 0, "a": [0], "c": 0}),
)
case("tree: name and tree disagree", "'tensors/c'", lambda: renamed(2, "tensors/d"))
case("tree: a name that climbs", "'tensors/c'", lambda: renamed(2, "tensors/../c"))
case("tree: a name that is a path", "'tensors/c'", lambda: renamed(2, "/etc/passwd"))
case("tree: a name of another branch", "'tensors/c'", lambda: renamed(2, "kv/c"))
case("tree: the name of a cache's tensor", "'tensors/c'", lambda: renamed(2, "tensors.0.key"))
case("tree: another order", "'tensors/a/0'", lambda: tree_payload(None, TREE_NAMES[::-1]))
case("tree: a list with a hole", "'tensors/a/1/b'", lambda: renamed(1, "tensors/a/2/b"))
case("tree: index 00", "'tensors/a/0'", lambda: renamed(0, "tensors/a/00"))
case("tree: index -1", "'tensors/a/0'", lambda: renamed(0, "tensors/a/-1"))
case("tree: a tensor missing", "found nothing", lambda: tree_payload(None, TREE_NAMES[:2]))
case("tree: a tensor too many", "no branch", lambda: tree_payload(None, [*TREE_NAMES, "tensors/d"]))
case("tree: empty, with tensors", "belongs to no branch", lambda: tree_payload({}))
case("tree: a list", "not a kvlink", lambda: tree_payload([0, 0, 0]))
case("tree: null is a cache", "num_layers 0", lambda: tree_text(dump(TREE), "null"))
for _what, _leaf in (
    ("1", 1),
    ("-1", -1),
    ("false", False),
    ("0.0", 0.0),
    ("null", None),
    ("text", "tensors/c"),
    ("2^64", 2**64),
):
    case(
        f"tree: a leaf of {_what}",
        "tree holds|not a kvlink",
        partial(tree_payload, {**TREE, "c": _leaf}),
    )
case("tree: a number as key", "not a kvlink", lambda: tree_text('"b":0', "7:0"))
case("tree: a key of NaN", "not a kvlink", lambda: tree_text('"b":0', "NaN:0"))
case("tree: depth 33", "nested deeper", lambda: tree_payload({"a": _nested(32)}))
case("tree: depth 500", "nested deeper|not a kvlink", lambda: tree_payload({"a": _nested(500)}))
case("tree: 4,097 tensors", "more than 4096", lambda: tree_payload({"a": [0] * 4097}))
case("tree: 70,000 leaves", "more than 4096|too much", lambda: tree_payload({"a": [0] * 70_000}))
case("tree: 21,000 lists", "too much", lambda: tree_payload({**TREE, "z": [[]] * 21_000}))
case("tree: a lone surrogate", "not a kvlink", lambda: tree_text('"b":0', '"\\udc00":0'))
case("tree: metadata a list", "not a kvlink", lambda: tree_payload(None, None, extra=[]))
case("tree: metadata NaN", "not a kvlink", lambda: tree_text('"x":1', '"x":NaN'))
case("tree: metadata Infinity", "not a kvlink", lambda: tree_text('"x":1', '"x":-Infinity'))
case("tree: metadata key twice", "twice", lambda: tree_text('"x":1', '"x":1,"x":1'))
case(
    "tree: metadata depth 33",
    "nested deeper",
    lambda: tree_payload(None, None, extra={"a": _nested(32)}),
)
case("tree: rank 9", "rank 9", lambda: _tree_tensor(shape=[5, *[1] * 8]))
case("tree: another dtype's size", "spans", lambda: _tree_tensor(dtype="I32"))
case("tree: complex", "has dtype", lambda: _tree_tensor(dtype="C64"))
for _key, _value in (
    ("kv_lens", [0]),
    ("ropes", [0]),
    ("num_layers", 1),
    ("seq_len", 1),
    ("dtype", "float32"),
    ("shape", [5]),
    ("layout", "ND"),
    ("block_size", 16),
    ("block_ids", [1]),
    ("image_shape", [1, 1]),
    ("reuse", {"of": "tensors"}),
    ("shard", {"rank": 0, "world": 1, "heads": [0, 1]}),
):
    case(
        f"tree: with {_key}",
        "fields of a KV cache|exactly one branch",
        partial(tree_payload, None, None, **{_key: _value}),
    )
case(
    "tree: a bundle with two of a name",
    "same name",
    lambda: bundle(tree_branch({}), tree_branch({})),
)
case(
    "tree: reused", "has no cache", lambda: bundle(branch(), tree_branch({}), alias("b", "tensors"))
)
case(
    "tree: prefix of it",
    "has no cache",
    lambda: bundle(branch(), tree_branch({}), alias("b", "tensors", how={"tokens": 3})),
)


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def _tree_tensor(**fields: Any) -> bytes:
    entries = spans(TREE_NAMES, [5], "I64")
    entries["tensors/c"] = {**entries["tensors/c"], **fields}
    return payload(note(3, version=[1, 1], branches=[tree_branch()]), entries, data=552)


# ---- sheer size
MEASURED = 32 << 10
"""A header shorter than this is too short to ask for megabytes."""
SPACE = MAX_HEADER - 2048
EMOJI = "\U0001f600"
"""One of these in a string makes Python keep all of it in four bytes a character."""
WIDE = EMOJI + "a" * (SPACE // 2)


def extra(value: str) -> bytes:
    return inner('"x":1', f'"x":{value}')


def listed(item: Callable[[int], str], width: int) -> str:
    """As many items as fit into a header."""
    return "[" + ",".join(item(n) for n in range(SPACE // width)) + "]"


def escaped(value: str, escaped_chars: str) -> bytes:
    """The value in `extra`, with marks written as escapes, so that counting does not find them."""
    header = text(None, dump(note(branches=[branch(extra={"x": "@"})])))
    for mark in escaped_chars:
        value = value.replace(mark, f"\\u{ord(mark):04x}")
    return sealed(header.replace(b'\\"@\\"', value.encode(), 1))


def many(count: int, **fields: Any) -> bytes:
    """`count` tensors without a digest, each as short as can be."""
    entries = {f"t{n}": {**entry(n, n + 1, [1], "U8"), **fields} for n in range(count)}
    return payload(note(0), entries, data=count)


def largest(*, last: str) -> bytes:
    """The longest header that is all right but for its last digest, written in another way."""
    halves = [f"b{n}" for n in range(32)]
    order = [name for half in halves for name in names(half, 64)]
    digests = ["00000000"] * (len(order) - 1) + [last]
    branches = [branch(half, num_layers=64) for half in halves]
    the_note = note(bundle=True, branches=branches, digests=digests)
    return payload(the_note, spans(order), data=ALIGN * (len(order) - 1) + 96)


_MANY = "too much|header length|tensors"
case("70,000 tensors", _MANY, lambda: many(70_000))
case("10,000 tensors", "multiple of 256", lambda: many(10_000))
case("12,000 tensors of null", "lacks|not a kvlink", lambda: _nulls(12_000))
case("4,096 tensors, last digest wrong", "digest is not", lambda: largest(last="0000000g"))
case("empty lists", "too much", lambda: extra(listed(lambda n: "[]", 3)))
case("empty objects", "too much", lambda: extra(listed(lambda n: "{}", 3)))
case("lists in lists", "too much", lambda: extra(listed(lambda n: "[" * 25 + "]" * 25, 51)))
case("lists in lists in a field", "too much", lambda: _in_field(listed(lambda n: "[[]]", 5)))
case("escaped lists", "too much", lambda: escaped(listed(lambda n: "[]", 18), "[],"))
case("escaped objects", "too much", lambda: escaped(listed(lambda n: "{}", 18), "{},"))
case("short strings", "too much", lambda: extra(listed(lambda n: f'"{n:x}"', 10)))
case("escaped strings", "too much", lambda: escaped(listed(lambda n: f'"{n:x}"', 18), '"'))
case("keys", "too much", lambda: extra("{" + listed(lambda n: f'"{n:x}":0', 12)[1:-1] + "}"))
case("numbers", "too much", lambda: extra(listed(lambda n: "1e5", 4)))
case("numbers in a field", "too much", lambda: _in_field(listed(lambda n: "1e5", 4)))
case("key 80,000 times", "twice|too much", lambda: extra("{" + '"a":0,' * 80_000 + '"a":0}'))
case("key 20,000 times", "twice", lambda: extra("{" + '"a":0,' * 20_000 + '"a":0}'))
case("request id of 1 MB", "request id", lambda: payload(note(request_id="a" * SPACE)))
case("wide header", "too much", lambda: payload(note(request_id=EMOJI + "a" * SPACE)))
case("wide request id", "request id", lambda: payload(note(request_id=WIDE)))
case("escaped request id", "request id", lambda: inner('"r"', f'"\\ud83d\\ude00{WIDE[1:]}"'))
case("wide dtype", "has dtype", lambda: tensors(dtype=WIDE))
case("wide name", "lacks", lambda: payload(None, {WIDE: {}}))
case("wide producer", "twice", lambda: _wide_producer())
case("wide field", "twice", lambda: raw('"dtype"', f'"x":"{WIDE}","x":1,"dtype"'))
case("digest of 1 MB", "digest is not", lambda: payload(note(digests=["0" * SPACE, "", "", ""])))
case("header of 4 MB", "header length", lambda: sealed(text() + b" " * (4 << 20)))


def _nulls(count: int) -> bytes:
    return payload(note(0), {f"t{n}": {} for n in range(count)}, data=0)


def _in_field(value: str) -> bytes:
    return raw('"dtype"', f'"x":{value},"dtype"')


def _wide_producer() -> bytes:
    wide = dump(note(producer={"library": WIDE}))
    return payload(wide.replace('"library"', '"host":"","host":"","library"', 1))


def cost(make: Callable[[], bytes]) -> tuple[int, int]:
    """Bytes that refusing a payload takes: as Python counts them, and as the kernel does."""
    data = make()
    return _in_a_child(lambda: _traced(data)), _in_a_child(lambda: _resident(data))


def _traced(data: bytes) -> int:
    tracemalloc.start()
    _refuse(data)
    return tracemalloc.get_traced_memory()[1]


def _resident(data: bytes) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _refuse(data)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def _refuse(data: bytes) -> None:
    try:
        Manifest.decode(data)
    except WireError:
        return
    raise SystemExit("a hostile header was accepted")


def _in_a_child(measure: Callable[[], int]) -> int:
    """A forked child starts its high-water mark at what is resident now."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(measure()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return int(found)


if __name__ == "__main__":
    gc.freeze()
    large = {name: make for name, _, make in CASES if len(make()) > MEASURED}
    print(json.dumps({name: cost(make) for name, make in large.items()}))
