"""More hostile headers: depth, names that stand twice, the manifest itself, and sheer size."""

from __future__ import annotations

from typing import Any

from headers import branch, dump, entry, names, note, payload, sealed, text
from hostile import alias, bundle, case, first, inner, one, raw, reordered

# ---- depth
_DEEP = "nested deeper|not a kvlink|too much|begin with"
for _open, _close in (("[", "]"), ('{"a":', "}")):
    for _depth in (500, 990, 1000, 10**5):
        _extra = f'"x":{_open * _depth}1{_close * _depth}'
        case(f"depth {_depth} of {_open} in extra", _DEEP, lambda e=_extra: inner('"x":1', e))
    _nest = _open * 10**5
    _field = f'"x":{_nest},'
    case(f"{_open} 10^5 times", _DEEP, lambda n=_nest: sealed(n.encode()))
    case(f"{_open} 10^5 times, a field", _DEEP, lambda f=_field: raw('"dtype"', f + '"dtype"'))
    case(f"{_open} 10^5 times, the note", _DEEP, lambda n=_nest: payload(n))
    case(f"{_open} 10^5 times, metadata", _DEEP, lambda f=_field: raw('"kvlink"', f + '"kvlink"'))
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
    case(f"note without {_field}", "not a kvlink", lambda n=_lacking: payload(n))
for _name, _version in (("empty", []), ("a string", "1.0"), ("floats", [1.0, 0]), ("null", None)):
    case(f"version {_name}", "not a kvlink", lambda v=_version: payload(note(version=v)))
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
case("two branches, no bundle", "exactly one branch", lambda: payload(note(branches=[branch()] * 2)))
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
    case(f"branch name {_bad!r}", "name is", lambda b=_bad: one(name=b))
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
case("alias in a single cache", "exactly one branch", lambda: payload(note(branches=[alias("a", "a")])))
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
