"""The payload's header: a manifest that is, byte for byte, a valid safetensors header.

A payload is `u64 header length | JSON header | tensor bytes without holes`
(https://github.com/huggingface/safetensors#format); the data starts on a 256-byte boundary. What
safetensors has no field for is one string of JSON in `__metadata__`, under the key `kvlink`.
This module imports no torch: a header is read, checked and refused before a payload byte is
touched. docs/wire.md describes the format; a change here is a change of the format.
"""

from __future__ import annotations

import json
import math
import operator
import platform
import re
import reprlib
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec

from omni_kvlink._native.host import crc32c
from omni_kvlink._version import __version__
from omni_kvlink.errors import IntegrityError, KVLinkError, SchemaError, VersionError, WireError
from omni_kvlink.payload.dtypes import DTYPES, ITEMSIZE, KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from omni_kvlink.memory.region import Region

VERSION = (1, 1)
"""The newest version that this library writes."""
KV_VERSION = (1, 0)
"""The version of a payload without a `TensorTransferData`, which every 1.x reads."""

ALIGN = 256
"""Every tensor, and the data section itself, starts on a multiple of this many bytes."""
DIGEST_CHUNK = 1 << 20
"""Each started MiB of a tensor has a CRC-32C, so that a mismatch can be localised."""
SLACK = 4096
"""Bytes of a header that `Manifest.as_capacity` keeps for metadata that is not known yet."""

MAX_HEADER = 1 << 20
MAX_TENSORS = 4096
MAX_BRANCHES = 256
MAX_LAYERS = 4096
MAX_RANK = 8
MAX_DEPTH = 32
"""Levels of dicts and lists in `extra`, in metadata and in a tree of tensors."""
_MAX_PAD_TEXT = 100
"""Bytes of a header that one `pad.N` entry takes at most."""
_MAX_MARKS = {mark: n * MAX_TENSORS for mark, n in ((b'"', 28), (b"{", 3), (b"[", 5), (b",", 40))}
"""How often a character may occur in a header: bounds what decoding allocates."""

PART_WORDS = {"key": "K", "value": "V", "latent": "latent"}
PARTS = {"NHD": ("key", "value"), "ND": ("latent",)}
"""A layer's tensors by layout: K and V of [tokens, heads, dim], or one latent of [tokens, dim].

A layout has a letter for each dimension.
"""

_BRANCH_NAME = re.compile(r"(?!pad$)[A-Za-z_][A-Za-z0-9_-]{0,63}")
_ZERO_CRC = "0" * 8
_CRC_FIELD = b'header_crc32c\\":\\"'

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


# ---- branches: the caches and the trees of tensors of a payload, without their bytes


class Reuse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A branch whose bytes are those of branch `of`: its first `tokens` tokens, or (None) all."""

    of: str
    tokens: Count | None = None


class Shard(msgspec.Struct, frozen=True):
    """The KV heads, `start` to `stop` of the whole model, that a tensor-parallel rank holds."""

    rank: Count
    world: Count
    heads: tuple[Count, Count]


class Branch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One KV cache, or (with `tree` set) the tensors of one `TensorTransferData`.

    Every tensor of a cache has `shape` and `dtype`. A tree is a dict of nested dicts and lists with
    a 0 for each tensor; then `extra` is the metadata, and no field of a cache is set.
    """

    name: str
    kv_lens: tuple[Count, ...]
    ropes: tuple[Count, ...]
    num_layers: Count
    seq_len: Count
    dtype: str = ""
    layout: str = "NHD"
    shape: tuple[Count, ...] = ()
    block_size: Count = 0
    block_ids: tuple[Count, ...] = ()
    image_shape: tuple[Count, Count] | None = None
    extra: dict[str, Any] = {}
    reuse: Reuse | None = None
    shard: Shard | None = None
    tree: dict[str, Any] | None = None

    @classmethod
    def of_tree(cls, name: str, tree: dict[str, Any], extra: dict[str, Any]) -> Branch:
        """The branch of a `TensorTransferData`; `extra` is its metadata."""
        return cls(name=name, kv_lens=(), ropes=(), num_layers=0, seq_len=0, extra=extra, tree=tree)

    @property
    def carries_tensors(self) -> bool:
        """Whether a cache has tensors of its own: it is not empty and reuses no other branch."""
        return self.reuse is None and self.seq_len > 0

    @property
    def parts(self) -> int:
        """Tensors of a layer; each tensor of a tree counts as a layer of its own."""
        return len(PARTS[self.layout]) if self.tree is None else 1

    @property
    def code(self) -> str:
        """The safetensors code of the dtype."""
        return DTYPES[self.dtype]


