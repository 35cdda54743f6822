"""The payload's header: a manifest that is, byte for byte, a valid safetensors header.

A payload is `u64 header length | JSON header | tensor bytes without holes`
(https://github.com/huggingface/safetensors#format), the data starting on a 256-byte boundary.
What safetensors has no field for travels as one string in `__metadata__`, under the key `kvlink`.
No torch here: the header can be read, checked and refused without touching a payload byte.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn

import msgspec
from crc32c import crc32c

from ._version import __version__
from .branch import Branch, check_branches
from .errors import IntegrityError, SchemaError, VersionError, WireError

ALIGN = 256
"""Every tensor, and the data section itself, starts on a multiple of this many bytes."""
DIGEST_CHUNK = 1 << 20
"""One CRC-32C for each started MiB of a tensor, so that a mismatch can be localised."""
VERSION = (1, 0)
MAX_HEADER = 1 << 20
MAX_TENSORS = 4096
MAX_RANK = 8
_MOST = {mark: n * MAX_TENSORS for mark, n in ((b'"', 28), (b"{", 3), (b"[", 5), (b",", 40))}
"""How often a mark may stand in a header: bounds what decoding allocates."""
_CRC_ZERO = "0" * 8
_CRC_FIELD = b'header_crc32c\\":\\"'

ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
"""safetensors' dtype codes that a KV cache may have, with the bytes of one element."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the payload: `start` and `stop` count bytes from the data section's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str = ""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def chunk_digests(self) -> list[int]:
        """The CRC-32C of each started MiB; empty when the producer switched digests off."""
        return [int(self.digest[i : i + 8], 16) for i in range(0, len(self.digest), 8)]

    def where(self) -> str:
        """The tensor's place in words: branch, layer, K or V."""
        branch, layer, part = self.name.split(".")
        return f"branch {branch!r}, layer {layer}, {PART_WORDS[part]}"


PART_WORDS = {"key": "K", "value": "V", "latent": "latent"}
PARTS = {"NHD": ("key", "value"), "ND": ("latent",)}
"""A layer's tensors by layout: K and V of [tokens, heads, dim], or one latent of [tokens, dim]."""


class _Entry(msgspec.Struct):
    """One value of the header: a tensor, or (with only `kvlink` set) `__metadata__`."""

    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: tuple[Count, ...] = ()
    data_offsets: tuple[Count, Count] | msgspec.UnsetType = msgspec.UNSET
    kvlink: str | msgspec.UnsetType = msgspec.UNSET


