"""The payload's header: a manifest that is, byte for byte, a valid safetensors header.

A payload is `u64 header length | JSON header | tensor bytes without holes`
(https://github.com/huggingface/safetensors#format), the data starting on a 256-byte boundary.
What safetensors has no field for travels as one string in `__metadata__`, under the key `kvlink`.
No torch here: the header can be read, checked and refused without touching a payload byte.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import msgspec

from omni_kvlink._version import __version__
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.payload.branch import Branch, check_branches, leaf_paths
from omni_kvlink.payload.header import (
    ALIGN,
    CRC_ZERO,
    KV_VERSION,
    MAX_HEADER,
    MAX_TENSORS,
    VERSION,
    Entry,
    Header,
    Note,
    excess,
    write_header,
)

DIGEST_CHUNK = 1 << 20
"""One CRC-32C for each started MiB of a tensor, so that a mismatch can be localised."""
MAX_RANK = 8
MAX_PAD_TEXT = 100
"""Bytes of a header that one `pad.N` entry takes at most."""
SLACK = 4096
"""Bytes of a header kept for metadata that is not known yet."""
ITEMSIZE = {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
"""safetensors' dtype codes, with the bytes of one element."""


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
        """How errors name the tensor: by branch, layer, K or V, or by branch and path."""
        branch, is_path, path = self.name.partition("/")
        if is_path:
            return f"branch {branch!r}, tensor {path[:80]!r}"
        branch, layer, part = self.name.split(".")
        return f"branch {branch!r}, layer {layer}, {PART_WORDS[part]}"