def length_complaints(branch: Branch) -> Iterator[str]:
    """Yield what is wrong with a cache's lengths and metadata, before there are tensors."""
    if not 1 <= branch.num_layers <= MAX_LAYERS:
        yield f"num_layers {branch.num_layers}; must be 1 to {MAX_LAYERS}"
    if sum(branch.kv_lens) != branch.seq_len:
        shown = reprlib.repr(list(branch.kv_lens))  # a hostile header may have many
        yield f"kv_lens {shown} do not add up to seq_len {branch.seq_len}"
    if not branch.kv_lens or len(branch.ropes) != len(branch.kv_lens):
        yield (
            f"{len(branch.ropes)} ropes for {len(branch.kv_lens)} kv_lens; "
            "each sequence has one length and one next position"
        )
    if _depth(branch.extra) > MAX_DEPTH:
        yield f"extra is nested deeper than {MAX_DEPTH}"


def flatten(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Path (a JSON pointer, RFC 6901) and value of each leaf of dicts and lists, depth first."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from flatten(child, f"{path}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from flatten(child, f"{path}/{index}")
    else:
        yield path, node


def check_branches(branches: Sequence[Branch], *, bundle: bool, error: type[KVLinkError]) -> None:
    """Raise `error` with the first thing that is wrong; used on both sides of a transfer."""
    if not 1 <= len(branches) <= MAX_BRANCHES:
        raise error(f"{len(branches)} branches; a payload has 1 to {MAX_BRANCHES}")
    if not bundle and (len(branches) != 1 or branches[0].reuse):
        raise error("a payload that is no bundle has exactly one branch, with tensors of its own")
    by_name = {branch.name: branch for branch in branches}
    if len(by_name) != len(branches):
        raise error("two branches have the same name")
    for branch in branches:
        where = f"branch {branch.name[:80]!r}"
        if not _BRANCH_NAME.fullmatch(branch.name):
            raise error(f"{where}: a name is 1 to 64 letters, digits, '_' or '-', and not 'pad'")
        complaints = (
            (*length_complaints(branch), *_shape_complaints(branch), *_reuse_of(branch, by_name))
            if branch.tree is None
            else _tree_complaints(branch, branch.tree)
        )
        for complaint in complaints:
            raise error(f"{where}: {complaint}")


def _tree_complaints(branch: Branch, tree: dict[str, Any]) -> Iterator[str]:
    if branch != Branch.of_tree(branch.name, tree, branch.extra):
        yield "it has a tree of tensors and fields of a KV cache"
    if max(_depth(tree), _depth(branch.extra)) > MAX_DEPTH:
        yield f"tensors or metadata are nested deeper than {MAX_DEPTH}"
    for count, leaf in enumerate(_leaves(tree), 1):
        if type(leaf) is not int or leaf != 0:  # False and 0.0 are equal to 0
            yield f"its tree holds a {type(leaf).__name__}; only dicts, lists, and 0 for a tensor"
        if count > MAX_TENSORS:
            yield f"it has more than {MAX_TENSORS} tensors"


def _shape_complaints(branch: Branch) -> Iterator[str]:
    if branch.layout not in PARTS:
        yield f"layout {branch.layout[:40]!r}; must be one of {', '.join(PARTS)}"
        return
    rank = len(branch.layout)
    if branch.dtype not in KV_DTYPES and (branch.dtype or branch.carries_tensors):
        yield f"dtype {branch.dtype[:40]!r}; must be one of {', '.join(KV_DTYPES)}"
    if not branch.carries_tensors:
        if branch.shape:
            yield "it has a shape but no tensors"
        return
    if len(branch.shape) != rank or branch.shape[0] != branch.seq_len or 0 in branch.shape:
        yield f"shape {list(branch.shape)} of {branch.seq_len} tokens in layout {branch.layout}"
    elif branch.shard and rank == 3:
        shard, heads = branch.shard, branch.shape[1]
        start, stop = shard.heads
        if shard.rank >= shard.world or stop - start != heads:
            yield f"rank {shard.rank} of {shard.world}, heads {start}…{stop}, but {heads} are here"


def _reuse_of(branch: Branch, by_name: Mapping[str, Branch]) -> Iterator[str]:
    if branch.reuse is None:
        return
    source = by_name.get(branch.reuse.of)
    if source is None or source.reuse is not None or source.tree is not None:
        what = "no tensors of its own" if source is None or source.tree is None else "no cache"
        yield f"it reuses {branch.reuse.of[:80]!r}, which has {what}"
        return
    tokens = source.seq_len if branch.reuse.tokens is None else branch.reuse.tokens
    if not 0 < tokens <= source.seq_len or tokens != branch.seq_len:
        yield (
            f"it reuses {tokens} tokens of {source.name!r} ({source.seq_len} tokens), "
            f"but its own length is {branch.seq_len}"
        )
    for field in ("num_layers", "layout", "dtype"):
        mine, theirs = getattr(branch, field), getattr(source, field)
        if mine != theirs:
            yield f"its {field} is {mine!r}, that of {source.name!r} is {theirs!r}"


def _leaves(tree: dict[str, Any]) -> Iterator[object]:
    """The values of `flatten` in any order, without the cost of paths: a tree may be hostile."""
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, (dict, list)):
                stack.append(child)
            else:
                yield child


