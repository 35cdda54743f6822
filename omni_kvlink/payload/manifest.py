"""The payload's header: a manifest that is, byte for byte, a valid safetensors header.

A payload is `u64 header length | JSON header | tensor bytes without holes`
(https://github.com/huggingface/safetensors#format); the data starts on a 256-byte boundary. What
safetensors has no field for is one string of JSON in `__metadata__`, under the key `kvlink`.
This module imports no torch: a header is read, checked and refused before a payload byte is
touched. docs/wire.md describes the format; a change here is a change of the format.
"""

from __future__ import annotations

import math
import platform
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from omni_kvlink._version import __version__
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.payload.branches import (
    PART_WORDS,
    Branch,
    check_branches,
    is_nested,
    leaves,
    tensor_names,
)
from omni_kvlink.payload.dtypes import ITEMSIZE
from omni_kvlink.payload.format import ALIGN, DIGEST_CHUNK, MAX_HEADER, MAX_RANK, MAX_TENSORS
from omni_kvlink.payload.header import Header, HeaderEntry, excess
from omni_kvlink.payload.header_template import (
    MAX_ID,
    MAX_SMALL,
    HeaderTemplate,
    is_simple,
    quote_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from omni_kvlink._native.host import PackedLayout
    from omni_kvlink.memory.region import Region

SLACK = 4096
"""Bytes of a header that `Manifest.as_capacity` keeps for metadata that is not known yet."""
_MAX_PAD_TEXT = 100
"""Bytes of a header that one `pad.N` entry takes at most."""
_MAX_LAYOUTS = 256
_MAX_RECEIVED = 16


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


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
            blank = "0" * 8 * -(-size // DIGEST_CHUNK) if digests else ""
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
        nbytes = len(header) + at
        plan = msgspec.structs.replace(draft, header_nbytes=len(header), nbytes=nbytes)
        plan.__dict__["template"] = draft.template
        return plan

    def as_capacity(self) -> Manifest:
        """The plan of a payload whose tensors may turn out smaller, its metadata other numbers."""
        text = self.header_nbytes + _MAX_PAD_TEXT * len(self.tensors) + SLACK
        header = min(-(-text // ALIGN) * ALIGN, (8 + MAX_HEADER) // ALIGN * ALIGN)
        nbytes = header + self.data_nbytes
        return msgspec.structs.replace(self, header_nbytes=header, nbytes=nbytes)

    def with_digests(self, digests: Sequence[str]) -> Manifest:
        """The same layout with the digests that the copier computed, one string a tensor."""
        tensors = tuple(
            msgspec.structs.replace(spec, digest=digest)
            for spec, digest in zip(self.tensors, digests, strict=True)
        )
        return msgspec.structs.replace(self, tensors=tensors)

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
        return msgspec.structs.replace(self, tensors=tuple(tensors))

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
    def template(self) -> HeaderTemplate:
        """The header as `encode` writes it, for any request id and digests; made once."""
        template: HeaderTemplate | None = self.__dict__.get("template")
        if template is None:
            template = self.__dict__["template"] = HeaderTemplate(
                bundle=self.bundle,
                branches=self.branches,
                producer=self.producer,
                entries=_entries(self.tensors),
                tensors=[(one.start, one.stop, one.dtype, one.shape) for one in self.tensors],
                digests=[spec.digest for spec in self.tensors],
            )
        return template

    @property
    def packed(self) -> PackedLayout | None:
        """The layout as the native library takes it; None if it is not known, or has no library."""
        template: HeaderTemplate | None = self.__dict__.get("known", self.__dict__.get("template"))
        return None if template is None else template.packed

    def encode(self, digests: Sequence[str] | None = None) -> bytes:
        """The payload's first `header_nbytes` bytes: length, JSON, and padding with spaces.

        With `digests`, one string a tensor, the same as `with_digests(digests).encode()`, but
        SchemaError if one is not as long as the layout says.
        """
        if digests is None:
            digests = [spec.digest for spec in self.tensors]
        return self.template.render(self.request_id, digests, self.header_nbytes)

    @classmethod
    def decode(cls, buffer: bytes | memoryview, nbytes: int | None = None) -> Manifest:
        """Read and completely validate a header; `buffer` may end before the payload's `nbytes`.

        Raises:
            VersionError: another major version.
            IntegrityError: the header's own digest does not match.
            WireError: anything else that is not a payload of this library.
        """
        header = read_header(buffer, nbytes)
        return header.manifest() if isinstance(header, KnownHeader) else header


class Layout:
    """What payloads have in common that differ in request id and digests only.

    Made from any manifest of the layout. It shares no dict with the manifests that it returns, so
    that a caller may modify the metadata in them.

    Attributes:
        data_nbytes: bytes behind the header.
        tensors: the tensors, the digits of their digests zero.
        is_plain: whether the payloads are a `TensorTransferData` without metadata or nesting.
        names: the first level of the tree of a `TensorTransferData`; empty for a cache or bundle.
    """

    def __init__(self, manifest: Manifest):
        tensors = manifest.tensors
        self._bundle, self._producer = manifest.bundle, manifest.producer.copy()
        self._branches = _copied(manifest.branches)
        self._has_dicts = any(branch.extra or branch.tree for branch in manifest.branches)
        first = manifest.branches[0]
        self.is_plain = len(manifest.branches) == 1 and not (
            first.extra or first.tree is None or is_nested(first.tree)
        )
        self.data_nbytes = manifest.data_nbytes
        self.names = () if manifest.bundle else tuple(first.tree or ())
        self._template = manifest.template
        rows = [(each.name, each.dtype, each.shape, each.start, each.stop) for each in tensors]
        self._columns = tuple(zip(*rows, strict=True)) or ((),) * 5
        self.tensors = tuple(map(TensorSpec, *self._columns, self._template.blank_digests))

    def plan(self, request_id: str) -> Manifest:
        """What `Manifest.lay_out` returns for a payload of this layout."""
        header_nbytes = self._template.header_nbytes(len(quote_id(request_id)))
        manifest = self._manifest(request_id, self.tensors, header_nbytes)
        manifest.__dict__["template"] = self._template
        return manifest

    def header_nbytes(self, quoted_nbytes: int) -> int:
        """Bytes of a header whose request id has `quoted_nbytes` bytes after `quote_id`."""
        return self._template.header_nbytes(quoted_nbytes)

    def header(self, request_id: str, digests: Sequence[str]) -> bytes:
        """What `plan(request_id).with_digests(digests).encode()` returns."""
        return self._template.render(request_id, digests)

    @property
    def packed(self) -> PackedLayout | None:
        """The layout as the native library takes it; None if there is no library."""
        return self._template.packed

    def match(self, text: bytes, total: int) -> str:
        """The request id in a header's JSON; "" if it is not of this layout.

        `total` are the bytes of the payload.
        """
        if 8 + len(text) + self.data_nbytes != total:
            return ""
        return self._template.match(text)

    def manifest(self, request_id: str, text: bytes) -> Manifest:
        """The manifest of a header with this JSON, of which `match` has returned the request id."""
        digests = self._template.digests(request_id, text)
        tensors = tuple(map(TensorSpec, *self._columns, digests))
        return self._manifest(request_id, tensors, 8 + len(text))

    def _manifest(
        self, request_id: str, tensors: tuple[TensorSpec, ...], header_nbytes: int
    ) -> Manifest:
        branches = self._branches
        if self.is_plain:  # what `_copied` returns of it costs a small payload more
            (branch,) = branches
            assert branch.tree is not None
            branches = (msgspec.structs.replace(branch, extra={}, tree=branch.tree.copy()),)
        elif self._has_dicts:
            branches = _copied(branches)
        manifest = Manifest(
            request_id=request_id,
            bundle=self._bundle,
            branches=branches,
            tensors=tensors,
            header_nbytes=header_nbytes,
            nbytes=header_nbytes + self.data_nbytes,
            producer=self._producer.copy(),
        )
        # Not as its template: a caller may modify the metadata, and encode it.
        manifest.__dict__["known"] = self._template
        return manifest


class KnownHeader(msgspec.Struct, frozen=True, gc=False):
    """A valid header that differs from an earlier one in request id and digests only."""

    request_id: str
    layout: Layout
    text: bytes
    """Its JSON."""

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header."""
        return 8 + len(self.text)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors, the digits of their digests zero."""
        return self.layout.tensors

    @property
    def packed(self) -> PackedLayout | None:
        """The layout as the native library takes it; None if there is no library."""
        return self.layout.packed

    def manifest(self) -> Manifest:
        """The manifest of this header."""
        return self.layout.manifest(self.request_id, self.text)


class _Layouts:
    """The layouts of the payloads that were planned last, at most `_MAX_LAYOUTS`.

    Without a lock, which a fork could leave locked: two dicts, of which a full one replaces the
    older one. Threads that add at the same time lose a layout at worst.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[Any, ...], Layout] = {}
        self._older: dict[tuple[Any, ...], Layout] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def get(self, key: tuple[Any, ...]) -> Layout | None:
        layout = self._recent.get(key)
        if layout is None and (layout := self._older.get(key)) is not None:
            self.put(key, layout)
        return layout

    def put(self, key: tuple[Any, ...], layout: Layout) -> None:
        if len(self._recent) >= _MAX_LAYOUTS // 2:
            self._recent, self._older = {}, self._recent
        self._recent[key] = layout


_planned = _Layouts()
_received: tuple[Layout, ...] = ()
"""The layouts of the headers that were decoded last; replaced as a whole, since threads read it."""
_repeated: Layout | None = None


def find_layout(key: tuple[Any, ...]) -> Layout | None:
    """The layout of an earlier payload that had the same key; None if none is remembered.

    The key tells all that `Manifest.lay_out` takes but the request id.
    """
    return _planned.get(key)


def remember_plan(key: tuple[Any, ...], plan: Manifest) -> None:
    """Remember what `Manifest.lay_out` returned, for later payloads with this key."""
    if plan.template.is_small:
        _planned.put(key, Layout(plan))


def read_header(buffer: bytes | memoryview, nbytes: int | None = None) -> Manifest | KnownHeader:
    """Read and completely validate a header; arguments and errors as of `Manifest.decode`.

    One that differs from one of the last ones in request id and digests only is compared with it,
    byte for byte, instead of being decoded.
    """
    total = len(buffer) if nbytes is None else nbytes
    text = _header_text(buffer, total)
    if len(text) <= MAX_SMALL:
        for layout in _received:
            request_id = layout.match(text, total)
            if request_id:
                _remember(layout)
                return KnownHeader(request_id, layout, text)
    return _decoded(text, total)


def _remember(layout: Layout) -> None:
    """Make a layout the first that `Manifest.decode` compares."""
    global _received, _repeated
    known = _received
    is_repeated = bool(known) and known[0] is layout
    _repeated = layout if is_repeated else None
    if not is_repeated:
        others = [each for each in known if each is not layout]
        _received = (layout, *others[: _MAX_RECEIVED - 1])


def repeated_layout(most: int) -> Layout | None:
    """The layout of the last two headers that were decoded, if it was the same one.

    None also if its payloads have more than `most` bytes behind the header.
    """
    layout = _repeated
    return layout if layout is not None and layout.data_nbytes <= most else None


def _copied(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """The same branches with dicts of their own."""
    return tuple(
        [
            msgspec.structs.replace(
                branch,
                extra=_copy(branch.extra) if branch.extra else {},
                tree=_copy(branch.tree) if branch.tree else branch.tree,
            )
            for branch in branches
        ]
    )


def _copy(value: Any) -> Any:
    """A copy of nested dicts and lists."""
    if isinstance(value, dict):
        copied = value.copy()
        for key, each in value.items():
            if isinstance(each, (dict, list)):
                copied[key] = _copy(each)
        return copied
    return [_copy(each) if isinstance(each, (dict, list)) else each for each in value]


def _decoded(text: bytes, total: int) -> Manifest:
    """The manifest of a header with this JSON, in a payload of `total` bytes."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the header is not UTF-8: {error.reason}") from None
    header = Header(text)
    note = header.note
    manifest = Manifest(
        request_id=note.request_id,
        bundle=note.bundle,
        branches=tuple(note.branches),
        tensors=_tensor_specs(header, 8 + len(text), total),
        header_nbytes=8 + len(text),
        nbytes=total,
        producer=note.producer,
    )
    if not note.request_id or len(note.request_id) > MAX_ID:
        raise WireError(f"a request id has 1 to {MAX_ID} characters")
    if note.digest != ("crc32c" if manifest.has_digests else "off"):
        raise WireError(f"digest algorithm {note.digest[:40]!r} does not go with the digests")
    check_branches(manifest.branches, bundle=note.bundle, error=WireError)
    _check_completeness(manifest)
    # A header that encodes back to the same bytes has no key twice. One that does not is of a later
    # minor version, or of another writer.
    if manifest.encode()[8:] != text:
        header.refuse_duplicates()
    elif is_simple(manifest.request_id) and manifest.template.is_small:
        _remember(Layout(manifest))
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
    return text


def _entries(tensors: Sequence[TensorSpec]) -> dict[str, HeaderEntry]:
    """The tensors as the header lists them, with padding between: the format allows no holes."""
    entries: dict[str, HeaderEntry] = {}
    at = pads = 0
    for spec in tensors:
        if spec.start > at:
            entries[f"pad.{pads}"] = HeaderEntry("U8", (spec.start - at,), (at, spec.start))
            pads += 1
        entries[spec.name] = HeaderEntry(spec.dtype, spec.shape, (spec.start, spec.stop))
        at = spec.stop
    return entries


def _tensor_specs(header: Header, data: int, total: int) -> tuple[TensorSpec, ...]:
    """Spans contiguous from 0 to the payload's end, each exactly as long as its shape says."""
    specs: list[TensorSpec] = []
    at = 0
    digests = header.note.digests
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