class _Speaks(msgspec.Struct):
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
        return any(spec.digest for spec in self.tensors)

    @classmethod
    def lay_out(
        cls,
        request_id: str,
        branches: Sequence[Branch],
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        *,
        bundle: bool,
        digests: bool = True,
    ) -> Manifest:
        """Give each `(name, dtype code, shape)` its place, and the header its final length.

        Digests are placeholders of the right width until `with_digests`, so the header's length
        does not change when they become known.
        """
        specs, at = [], 0
        for name, dtype, shape in tensors:
            at = -(-at // ALIGN) * ALIGN
            size = math.prod(shape) * ITEMSIZE[dtype]
            blank = _CRC_ZERO * -(-size // DIGEST_CHUNK) if digests else ""
            specs.append(TensorSpec(name, dtype, shape, at, at + size, blank))
            at += size
        draft = cls(
            request_id=request_id,
            bundle=bundle,
            branches=tuple(branches),
            tensors=tuple(specs),
            header_nbytes=0,
            nbytes=0,
            producer={"library": __version__, "host": platform.node()},
        )
        header = draft.encode()
        if len(header) > 8 + MAX_HEADER or len(specs) > MAX_TENSORS or _excess(header):
            raise SchemaError(
                f"{len(specs)} tensors and a header of {len(header)} bytes; the limits are "
                f"{MAX_TENSORS} and {MAX_HEADER}, less where block_ids or extra hold many values"
            )
        return msgspec.structs.replace(draft, header_nbytes=len(header), nbytes=len(header) + at)

    def with_digests(self, digests: Sequence[str]) -> Manifest:
        """The same layout with the digests that the copier computed, one string a tensor."""
        tensors = tuple(
            msgspec.structs.replace(spec, digest=digest)
            for spec, digest in zip(self.tensors, digests, strict=True)
        )
        return msgspec.structs.replace(self, tensors=tensors)

    def branch(self, name: str) -> Branch:
        return next(branch for branch in self.branches if branch.name == name)

    def encode(self) -> bytes:
        """The payload's first `header_nbytes` bytes: length, JSON, and padding with spaces."""
        note = _Note(
            version=VERSION,
            header_crc32c=_CRC_ZERO,
            request_id=self.request_id,
            bundle=self.bundle,
            branches=list(self.branches),
            digest="crc32c" if self.has_digests else "off",
            digests=[spec.digest for spec in self.tensors],
            producer=self.producer,
        )
        text = _pad_header(_header_json(note, self.tensors))
        at = text.index(_CRC_FIELD) + len(_CRC_FIELD)
        text = text[:at] + b"%08x" % crc32c(text) + text[at + 8 :]
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def decode(cls, buffer: bytes | memoryview, nbytes: int | None = None) -> Manifest:
        """Read and completely validate a header.

        Args:
            buffer: the payload, or at least its header.
            nbytes: the payload's true size, when `buffer` is shorter than it.

        Raises:
            VersionError: another major version.
            IntegrityError: the header's own digest does not match.
            WireError: anything else that is not a payload of this library.
        """
        total = len(buffer) if nbytes is None else nbytes
        text = _header_text(buffer, total)
        entries = _decode(text, _ENTRIES)
        note_json = _kvlink_note(entries)
        _check_version(note_json)
        note = _decode(note_json, _NOTE)
        _check_header_digest(text, note.header_crc32c)
        manifest = cls(
            request_id=note.request_id,
            bundle=note.bundle,
            branches=tuple(note.branches),
            tensors=_tensor_specs(entries, len(text) + 8, total, note.digests),
            header_nbytes=len(text) + 8,
            nbytes=total,
            producer=note.producer,
        )
        _check_note(note, manifest)
        check_branches(manifest.branches, bundle=note.bundle, error=WireError)
        _check_completeness(manifest)
        _refuse_duplicates(text, note_json, _header_json(note, manifest.tensors))
        return manifest


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_NOTE = msgspec.json.Decoder(_Note)
_SPEAKS = msgspec.json.Decoder(_Speaks)


def tensor_name(branch: str, layer: int, part: str) -> str:
    return f"{branch}.{layer}.{part}"


def _header_json(note: _Note, tensors: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"kvlink": msgspec.json.encode(note).decode()}}
    at = pads = 0
    for spec in tensors:
        if spec.start > at:  # the format allows no holes
            entries[f"pad.{pads}"] = _Entry("U8", (spec.start - at,), (at, spec.start))
            pads += 1
        entries[spec.name] = _Entry(spec.dtype, spec.shape, (spec.start, spec.stop))
        at = spec.stop
    return msgspec.json.encode(entries)


def _pad_header(text: bytes) -> bytes:
    return text + b" " * (-(len(text) + 8) % ALIGN)


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
    return next((f"{mark!r}" for mark, most in _MOST.items() if text.count(mark) > most), "")


def _kvlink_note(entries: dict[str, _Entry]) -> bytes:
    note = entries.pop("__metadata__", _Entry())
    if note.kvlink is msgspec.UNSET or note.dtype is not msgspec.UNSET:
        raise WireError("no kvlink manifest in __metadata__: a safetensors file of another kind")
    return note.kvlink.encode()


def _check_version(note_json: bytes) -> None:
    theirs = _decode(note_json, _SPEAKS).version
    if theirs[0] != VERSION[0]:
        raise VersionError(
            f"payload version {theirs[0]}.{theirs[1]}; this library reads {VERSION[0]}.x "
            f"(it writes {VERSION[0]}.{VERSION[1]}): use the same major version on both sides"
        )


def _tensor_specs(
    entries: dict[str, _Entry], data: int, total: int, digests: Sequence[str]
) -> tuple[TensorSpec, ...]:
    """Spans contiguous from 0 to the payload's end, each exactly as long as its shape says."""
    specs: list[TensorSpec] = []
    at = 0
    for name, entry in entries.items():
        dtype, span = entry.dtype, entry.data_offsets
        if dtype is msgspec.UNSET or span is msgspec.UNSET or entry.kvlink is not msgspec.UNSET:
            _refuse(name, "lacks dtype or data_offsets")
        if dtype not in ITEMSIZE:
            _refuse(name, f"has dtype {dtype[:40]!r}, not one of {', '.join(ITEMSIZE)}")
        if len(entry.shape) > MAX_RANK:
            _refuse(name, f"has rank {len(entry.shape)}; the limit is {MAX_RANK}")
        size = math.prod(entry.shape) * ITEMSIZE[dtype]
        if span[0] != at or span[1] - span[0] != size:
            _refuse(name, f"spans {list(span)}; its shape wants [{at}, {at + size}]")
        if name.startswith("pad."):
            if dtype != "U8" or len(entry.shape) != 1 or size != -at % ALIGN or not size:
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


def _refuse_duplicates(text: bytes, note_json: bytes, again: bytes) -> None:
    """No key twice: the decoder keeps the last of two, another reader might keep the first.

    A header that encodes back to the same bytes has none. One that does not (a later minor
    version, another writer) is walked once more by a parser that shows every pair.
    """
    if _pad_header(again) == text:
        return
    try:
        for part in (text, note_json):  # len: nobody needs these numbers
            json.loads(part, object_pairs_hook=_refuse_twins, parse_int=len, parse_float=len)
    except (json.JSONDecodeError, RecursionError) as error:
        raise WireError(f"not a kvlink header: {error}") from None


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise WireError("a key stands twice in one object of the header")


def _check_header_digest(text: bytes, claimed: str) -> None:
    at = text.find(_CRC_FIELD) + len(_CRC_FIELD)
    blank = text[:at] + _CRC_ZERO.encode() + text[at + 8 :]
    if at < len(_CRC_FIELD) or claimed != f"{crc32c(blank):08x}":
        raise IntegrityError("the header's own digest does not match: its bytes were changed")


def _check_note(note: _Note, manifest: Manifest) -> None:
    if not note.request_id or len(note.request_id) > 1024:
        raise WireError("a request id has 1 to 1024 characters")
    if note.digest != ("crc32c" if manifest.has_digests else "off"):
        raise WireError(f"digest algorithm {note.digest[:40]!r} does not go with the digests")


def _check_completeness(manifest: Manifest) -> None:
    """Every layer of every branch is there, in order, in the branch's one shape and dtype."""
    specs = iter(manifest.tensors)
    has_digests = manifest.has_digests
    for branch in manifest.branches:
        for layer in range(branch.num_layers if branch.carries_tensors else 0):
            for part in PARTS[branch.layout]:
                spec = next(specs, None)
                want = tensor_name(branch.name, layer, part)
                if spec is None or spec.name != want:
                    got = "nothing" if spec is None else repr(spec.name[:80])
                    raise WireError(f"expected tensor {want!r}, found {got}")
                if (spec.dtype, spec.shape) != (branch.code, branch.shape):
                    raise WireError(
                        f"tensor {want!r} is {spec.dtype} {list(spec.shape)}; "
                        f"its branch says {branch.code} {list(branch.shape)}"
                    )
                _check_digest_width(spec, expected=has_digests)
    extra = next(specs, None)
    if extra is not None:
        raise WireError(f"tensor {extra.name[:80]!r} belongs to no branch")


def _check_digest_width(spec: TensorSpec, *, expected: bool) -> None:
    width = 8 * -(-spec.nbytes // DIGEST_CHUNK) if expected else 0
    if len(spec.digest) != width or spec.digest.strip("0123456789abcdef"):
        raise WireError(f"tensor {spec.name!r}: its digest is not {width} hexadecimal digits")