def _depth(value: dict[str, Any]) -> int:
    """Levels of dicts and lists, found without recursion."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
    return depth


# ---- the manifest


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the payload: `start` and `stop` count bytes from the data section's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str = ""
    """Eight hexadecimal digits, a CRC-32C, for each started MiB; "" if digests are off."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, padding not counted."""
        return self.stop - self.start

    def rows(self, rows: range) -> TensorSpec:
        """These rows of the tensor, without a digest, which is of the whole tensor.

        Raises:
            SchemaError: the tensor does not have them, or they are not consecutive.
        """
        count = self.shape[0] if self.shape else 0
        if rows.step != 1 or not 0 <= rows.start < rows.stop <= count:
            raise SchemaError(f"{self.where()} has {count} rows; {rows} are not some of them")
        nbytes = self.nbytes // self.shape[0]
        start, stop = (self.start + row * nbytes for row in (rows.start, rows.stop))
        return TensorSpec(self.name, self.dtype, (len(rows), *self.shape[1:]), start, stop)

    def where(self) -> str:
        """How errors name the tensor: by branch, layer, K or V, or by branch and path."""
        branch, is_path, path = self.name.partition("/")
        if is_path:
            return f"branch {branch!r}, tensor {path[:80]!r}"
        branch, layer, part = self.name.split(".")
        return f"branch {branch!r}, layer {layer}, {PART_WORDS[part]}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a payload before its first byte is copied.

    Made by `Manifest.lay_out` on the producer, by `Manifest.decode` on the consumer; both are
    complete and valid. `nbytes` is the whole payload: header, data and padding.
    """

    request_id: str
    bundle: bool
    branches: tuple[Branch, ...]
    tensors: tuple[TensorSpec, ...]
    header_nbytes: int
    nbytes: int
    producer: dict[str, str]

    @property
    def has_digests(self) -> bool:
        """Whether the producer computed digests."""
        return any(spec.digest for spec in self.tensors)

    @property
    def is_covered(self) -> bool:
        """Whether every byte of the tensors has a digest."""
        return all(spec.digest or not spec.nbytes for spec in self.tensors)

    @property
    def kind(self) -> str:
        """The class that was put: KVCacheTransferData, TensorTransferData or KVCacheBundle."""
        if self.bundle:
            return "KVCacheBundle"
        return "KVCacheTransferData" if self.branches[0].tree is None else "TensorTransferData"

    @classmethod
    def lay_out(
        cls,
        request_id: str,
        branches: Sequence[Branch],
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        *,
        bundle: bool,
        digests: bool = True,
        capacity: Manifest | None = None,
    ) -> Manifest:
        """Assign each tensor its offset, and the header its final length.

        `tensors` are name, dtype code and shape of each, in the order of the branches. Digests are
        placeholders of the right width until `with_digests`, so the header's length does not change
        when they become known. Offsets and header length of a `capacity` (made by `as_capacity`)
        are kept. SchemaError if there is too much for it, or for a header.
        """
        specs, at = [], 0
        allocated = {} if capacity is None else {spec.name: spec for spec in capacity.tensors}
        for name, dtype, shape in tensors:
            size = math.prod(shape) * ITEMSIZE[dtype]
            if capacity is None:
                at = -(-at // ALIGN) * ALIGN
            else:
                at = _allocated_start(allocated, name, size, at)
            blank = _ZERO_CRC * -(-size // DIGEST_CHUNK) if digests else ""
            specs.append(TensorSpec(name, dtype, shape, at, at + size, blank))
            at += size
        draft = cls(
            request_id=request_id,
            bundle=bundle,
            branches=tuple(branches),
            tensors=tuple(specs),
            header_nbytes=0 if capacity is None else capacity.header_nbytes,
            nbytes=0,
            producer={"library": __version__, "host": _host()},
        )
        header = draft.encode()
        if len(header) > 8 + MAX_HEADER or len(specs) > MAX_TENSORS or _excess(header):
            raise SchemaError(
                f"{len(specs)} tensors and a header of {len(header)} bytes; the limits are "
                f"{MAX_TENSORS} and {MAX_HEADER}, less where block_ids or extra hold many values"
            )
        if capacity is not None and len(header) > capacity.header_nbytes:
            raise SchemaError(
                f"a header of {len(header)} bytes, allocated were {capacity.header_nbytes}: "
                "give the plan the extra, or the block_ids, that the payload will have"
            )
        return msgspec.structs.replace(draft, header_nbytes=len(header), nbytes=len(header) + at)

    def as_capacity(self) -> Manifest:
        """The plan of a payload whose tensors may turn out smaller, its metadata other numbers."""
        text = self.header_nbytes + _MAX_PAD_TEXT * len(self.tensors) + SLACK
        header = min(-(-text // ALIGN) * ALIGN, (8 + MAX_HEADER) // ALIGN * ALIGN)
        data = self.nbytes - self.header_nbytes
        return msgspec.structs.replace(self, header_nbytes=header, nbytes=header + data)

    def with_digests(self, digests: Sequence[str]) -> Manifest:
        """The same layout with the digests that the copier computed, one string a tensor."""
        tensors = tuple(
            msgspec.structs.replace(spec, digest=digest)
            for spec, digest in zip(self.tensors, digests, strict=True)
        )
        return msgspec.structs.replace(self, tensors=tensors)

    def tensors_of(self, branch: Branch) -> tuple[TensorSpec, ...]:
        """The tensors that one branch carries, in the order of the wire."""
        numbers = next(numbers for other, numbers in self._numbers() if other is branch)
        return self.tensors[numbers.start : numbers.stop]

    def layers(self) -> list[tuple[Branch, int, range]]:
        """Every layer that carries tensors, in the order of the wire: branch, index, numbers."""
        return [
            (branch, layer, range(first, first + branch.parts))
            for branch, numbers in self._numbers()
            for layer, first in enumerate(numbers[:: branch.parts])
        ]

    def part(self, numbers: range) -> Manifest:
        """The same payload, restricted to the tensors with these numbers."""
        return self.only(self.tensors[numbers.start : numbers.stop])

    def only(self, tensors: Iterable[TensorSpec]) -> Manifest:
        """The same payload, restricted to these tensors."""
        return msgspec.structs.replace(self, tensors=tuple(tensors))

    def _numbers(self) -> Iterator[tuple[Branch, range]]:
        """Each branch, and the numbers of its tensors."""
        start = 0
        for branch in self.branches:
            if branch.tree is not None:
                count = sum(1 for _ in _leaves(branch.tree))
            else:
                count = branch.parts * branch.num_layers if branch.carries_tensors else 0
            yield branch, range(start, start + count)
            start += count

    def encode(self) -> bytes:
        """The payload's first `header_nbytes` bytes: length, JSON, and padding with spaces."""
        note = _Note(
            version=KV_VERSION if all(b.tree is None for b in self.branches) else VERSION,
            header_crc32c=_ZERO_CRC,
            request_id=self.request_id,
            bundle=self.bundle,
            branches=list(self.branches),
            digest="crc32c" if self.has_digests else "off",
            digests=[spec.digest for spec in self.tensors],
            producer=self.producer,
        )
        text = _encode(note, _entries(self.tensors), self.header_nbytes)
        at = text.index(_CRC_FIELD) + len(_CRC_FIELD)
        text = text[:at] + b"%08x" % crc32c(text) + text[at + 8 :]
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def decode(cls, buffer: bytes | memoryview, nbytes: int | None = None) -> Manifest:
        """Read and completely validate a header; `buffer` may end before the payload's `nbytes`.

        Raises:
            VersionError: another major version.
            IntegrityError: the header's own digest does not match.
            WireError: anything else that is not a payload of this library.
        """
        total = len(buffer) if nbytes is None else nbytes
        header = _Header(buffer, total)
        note = header.note
        manifest = cls(
            request_id=note.request_id,
            bundle=note.bundle,
            branches=tuple(note.branches),
            tensors=_tensor_specs(header, total),
            header_nbytes=header.nbytes,
            nbytes=total,
            producer=note.producer,
        )
        if not note.request_id or len(note.request_id) > 1024:
            raise WireError("a request id has 1 to 1024 characters")
        if note.digest != ("crc32c" if manifest.has_digests else "off"):
            raise WireError(f"digest algorithm {note.digest[:40]!r} does not go with the digests")
        check_branches(manifest.branches, bundle=note.bundle, error=WireError)
        _check_completeness(manifest)
        header.refuse_duplicates()
        return manifest


