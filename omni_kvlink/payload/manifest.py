"""The payload's header: a manifest that is, byte for byte, a valid safetensors header.

A payload is `u64 header length | JSON header | tensor bytes without holes`
(https://github.com/huggingface/safetensors#format); the data starts on a 256-byte boundary. What
safetensors has no field for is one string of JSON in `__metadata__`, under the key `kvlink`.
This module imports no torch: a header is read, checked and refused before a payload byte is
touched. docs/wire.md describes the format; a change here is a change of the format.
"""

from __future__ import annotations

import math
import operator
import platform
from typing import TYPE_CHECKING, NoReturn

import msgspec

from omni_kvlink._version import __version__
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.payload.branches import PART_WORDS, Branch, check_branches, leaves, tensor_names
from omni_kvlink.payload.dtypes import ITEMSIZE
from omni_kvlink.payload.format import ALIGN, DIGEST_CHUNK, MAX_HEADER, MAX_RANK, MAX_TENSORS
from omni_kvlink.payload.header import Header, HeaderEntry, excess
from omni_kvlink.payload.header_template import MAX_ID, HeaderTemplate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from omni_kvlink._native.host import PackedLayout
    from omni_kvlink.memory.region import Region

SLACK = 4096
"""Bytes of a header that `Manifest.as_capacity` keeps for metadata that is not known yet."""
_MAX_PAD_TEXT = 100
"""Bytes of a header that one `pad.N` entry takes at most."""


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
        """Some rows of the tensor, without a digest, which is of the whole tensor.

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
        """The name of the tensor in errors: by branch, layer, K or V, or by branch and path."""
        branch, is_path, path = self.name.partition("/")
        if is_path:
            return f"branch {branch!r}, tensor {path[:80]!r}"
        branch, layer, part = self.name.split(".")
        return f"branch {branch!r}, layer {layer}, {PART_WORDS[part]}"


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
    template: HeaderTemplate | None = None
    """The header of its layout, if it is known; two manifests may be equal without it."""
    is_plan: bool = False
    """Whether `template` says the same of the branches; those of a received one may be modified."""

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
            nbytes=0,
            producer={"library": __version__, "host": _host()},
        )
        template = draft.make_template()
        header = template.render(request_id, draft.digests, draft.header_nbytes)
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
        return msgspec.structs.replace(draft, **sizes, template=template, is_plan=True)

    def as_capacity(self) -> Manifest:
        """The plan of a payload whose tensors may turn out smaller, its metadata other numbers."""
        text = self.header_nbytes + _MAX_PAD_TEXT * len(self.tensors) + SLACK
        header = min(-(-text // ALIGN) * ALIGN, (8 + MAX_HEADER) // ALIGN * ALIGN)
        nbytes = header + self.data_nbytes
        return msgspec.structs.replace(self, header_nbytes=header, nbytes=nbytes)

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
        parts = {"tensors": tuple(tensors), "template": None, "is_plan": False}
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

    def make_template(self) -> HeaderTemplate:
        """The header as `encode` writes it, for any request id and digests."""
        return HeaderTemplate(
            bundle=self.bundle,
            branches=self.branches,
            producer=self.producer,
            entries=_entries(self.tensors),
            tensors=[(spec.start, spec.stop, spec.dtype, spec.shape) for spec in self.tensors],
            digests=self.digests,
        )

    @property
    def digests(self) -> list[str]:
        """The digest of each tensor."""
        return [spec.digest for spec in self.tensors]

    @property
    def packed(self) -> PackedLayout | None:
        """The layout as the native library takes it; None if it is not known, or has no library."""
        return None if self.template is None else self.template.packed

    def encode(self, digests: Sequence[str] | None = None) -> bytes:
        """The payload's first `header_nbytes` bytes: length, JSON, and padding with spaces.

        With `digests`, one string a tensor, the same as `with_digests(digests).encode()`, but
        SchemaError if one is not as long as the layout says.
        """
        template = self.template if self.is_plan else None
        if digests is None:
            digests = self.digests
        template = template or self.make_template()
        return template.render(self.request_id, digests, self.header_nbytes)

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


_content = operator.attrgetter(*Manifest.__struct_fields__[:-2])  # all but template and is_plan


def decode_header(text: bytes, total: int) -> Manifest:
    """The manifest of a header with this JSON, in a payload of `total` bytes.

    It has a template if that writes the same bytes.
    """
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
    template = manifest.make_template()
    written = template.render(note.request_id, manifest.digests, manifest.header_nbytes)
    if written[8:] == text:
        return msgspec.structs.replace(manifest, template=template)
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


def _entries(tensors: Sequence[TensorSpec]) -> dict[str, HeaderEntry]:
    """The tensors as the header lists them, with padding between: the format allows no holes."""
    entries: dict[str, HeaderEntry] = {}
    offset = pads = 0
    for spec in tensors:
        if spec.start > offset:
            entries[f"pad.{pads}"] = HeaderEntry("U8", (spec.start - offset,), (offset, spec.start))
            pads += 1
        entries[spec.name] = HeaderEntry(spec.dtype, spec.shape, (spec.start, spec.stop))
        offset = spec.stop
    return entries


def _tensor_specs(header: Header, data: int, total: int) -> tuple[TensorSpec, ...]:
    """Spans contiguous from 0 to the payload's end, each exactly as long as its shape says."""
    specs: list[TensorSpec] = []
    offset = 0
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
        if span[0] != offset or span[1] - span[0] != size:
            _refuse(name, f"spans {list(span)}; its shape needs [{offset}, {offset + size}]")
        if name.startswith("pad."):
            if dtype != "U8" or len(entry.shape) != 1 or (offset + size) % ALIGN or not size:
                _refuse(name, f"is no padding: U8, one dimension, up to a multiple of {ALIGN}")
        else:
            if offset % ALIGN:
                _refuse(name, f"starts at {offset}, not on a multiple of {ALIGN}")
            digest = digests[len(specs)] if len(specs) < len(digests) else ""
            specs.append(TensorSpec(name, dtype, entry.shape, offset, offset + size, digest))
        offset += size
    if specs and specs[-1].stop != offset:
        raise WireError("padding behind the last tensor")
    if data + offset != total:
        raise WireError(f"header and tensors end at byte {data + offset}, the payload at {total}")
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