PART_WORDS = {"key": "K", "value": "V", "latent": "latent"}
PARTS = {"NHD": ("key", "value"), "ND": ("latent",)}
"""A layer's tensors by layout: K and V of [tokens, heads, dim], or one latent of [tokens, dim]."""


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
        capacity: Manifest | None = None,
    ) -> Manifest:
        """Give each `(name, dtype code, shape)` its place, and the header its final length.

        Digests are placeholders of the right width until `with_digests`, so the header's length
        does not change when they become known.

        Args:
            room: a plan made by `with_room`, whose places and whose header's length are kept.

        Raises:
            SchemaError: too much for a header, or more than there is room for.
        """
        specs, at = [], 0
        places = {} if capacity is None else {spec.name: spec for spec in capacity.tensors}
        for name, dtype, shape in tensors:
            size = math.prod(shape) * ITEMSIZE[dtype]
            at = -(-at // ALIGN) * ALIGN if capacity is None else _place(places, name, size, at)
            blank = CRC_ZERO * -(-size // DIGEST_CHUNK) if digests else ""
            specs.append(TensorSpec(name, dtype, shape, at, at + size, blank))
            at += size
        draft = cls(
            request_id=request_id,
            bundle=bundle,
            branches=tuple(branches),
            tensors=tuple(specs),
            header_nbytes=0 if capacity is None else capacity.header_nbytes,
            nbytes=0,
            producer={"library": __version__, "host": platform.node()},
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
        return msgspec.structs.replace(draft, header_nbytes=len(header), nbytes=len(header) + at)

    def with_room(self) -> Manifest:
        """The plan of a payload whose tensors may turn out smaller, its metadata other numbers."""
        text = self.header_nbytes + MAX_PAD_TEXT * len(self.tensors) + SLACK
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

    def branch(self, name: str) -> Branch:
        return next(branch for branch in self.branches if branch.name == name)

    def tensors_of(self, branch: Branch) -> tuple[TensorSpec, ...]:
        """The tensors that one branch carries, layer by layer."""
        numbers = self._numbers(branch)
        return self.tensors[numbers.start : numbers.stop]

    def layers(self) -> list[tuple[Branch, int, range]]:
        """Every layer that carries tensors, in the order of the wire: branch, index, numbers.

        Each tensor of a `TensorTransferData` counts as a layer of its own.
        """
        found = []
        for branch in self.branches:
            parts = len(PARTS[branch.layout]) if branch.tree is None else 1
            numbers = self._numbers(branch)
            for layer, first in enumerate(numbers[::parts]):
                found.append((branch, layer, range(first, first + parts)))
        return found

    def part(self, numbers: range) -> Manifest:
        """The same payload, but of its tensors only those of a layer."""
        return self.only(self.tensors[numbers.start : numbers.stop])

    def only(self, tensors: Iterable[TensorSpec]) -> Manifest:
        """The same payload, but of its tensors only these."""
        return msgspec.structs.replace(self, tensors=tuple(tensors))

    def _numbers(self, branch: Branch) -> range:
        start = 0
        for other in self.branches:
            if other.tree is not None:
                count = sum(1 for _ in leaf_paths(other.tree))
            else:
                count = len(PARTS[other.layout]) * other.num_layers if other.carries_tensors else 0
            if other is branch:
                return range(start, start + count)
            start += count
        raise KeyError(branch.name)

    def encode(self) -> bytes:
        """The payload's first `header_nbytes` bytes: length, JSON, and padding with spaces."""
        note = Note(
            version=KV_VERSION if all(b.tree is None for b in self.branches) else VERSION,
            header_crc32c=CRC_ZERO,
            request_id=self.request_id,
            bundle=self.bundle,
            branches=list(self.branches),
            digest="crc32c" if self.has_digests else "off",
            digests=[spec.digest for spec in self.tensors],
            producer=self.producer,
        )
        return write_header(note, _entries(self.tensors), self.header_nbytes)

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
        header = Header(buffer, total)
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
        _check_note(note, manifest)
        check_branches(manifest.branches, bundle=note.bundle, error=WireError)
        _check_completeness(manifest)
        header.refuse_duplicates()
        return manifest


def kind_of(manifest: Manifest) -> str:
    """The class that was put: KVCacheTransferData, TensorTransferData or KVCacheBundle."""
    if manifest.bundle:
        return "KVCacheBundle"
    return "KVCacheTransferData" if manifest.branches[0].tree is None else "TensorTransferData"


def _place(places: dict[str, TensorSpec], name: str, nbytes: int, at: int) -> int:
    """Where a tensor lies in memory that was allocated for it."""
    spec = places.get(name)
    if spec is None:
        raise SchemaError(f"nothing was allocated for tensor {name!r}")
    if nbytes > spec.nbytes:
        raise SchemaError(f"{spec.where()}: {nbytes} bytes, allocated were {spec.nbytes}")
    if spec.start < at:
        raise SchemaError(f"{spec.where()}: the branches were allocated in another order")
    return spec.start


def tensor_name(branch: str, layer: int, part: str) -> str:
    """The name of a cache's tensor in the header."""
    return f"{branch}.{layer}.{part}"


def tensor_names(branch: Branch) -> Iterator[str]:
    """The name of each tensor that a branch carries, in the order of the wire."""
    if branch.tree is not None:
        yield from (branch.name + path for path in leaf_paths(branch.tree))
    elif branch.carries_tensors:
        for layer in range(branch.num_layers):
            for part in PARTS[branch.layout]:
                yield tensor_name(branch.name, layer, part)


def _entries(tensors: Sequence[TensorSpec]) -> dict[str, Entry]:
    """The tensors as the header lists them, with padding between: the format allows no holes."""
    entries: dict[str, Entry] = {}
    at = pads = 0
    for spec in tensors:
        if spec.start > at:
            entries[f"pad.{pads}"] = Entry("U8", (spec.start - at,), (at, spec.start))
            pads += 1
        entries[spec.name] = Entry(spec.dtype, spec.shape, (spec.start, spec.stop))
        at = spec.stop
    return entries


def _tensor_specs(header: Header, total: int) -> tuple[TensorSpec, ...]:
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
            _refuse(name, f"spans {list(span)}; its shape wants [{at}, {at + size}]")
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


def _check_note(note: Note, manifest: Manifest) -> None:
    if not note.request_id or len(note.request_id) > 1024:
        raise WireError("a request id has 1 to 1024 characters")
    if note.digest != ("crc32c" if manifest.has_digests else "off"):
        raise WireError(f"digest algorithm {note.digest[:40]!r} does not go with the digests")


def _check_completeness(manifest: Manifest) -> None:
    """Every layer of every branch is there, in order, in the branch's one shape and dtype."""
    specs = iter(manifest.tensors)
    has_digests = manifest.has_digests
    for branch in manifest.branches:
        for want in tensor_names(branch):
            spec = next(specs, None)
            if spec is None or spec.name != want:
                got = "nothing" if spec is None else repr(spec.name[:80])
                raise WireError(f"expected tensor {want[:80]!r}, found {got}")
            if branch.tree is None and (spec.dtype, spec.shape) != (branch.code, branch.shape):
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
        raise WireError(f"tensor {spec.name[:80]!r}: its digest is not {width} hexadecimal digits")