def header_bytes(region: Region, start: int = 0, stop: int | None = None) -> bytes | memoryview:
    """Return bytes from `start` for `Manifest.decode`; of a device's memory no more than it needs.

    They end at `stop` at most. Whatever the length field says, `decode` checks it.
    """
    if region.device == "cpu":
        return region.view(start, stop)
    limit = region.nbytes if stop is None else stop
    length = int.from_bytes(region.read(start, min(limit, start + 8)), "little")
    return region.read(start, min(limit, start + 8 + min(length, MAX_HEADER)))


def as_int(value: object) -> object:
    """An int for an integer of numpy or torch; all else, bools too, as it is, to be refused."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value


def tensor_names(branch: Branch) -> Iterator[str]:
    """The name of each tensor that a branch carries, in the order of the wire."""
    if branch.tree is not None:
        for path, _ in flatten(branch.tree):
            yield branch.name + path
    elif branch.carries_tensors:
        for layer in range(branch.num_layers):
            for part in PARTS[branch.layout]:
                yield f"{branch.name}.{layer}.{part}"


def _allocated_start(allocated: Mapping[str, TensorSpec], name: str, nbytes: int, at: int) -> int:
    """The offset of a tensor in memory that was allocated for it."""
    spec = allocated.get(name)
    if spec is None:
        raise SchemaError(f"nothing was allocated for tensor {name!r}")
    if nbytes > spec.nbytes:
        raise SchemaError(f"{spec.where()}: {nbytes} bytes, allocated were {spec.nbytes}")
    if spec.start < at:
        raise SchemaError(f"{spec.where()}: the branches were allocated in another order")
    return spec.start


# ---- the header as text: bounded before it is decoded, decoded by type, encoded one way only


class _HeaderEntry(msgspec.Struct):
    """One value of the header: a tensor, or (with only `kvlink` set) `__metadata__`."""

    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: tuple[Count, ...] = ()
    data_offsets: tuple[Count, Count] | msgspec.UnsetType = msgspec.UNSET
    kvlink: str | msgspec.UnsetType = msgspec.UNSET


class _VersionOnly(msgspec.Struct):
    version: tuple[int, int]


class _Note(msgspec.Struct, kw_only=True):
    """What the `kvlink` string holds, in the order it is written."""

    version: tuple[int, int]
    header_crc32c: str
    request_id: str
    bundle: bool
    branches: list[Branch]
    digest: str
    digests: list[str]
    producer: dict[str, str]


_ENTRIES = msgspec.json.Decoder(dict[str, _HeaderEntry])
_NOTE = msgspec.json.Decoder(_Note)
_VERSION_ONLY = msgspec.json.Decoder(_VersionOnly)


class _Header:
    """A decoded header of `nbytes` with its length field; entries and note are not yet checked."""

    def __init__(self, buffer: bytes | memoryview, total: int):
        self._text = _header_text(buffer, total)
        self.nbytes = 8 + len(self._text)
        self.entries: dict[str, _HeaderEntry] = _decode(self._text, _ENTRIES)
        metadata = self.entries.pop("__metadata__", _HeaderEntry())
        if metadata.kvlink is msgspec.UNSET or metadata.dtype is not msgspec.UNSET:
            raise WireError("no kvlink manifest in __metadata__: another kind of safetensors file")
        self._note_json = metadata.kvlink.encode()
        version = _decode(self._note_json, _VERSION_ONLY).version
        if version[0] != VERSION[0]:
            raise VersionError(
                f"payload version {version[0]}.{version[1]}; this library reads {VERSION[0]}.x "
                f"(it writes {VERSION[0]}.{VERSION[1]}): use the same major version on both sides"
            )
        self.note: _Note = _decode(self._note_json, _NOTE)
        at = self._text.find(_CRC_FIELD) + len(_CRC_FIELD)
        blank = self._text[:at] + _ZERO_CRC.encode() + self._text[at + 8 :]
        if at < len(_CRC_FIELD) or self.note.header_crc32c != f"{crc32c(blank):08x}":
            raise IntegrityError("the header's own digest does not match: its bytes were changed")

    def refuse_duplicates(self) -> None:
        """Refuse a key that occurs twice in one object of the header.

        The decoder keeps the last of two, another reader might keep the first. A header that
        encodes back to the same bytes has none. One that does not (a later minor version, another
        writer) is parsed once more by a parser that shows every pair.
        """
        if _encode(self.note, self.entries, self.nbytes) == self._text:
            return
        try:
            for part in (self._text, self._note_json):  # len is cheap; the numbers are not used
                json.loads(part, object_pairs_hook=_refuse_twice, parse_int=len, parse_float=len)
        except (json.JSONDecodeError, RecursionError) as error:
            raise WireError(f"not a kvlink header: {error}") from None


def _encode(note: _Note, entries: Mapping[str, _HeaderEntry], nbytes: int) -> bytes:
    """The JSON, padded with spaces to the alignment and to `nbytes` at least."""
    metadata = {"kvlink": msgspec.json.encode(note).decode()}
    text = msgspec.json.encode({"__metadata__": metadata, **entries})
    return text.ljust(max(len(text) + -(len(text) + 8) % ALIGN, nbytes - 8))


def _header_text(buffer: bytes | memoryview, total: int) -> bytes:
    """The JSON as a private copy: a peer that can still write must not change what was checked."""
    if len(buffer) < 8:
        raise WireError(f"a payload has at least 8 bytes; this one has {len(buffer)}")
    length = int.from_bytes(buffer[:8], "little")
    if not 2 <= length <= MAX_HEADER:
        raise WireError(f"header length {length} is outside 2…{MAX_HEADER}")
    if 8 + length > min(total, len(buffer)):
        raise WireError(f"header length {length} reaches past the payload's {total} bytes")
    if (8 + length) % ALIGN:
        raise WireError(f"the data would start at byte {8 + length}, not on a multiple of {ALIGN}")
    text = bytes(buffer[8 : 8 + length])
    if text[:1] != b"{":  # the safetensors format wants it there
        raise WireError("the header does not begin with '{'")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the header is not UTF-8: {error.reason}") from None
    return text


def _decode(text: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    if what := _excess(text):
        raise WireError(f"too much in the header: {what}")
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a kvlink header: {error}") from None


def _excess(text: bytes) -> str:
    """What would cost too much memory to decode, or "": one wide character widens its string."""
    if len(text) > MAX_HEADER // 2 and (b"\\u" in text or not text.isascii()):
        return f"with non-ASCII characters, {len(text)} bytes"
    return next((f"{mark!r}" for mark, most in _MAX_MARKS.items() if text.count(mark) > most), "")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise WireError("a key occurs twice in one object of the header")


def _entries(tensors: Sequence[TensorSpec]) -> dict[str, _HeaderEntry]:
    """The tensors as the header lists them, with padding between: the format allows no holes."""
    entries: dict[str, _HeaderEntry] = {}
    at = pads = 0
    for spec in tensors:
        if spec.start > at:
            entries[f"pad.{pads}"] = _HeaderEntry("U8", (spec.start - at,), (at, spec.start))
            pads += 1
        entries[spec.name] = _HeaderEntry(spec.dtype, spec.shape, (spec.start, spec.stop))
        at = spec.stop
    return entries


def _tensor_specs(header: _Header, total: int) -> tuple[TensorSpec, ...]:
    """Spans contiguous from 0 to the payload's end, each exactly as long as its shape says."""
    specs: list[TensorSpec] = []
    at = 0
    data, digests = header.nbytes, header.note.digests
    for name, entry in header.entries.items():
        dtype, span = entry.dtype, entry.data_offsets
        if dtype is msgspec.UNSET or span is msgspec.UNSET or entry.kvlink is not msgspec.UNSET:
            _refuse(name, "lacks dtype or data_offsets")
        if dtype not in ITEMSIZE:
            _refuse(name, f"has dtype {dtype[:40]!r}, not one of {', '.join(ITEMSIZE)}")
        if len(entry.shape) > MAX_RANK:
            _refuse(name, f"has rank {len(entry.shape)}; the limit is {MAX_RANK}")
        size = math.prod(entry.shape) * ITEMSIZE[dtype]
        if span[0] != at or span[1] - span[0] != size:
            _refuse(name, f"spans {list(span)}; its shape needs [{at}, {at + size}]")
        if name.startswith("pad."):
            if dtype != "U8" or len(entry.shape) != 1 or (at + size) % ALIGN or not size:
                _refuse(name, f"is no padding: U8, one dimension, up to a multiple of {ALIGN}")
        else:
            if at % ALIGN:
                _refuse(name, f"starts at {at}, not on a multiple of {ALIGN}")
            digest = digests[len(specs)] if len(specs) < len(digests) else ""
            specs.append(TensorSpec(name, dtype, entry.shape, at, at + size, digest))
        at += size
    if specs and specs[-1].stop != at:
        raise WireError("padding behind the last tensor")
    if data + at != total:
        raise WireError(f"header and tensors end at byte {data + at}, the payload at {total}")
    if len(specs) > MAX_TENSORS:
        raise WireError(f"{len(specs)} tensors; the limit is {MAX_TENSORS}")
    if len(specs) != len(digests):
        raise WireError(f"{len(digests)} digests for {len(specs)} tensors")
    return tuple(specs)


