"""The payload's header: a manifest that is, byte for byte, a valid safetensors header.

A payload is `u64 header length | JSON header | tensor bytes without holes`
(https://github.com/huggingface/safetensors#format); the data starts on a 256-byte boundary. What
safetensors has no field for is one string of JSON in `__metadata__`, under the key `kvlink`.
This module imports no torch: a header is read, checked and refused before a payload byte is
touched. docs/wire.md describes the format; a change here is a change of the format.

`Manifest` is what one payload says, `Layout` what alike payloads have in common. Each makes the
other, so that one file has both, and is longer than 500 lines. `LayoutCache` keeps layouts.
"""

from __future__ import annotations

import copy
import math
import operator
import platform
import re
from typing import TYPE_CHECKING

import msgspec

from omni_kvlink._native import host
from omni_kvlink._version import __version__
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.payload.branches import Branch, is_nested, leaves
from omni_kvlink.payload.dtypes import DLPACK, ITEMSIZE
from omni_kvlink.payload.format import (
    ALIGN,
    DIGEST_CHUNK,
    KV_VERSION,
    MAX_HEADER,
    MAX_ID,
    MAX_MARKS,
    MAX_TENSORS,
    VERSION,
)
from omni_kvlink.payload.header import Header, excess, list_tensors
from omni_kvlink.payload.header import TensorSpec as TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from omni_kvlink.memory.region import Region

SLACK = 4096
"""Bytes of a header that `Manifest.as_capacity` keeps for metadata that is not known yet."""
_MAX_PAD_TEXT = 100
"""Bytes of a header that one `pad.N` entry takes at most."""
MAX_SMALL = 64 << 10
"""Bytes of a header up to which its layout may be kept."""
_MAX_ID_TEXT = 8 * MAX_ID
"""Bytes of a request id in a header: a control character takes seven."""
_SCARCE = {mark: most for mark, most in MAX_MARKS.items() if most < MAX_SMALL}

