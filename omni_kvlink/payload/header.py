"""The header's JSON: bounded before it is decoded, decoded by type, without duplicate keys.

What is in it is checked completely, before a byte behind it is touched. docs/wire.md describes it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from omni_kvlink._native.host import crc32c
from omni_kvlink.errors import IntegrityError, SchemaError, VersionError, WireError
from omni_kvlink.payload.branches import PART_WORDS, Branch, Count, check_branches, tensor_names
from omni_kvlink.payload.dtypes import ITEMSIZE
from omni_kvlink.payload.format import (
    ALIGN,
    DIGEST_CHUNK,
    MAX_HEADER,
    MAX_ID,
    MAX_MARKS,
    MAX_RANK,
    MAX_TENSORS,
    VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ZERO_CRC = b"0" * 8
_CRC_FIELD = b'header_crc32c\\":\\"'


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

    def leading(self, rows: int) -> TensorSpec:
        """The first rows of the tensor, up to the end of the MiB that the last of them is in.

        It has the digests of these bytes, unlike `rows`; its shape is that of the whole tensor.
        """
        nbytes = self.nbytes // self.shape[0] * rows
        chunks = -(-nbytes // DIGEST_CHUNK)
        stop = min(self.stop, self.start + chunks * DIGEST_CHUNK)
        return msgspec.structs.replace(self, stop=stop, digest=self.digest[: 8 * chunks])

    def where(self) -> str:
        """The name of the tensor in errors: by branch, layer, K or V, or by branch and path."""
        branch, is_path, path = self.name.partition("/")
        if is_path:
            return f"branch {branch!r}, tensor {path[:80]!r}"
        branch, layer, part = self.name.split(".")
        return f"branch {branch!r}, layer {layer}, {PART_WORDS[part]}"


class HeaderEntry(msgspec.Struct):
    """One value of the header: a tensor, or (with only `kvlink` set) `__metadata__`."""

    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: tuple[Count, ...] = ()
    data_offsets: tuple[Count, Count] | msgspec.UnsetType = msgspec.UNSET
    kvlink: str | msgspec.UnsetType = msgspec.UNSET


class _VersionOnly(msgspec.Struct):
    version: tuple[int, int]


class Note(msgspec.Struct, kw_only=True):
    """The content of the `kvlink` string; `Layout` writes it."""

    version: tuple[int, int]
    header_crc32c: str
    request_id: str
    bundle: bool
    branches: list[Branch]
    digest: str
    digests: list[str]
    producer: dict[str, str]


_ENTRIES = msgspec.json.Decoder(dict[str, HeaderEntry])
_NOTE = msgspec.json.Decoder(Note)
_VERSION_ONLY = msgspec.json.Decoder(_VersionOnly)


class Header:
    """The content of a header with this JSON, in a payload of `total` bytes, completely checked."""

    def __init__(self, text: bytes, total: int):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise WireError(f"the header is not UTF-8: {error.reason}") from None
        self._text = text
        entries: dict[str, HeaderEntry] = _decode(text, _ENTRIES)
        metadata = entries.pop("__metadata__", HeaderEntry())
        if metadata.kvlink is msgspec.UNSET or metadata.dtype is not msgspec.UNSET:
            raise WireError("no kvlink manifest in __metadata__: another kind of safetensors file")
        self._note_json = metadata.kvlink.encode()
        version = _decode(self._note_json, _VERSION_ONLY).version
        if version[0] != VERSION[0]:
            raise VersionError(
                f"payload version {version[0]}.{version[1]}; this library reads {VERSION[0]}.x "
                f"(it writes {VERSION[0]}.{VERSION[1]}): use the same major version on both sides"
            )
        note: Note = _decode(self._note_json, _NOTE)
        at = text.find(_CRC_FIELD) + len(_CRC_FIELD)
        blank = text[:at] + _ZERO_CRC + text[at + 8 :]
        if at < len(_CRC_FIELD) or note.header_crc32c != f"{crc32c(blank):08x}":
            raise IntegrityError("the header's own digest does not match: its bytes were changed")
        self.note, self.tensors = note, _read_tensors(entries, note, 8 + len(text), total)
        if not note.request_id or len(note.request_id) > MAX_ID:
            raise WireError(f"a request id has 1 to {MAX_ID} characters")
        has_digests = any(spec.digest for spec in self.tensors)
        if note.digest != ("crc32c" if has_digests else "off"):
            raise WireError(f"digest algorithm {note.digest[:40]!r} does not go with the digests")
        check_branches(note.branches, bundle=note.bundle, error=WireError)
        _check_completeness(note.branches, self.tensors, has_digests=has_digests)

    def refuse_duplicates(self) -> None:
        """Refuse a key that occurs twice in one object of the header.

        The decoder keeps the last of two, another reader might keep the first.
        """
        try:
            for part in (self._text, self._note_json):  # len is cheap; the numbers are not used
                json.loads(part, object_pairs_hook=_refuse_twice, parse_int=len, parse_float=len)
        except (json.JSONDecodeError, RecursionError) as error:
            raise WireError(f"not a kvlink header: {error}") from None


def _decode(text: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    if what := excess(text):
        raise WireError(f"too much in the header: {what}")
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a kvlink header: {error}") from None


def excess(text: bytes) -> str:
    """Say what costs too much memory to decode, or "": one wide character widens its string."""
    if len(text) > MAX_HEADER // 2 and (b"\\u" in text or not text.isascii()):
        return f"with non-ASCII characters, {len(text)} bytes"
    return next((f"{mark!r}" for mark, most in MAX_MARKS.items() if text.count(mark) > most), "")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise WireError("a key occurs twice in one object of the header")


def list_tensors(tensors: Sequence[TensorSpec]) -> dict[str, HeaderEntry]:
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


def _read_tensors(
    entries: Mapping[str, HeaderEntry], note: Note, data: int, total: int
) -> tuple[TensorSpec, ...]:
    """Spans contiguous from 0 to the payload's end, each exactly as long as its shape says."""
    specs: list[TensorSpec] = []
    offset, digests = 0, note.digests
    for name, entry in entries.items():
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


def _check_completeness(
    branches: Sequence[Branch], tensors: Sequence[TensorSpec], *, has_digests: bool
) -> None:
    """Every tensor of every branch is there, in order; a cache's in the one shape and dtype."""
    specs = iter(tensors)
    for branch in branches:
        is_cache = branch.tree is None and branch.carries_tensors
        of_cache = (branch.code, branch.shape) if is_cache else ()
        for name in tensor_names(branch):
            spec = next(specs, None)
            if spec is None or spec.name != name:
                got = "nothing" if spec is None else repr(spec.name[:80])
                raise WireError(f"expected tensor {name[:80]!r}, found {got}")
            if is_cache and (spec.dtype, spec.shape) != of_cache:
                raise WireError(
                    f"tensor {name!r} is {spec.dtype} {list(spec.shape)}; "
                    f"its branch says {branch.code} {list(branch.shape)}"
                )
            digest = spec.digest
            width = 8 * -((spec.start - spec.stop) // DIGEST_CHUNK) if has_digests else 0
            if len(digest) != width or digest.strip("0123456789abcdef"):
                _refuse(name, f": its digest is not {width} hexadecimal digits")
    extra = next(specs, None)
    if extra is not None:
        raise WireError(f"tensor {extra.name[:80]!r} belongs to no branch")