def _refuse(name: str, why: str) -> NoReturn:
    raise WireError(f"tensor {name[:80]!r} {why}")


def _check_completeness(manifest: Manifest) -> None:
    """Every tensor of every branch is there, in order; a cache's in the one shape and dtype."""
    specs = iter(manifest.tensors)
    has_digests = manifest.has_digests
    for branch in manifest.branches:
        for name in tensor_names(branch):
            spec = next(specs, None)
            if spec is None or spec.name != name:
                got = "nothing" if spec is None else repr(spec.name[:80])
                raise WireError(f"expected tensor {name[:80]!r}, found {got}")
            if branch.tree is None and (spec.dtype, spec.shape) != (branch.code, branch.shape):
                raise WireError(
                    f"tensor {name!r} is {spec.dtype} {list(spec.shape)}; "
                    f"its branch says {branch.code} {list(branch.shape)}"
                )
            width = 8 * -(-spec.nbytes // DIGEST_CHUNK) if has_digests else 0
            if len(spec.digest) != width or spec.digest.strip("0123456789abcdef"):
                _refuse(name, f": its digest is not {width} hexadecimal digits")
    extra = next(specs, None)
    if extra is not None:
        raise WireError(f"tensor {extra.name[:80]!r} belongs to no branch")


def _host() -> str:
    """Return this machine's name; the system does not ensure that it is UTF-8."""
    return platform.node().encode("utf-8", "backslashreplace").decode()