TRACE = {"traceparent", "tracestate"}
"""Names in `producer` of a trace context: https://www.w3.org/TR/trace-context/."""
_NO_PARENT = "00-" + "0" * 32 + "-" + "0" * 16 + "-00"
"""A traceparent of the length of all others, in the place of a payload's own."""
_CRC = 8
_HEAD = b'{"__metadata__":{"kvlink":"{\\"version\\":[%d,%d],\\"header_crc32c\\":\\"'
_AFTER_CRC = b'\\",\\"request_id\\":'
_SIMPLE_ID = "[A-Za-z0-9_.:/@+=,-]{1,1024}"
"""Request ids that JSON writes as they are."""
_IS_SIMPLE = re.compile(_SIMPLE_ID)
PARENT = b'\\"traceparent\\":\\"'
"""The text before a traceparent in a header; no value of `producer` can hold it."""
_IS_PARENT = re.compile("[0-9a-f-]{55}")
_WITH_ID = re.compile(re.escape(_AFTER_CRC) + rb'\\"(%b)\\"' % _SIMPLE_ID.encode())
_OPEN = b'\\"'
SIMPLE_QUOTES = 2 * len(_OPEN)
"""Bytes that `quote_id` adds to a request id that JSON writes as it is."""
_COMMA = '\\",\\"'
_BRANCHES = msgspec.json.Decoder(tuple[Branch, ...])
_ZEROS = bytes.maketrans(b"123456789abcdef", b"0" * 15)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
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
    layout: Layout | None = None
    """Its layout, if it is known; two manifests may be equal without it."""
    is_plan: bool = False
    """Whether `layout` says the same of the branches; those of a received one may be modified."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and _content(self) == _content(other)

    @property
    def data_nbytes(self) -> int:
        """Bytes behind the header."""
        return self.nbytes - self.header_nbytes

    @property
    def has_digests(self) -> bool:
        """Whether the producer computed digests."""
        return any(spec.digest for spec in self.tensors)

    @property
    def is_covered(self) -> bool:
        """Whether every byte of the tensors has a digest."""
        return all(spec.digest or spec.start == spec.stop for spec in self.tensors)

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
        specs, offset = [], 0
        allocated = {} if capacity is None else {spec.name: spec for spec in capacity.tensors}
        for name, dtype, shape in tensors:
            size = math.prod(shape) * ITEMSIZE[dtype]
            if capacity is None:
                offset = -(-offset // ALIGN) * ALIGN
            else:
                offset = _allocated_start(allocated, name, size, offset)
            blank = "0" * 8 * -(-size // DIGEST_CHUNK) if digests else ""
            specs.append(TensorSpec(name, dtype, shape, offset, offset + size, blank))
            offset += size
        draft = cls(
            request_id=request_id,
            bundle=bundle,
            branches=tuple(branches),
            tensors=tuple(specs),
            header_nbytes=0 if capacity is None else capacity.header_nbytes,
            nbytes=offset,
            producer={"library": __version__, "host": _host()},
        )
        layout = Layout(draft)
        header = layout.render(request_id, draft.digests, draft.header_nbytes)
        if len(header) > 8 + MAX_HEADER or len(specs) > MAX_TENSORS or excess(header):
            raise SchemaError(
                f"{len(specs)} tensors and a header of {len(header)} bytes; the limits are "
                f"{MAX_TENSORS} and {MAX_HEADER}, less where block_ids or extra hold many values"
            )
        if capacity is not None and len(header) > capacity.header_nbytes:
            raise SchemaError(
                f"a header of {len(header)} bytes, allocated were {capacity.header_nbytes}: "
                "give the plan the extra, or the block_ids, that the payload will have"
            )
        sizes = {"header_nbytes": len(header), "nbytes": len(header) + offset}
        return msgspec.structs.replace(draft, **sizes, layout=layout, is_plan=True)

    def as_capacity(self) -> Manifest:
        """The plan of a payload whose tensors may turn out smaller, its metadata other numbers."""
        text = self.header_nbytes + _MAX_PAD_TEXT * len(self.tensors) + SLACK
        header = min(-(-text // ALIGN) * ALIGN, (8 + MAX_HEADER) // ALIGN * ALIGN)
        nbytes = header + self.data_nbytes
        return msgspec.structs.replace(self, header_nbytes=header, nbytes=nbytes)

    def with_trace(self, trace: Mapping[str, str], *, grows: bool = True) -> Manifest:
        """The same plan, whose header carries a trace context: see `Layout.with_trace`.

        Without it, if its header would grow and must not.
        """
        if not trace or self.layout is None:
            return self
        layout = self.layout.with_trace(trace)
        header_nbytes = layout.header_nbytes(len(quote_id(self.request_id)))
        if header_nbytes > self.header_nbytes and not grows:
            return self
        header_nbytes = max(header_nbytes, self.header_nbytes)
        sizes = {"header_nbytes": header_nbytes, "nbytes": header_nbytes + self.data_nbytes}
        producer = layout.producer.copy()
        return msgspec.structs.replace(self, **sizes, layout=layout, producer=producer)

    def with_digests(self, digests: Sequence[str]) -> Manifest:
        """The same layout with the digests that the copier computed, one string a tensor."""
        pairs = zip(self.tensors, digests, strict=True)
        return self.only(msgspec.structs.replace(spec, digest=digest) for spec, digest in pairs)

    def tensors_of(self, branch: Branch) -> tuple[TensorSpec, ...]:
        """The tensors that one branch carries, in the order of the wire."""
        numbers = self.numbers_of(branch)
        return self.tensors[numbers.start : numbers.stop]

    def numbers_of(self, branch: Branch) -> range:
        """The numbers of these tensors."""
        if len(self.branches) == 1:
            return range(len(self.tensors))
        return next(numbers for other, numbers in self._numbers() if other is branch)

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
        parts = {"tensors": tuple(tensors), "layout": None, "is_plan": False}
        return msgspec.structs.replace(self, **parts)

    def _numbers(self) -> Iterator[tuple[Branch, range]]:
        """Each branch, and the numbers of its tensors."""
        start = 0
        for branch in self.branches:
            if branch.tree is not None:
                count = sum(1 for _ in leaves(branch.tree))
            else:
                count = branch.parts * branch.num_layers if branch.carries_tensors else 0
            yield branch, range(start, start + count)
            start += count

    @property
    def digests(self) -> list[str]:
        """The digest of each tensor."""
        return [spec.digest for spec in self.tensors]

    def encode(self, digests: Sequence[str] | None = None) -> bytes:
        """The payload's first `header_nbytes` bytes: length, JSON, and padding with spaces.

        With `digests`, one string a tensor, the same as `with_digests(digests).encode()`, but
        SchemaError if one is not as long as the layout says.
        """
        layout = self.layout if self.is_plan else None
        if digests is None:
            digests = self.digests
        return (layout or Layout(self)).render(self.request_id, digests, self.header_nbytes)

    @classmethod
    def decode(cls, buffer: bytes | memoryview, nbytes: int | None = None) -> Manifest:
        """Read and completely validate a header; `buffer` may end before the payload's `nbytes`.

        Raises:
            VersionError: another major version.
            IntegrityError: the header's own digest does not match.
            WireError: anything else that is not a payload of this library.
        """
        total = len(buffer) if nbytes is None else nbytes
        return decode_header(header_text(buffer, total), total)


_content = operator.attrgetter(*Manifest.__struct_fields__[:-2])  # all but layout and is_plan


class Layout:
    """Everything that payloads have in common which differ in request id and digests only.

    Made from any manifest of the layout. The header is kept as the bytes around its CRC, the
    request id and the digests, made from the fields in the order in which they are written: not
    from an encoded header, since a request id, or `extra`, may hold text that looks like a field.
    It shares no dict with a manifest, so that a caller may modify the metadata in one.

    Attributes:
        data_nbytes: bytes behind the header.
        tensors: the tensors, the digits of their digests zero.
        is_covered: whether every byte of the tensors has a digest.
        kind: the class whose `of_header` opens the payloads; "" where a manifest is needed: for
            a bundle, for nested tensors, and for metadata of a `TensorTransferData`.
        names: the first level of the tree of a `TensorTransferData`; empty for a cache or bundle.
        producer: about the producer; not to be modified.
    """

    _packed: host.PackedLayout | bool | None = False
    _traced: Layout | bool | None = False
    """The same with `_NO_PARENT`, made once; None if headers would be too long."""
    _at_parent = 0
    """The offset of `_NO_PARENT` in the tail of that one."""

    def __init__(self, manifest: Manifest):
        branches, tensors = manifest.branches, manifest.tensors
        self._bundle, self.producer = manifest.bundle, manifest.producer.copy()
        self._encoded = msgspec.json.encode(branches)
        self._flat: Branch | None = None
        self.kind, self.names = "", tuple[str, ...]()
        if len(branches) == 1:
            extra, tree = branches[0].extra, branches[0].tree
            if not is_nested(extra) and not is_nested(tree or {}):
                self._flat = _BRANCHES.decode(self._encoded)[0]
            if tree is not None and not manifest.bundle:
                self.names = tuple(tree)
            if self._flat is not None and not manifest.bundle and (tree is None or not extra):
                self.kind = manifest.kind
        self.data_nbytes = manifest.data_nbytes
        rows = [(spec.name, spec.dtype, spec.shape, spec.start, spec.stop) for spec in tensors]
        self._columns = tuple(zip(*rows, strict=True)) or ((),) * 5

        self._blank = blank = _list_digests(manifest.digests).translate(_ZEROS)
        is_cache = all(branch.tree is None for branch in branches)
        self._head = _HEAD % (KV_VERSION if is_cache else VERSION)
        algorithm = b"crc32c" if any(manifest.digests) else b"off"
        fields = msgspec.json.encode(self._bundle), self._encoded, algorithm
        self._middle = _quoted(b',"bundle":%b,"branches":%b,"digest":"%b","digests":[' % fields)
        listed = b"," + msgspec.json.encode(list_tensors(tensors))[1:] if tensors else b"}"
        self._listed = b'"}' + listed
        self._head_crc = host.crc32c(self._head + b"0" * _CRC)
        self._at_id = len(self._head) + _CRC + len(_AFTER_CRC)
        self._write_tail()
        self.tensors = tuple(map(TensorSpec, *self._columns, _split_digests(blank)))
        self.is_covered = manifest.is_covered

    def _write_tail(self) -> None:
        producer = _quoted(b'],"producer":%b}' % msgspec.json.encode(self.producer))
        self._tail = producer + self._listed
        self._fixed = 8 + self._at_id + sum(map(len, (self._middle, self._blank, self._tail)))

    def with_trace(self, trace: Mapping[str, str]) -> Layout:
        """The same layout with this trace context as part of `producer`, or with none.

        It is of one payload, and no cache keeps it. This one, if headers would be too long.
        """
        parent = trace.get("traceparent", "")
        if len(trace) > 1 or not _IS_PARENT.fullmatch(parent):
            return self._with_producer(trace) or self
        traced = self._traced
        if isinstance(traced, bool):
            traced = self._traced = self._with_producer({"traceparent": _NO_PARENT})
        return self if traced is None else traced._with_parent(parent)

    def _with_producer(self, trace: Mapping[str, str]) -> Layout | None:
        layout = copy.copy(self)
        layout.producer = {**_untraced(self.producer), **trace}
        layout._packed = layout._traced = False
        layout._write_tail()
        layout._at_parent = layout._tail.find(PARENT) + len(PARENT)
        return layout if layout.is_small or layout._fits() else None

    def _with_parent(self, parent: str) -> Layout:
        """The same with this traceparent for `_NO_PARENT`, without making each part again."""
        layout, new = Layout.__new__(Layout), parent.encode()
        vars(layout).update(vars(self))
        layout.producer = {**self.producer, "traceparent": parent}
        at, tail = self._at_parent, self._tail
        layout._tail = tail[:at] + new + tail[at + len(new) :]
        if (packed := self.packed) is not None:
            layout._packed = packed.with_text(len(self._middle) + len(self._blank) + at, new)
        return layout

    def _fits(self) -> bool:
        """Whether a header with any request id is within the limits."""
        header = self.render("x" * _MAX_ID_TEXT, [spec.digest for spec in self.tensors])
        return len(header) <= 8 + MAX_HEADER and not excess(header)

    @property  # a `cached_property` has a lock, which a fork may leave locked
    def packed(self) -> host.PackedLayout | None:
        """The layout as the native library takes it, made once; None if there is no library."""
        packed = self._packed
        if isinstance(packed, bool):  # the call of `crc32c` has loaded the library
            packed = self._packed = self._pack() if host.is_loaded() else None
        return packed

    def _pack(self) -> host.PackedLayout:
        pieces, at, comma = [], len(self._middle) + len(_OPEN), len(_COMMA)
        for spec in self.tensors:
            width = len(spec.digest)
            digest = at if width else host.NO_DIGEST
            pieces.append((spec.start, spec.stop - spec.start, digest, DLPACK[spec.dtype]))
            at += width + comma
        return host.PackedLayout(
            before=self._head + b"0" * _CRC + _AFTER_CRC,
            crc=len(self._head),
            after=self._middle + self._blank + self._tail,
            digests=(len(self._middle), len(self._blank)),
            pieces=pieces,
            shapes=[spec.shape for spec in self.tensors],
        )

    def branches(self) -> tuple[Branch, ...]:
        """The branches, which a caller may modify."""
        if (flat := self._flat) is None:
            return _BRANCHES.decode(self._encoded)
        tree = None if flat.tree is None else flat.tree.copy()  # the same, sooner
        return (msgspec.structs.replace(flat, extra=flat.extra.copy(), tree=tree),)

    @property
    def is_small(self) -> bool:
        """Whether it may be kept: no request id brings such a header near a limit."""
        text = self._middle + self._tail
        return self._fixed + _MAX_ID_TEXT <= MAX_SMALL and all(
            text.count(mark) + _MAX_ID_TEXT <= most for mark, most in _SCARCE.items()
        )

    def header_nbytes(self, quoted_nbytes: int) -> int:
        """Bytes of the header whose request id has `quoted_nbytes` bytes after `quote_id`."""
        return -(-(self._fixed + quoted_nbytes) // ALIGN) * ALIGN

    def render(self, request_id: str, digests: Sequence[str], nbytes: int = 0) -> bytes:
        """Return the header: length, JSON, and spaces up to the alignment and `nbytes` at least.

        SchemaError if the digests are not of the layout's widths, in lower case.
        """
        listed = _list_digests(digests)
        if listed.translate(_ZEROS) != self._blank:
            raise SchemaError("digests of other widths than the payload's tensors have")
        quoted = quote_id(request_id)
        size = self._fixed + len(quoted)
        length = max(size + -size % ALIGN, nbytes) - 8
        rest = b"".join((_AFTER_CRC, quoted, self._middle, listed, self._tail))
        rest = rest.ljust(length - len(self._head) - _CRC)
        crc = b"%08x" % host.crc32c(rest, self._head_crc)
        return b"".join((length.to_bytes(8, "little"), self._head, crc, rest))

    def plan(self, request_id: str) -> Manifest:
        """The manifest that `Manifest.lay_out` returns for a payload of this layout."""
        header_nbytes = self.header_nbytes(len(quote_id(request_id)))
        return self._manifest(request_id, self.tensors, header_nbytes, is_plan=True)

    def match(self, text: bytes, total: int) -> str:
        """The request id with which `render` makes this JSON with its padding; "" if none does.

        `total` are the bytes of the payload. Every byte is compared, and the CRC. "" also for a
        request id that is not simple: the decoder of all headers reads those.
        """
        if 8 + len(text) + self.data_nbytes != total:
            return ""
        length = self._match(text) if self.packed is None else self.packed.match(text)
        start = self._at_id + len(_OPEN)
        return text[start : start + length].decode()

    def _match(self, text: bytes) -> int:
        """Match a header as the native library does: `host.PackedLayout.match`."""
        found = _WITH_ID.match(text, self._at_id - len(_AFTER_CRC))
        if found is None:
            return 0
        start, first = found.start(), found.end() + len(self._middle)
        last = first + len(self._blank)
        end, listed = last + len(self._tail), text[first:last]
        if text[found.end() : first] != self._middle or text[last:end] != self._tail:
            return 0
        if text[: start - _CRC] != self._head or listed.translate(_ZEROS) != self._blank:
            return 0
        if text[end:].strip(b" "):
            return 0
        if text[start - _CRC : start] != b"%08x" % host.crc32c(text[start:], self._head_crc):
            return 0
        return len(found[1])

    def manifest(self, request_id: str, text: bytes) -> Manifest:
        """The manifest of a header with this JSON, of which `match` has returned the request id."""
        first = self._at_id + len(request_id) + SIMPLE_QUOTES + len(self._middle)
        digests = _split_digests(text[first : first + len(self._blank)])
        tensors = tuple(map(TensorSpec, *self._columns, digests))
        return self._manifest(request_id, tensors, 8 + len(text), is_plan=False)

    def _manifest(
        self, request_id: str, tensors: tuple[TensorSpec, ...], header_nbytes: int, *, is_plan: bool
    ) -> Manifest:
        return Manifest(
            request_id=request_id,
            bundle=self._bundle,
            branches=self.branches(),
            tensors=tensors,
            header_nbytes=header_nbytes,
            nbytes=header_nbytes + self.data_nbytes,
            producer=self.producer.copy(),
            layout=self,
            is_plan=is_plan,
        )


def decode_header(text: bytes, total: int) -> Manifest:
    """The manifest of a header with this JSON, in a payload of `total` bytes.

    It has a layout if that writes the same bytes.
    """
    header = Header(text, total)
    note = header.note
    manifest = Manifest(
        request_id=note.request_id,
        bundle=note.bundle,
        branches=tuple(note.branches),
        tensors=header.tensors,
        header_nbytes=8 + len(text),
        nbytes=total,
        producer=note.producer,
    )
    # A header that encodes back to the same bytes has no key twice. One that does not is of a later
    # minor version, or of another writer.
    layout = Layout(manifest)
    if layout.render(note.request_id, note.digests, manifest.header_nbytes)[8:] == text:
        return msgspec.structs.replace(manifest, layout=layout)
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


def header_text(buffer: bytes | memoryview, total: int) -> bytes:
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
    return text


def _untraced(producer: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in producer.items() if name not in TRACE}


def _allocated_start(allocated: Mapping[str, TensorSpec], name: str, nbytes: int, end: int) -> int:
    """The offset of a tensor in the memory for it, which is not before `end` of the last one."""
    spec = allocated.get(name)
    if spec is None:
        raise SchemaError(f"nothing was allocated for tensor {name!r}")
    if nbytes > spec.nbytes:
        raise SchemaError(f"{spec.where()}: {nbytes} bytes, allocated were {spec.nbytes}")
    if spec.start < end:
        raise SchemaError(f"{spec.where()}: the branches were allocated in another order")
    return spec.start


def _quoted(part: bytes) -> bytes:
    """Part of the manifest's JSON as it stands in the header: inside a string of JSON."""
    return msgspec.json.encode(part.decode())[1:-1]


def quote_id(request_id: str) -> bytes:
    """The request id as it stands in a header."""
    if _IS_SIMPLE.fullmatch(request_id):
        return b'\\"%b\\"' % request_id.encode()
    return _quoted(msgspec.json.encode(request_id))


def is_simple(request_id: str) -> bool:
    """Whether `Layout.match` finds this request id."""
    return _IS_SIMPLE.fullmatch(request_id) is not None


def _split_digests(listed: bytes) -> list[str]:
    return listed[2:-2].decode().split(_COMMA) if listed else []


def _list_digests(digests: Sequence[str]) -> bytes:
    return f'\\"{_COMMA.join(digests)}\\"'.encode() if digests else b""


def _host() -> str:
    """Return this machine's name; the system does not ensure that it is UTF-8."""
    return platform.node().encode("utf-8", "backslashreplace").decode()
