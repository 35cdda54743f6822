"""Binding of the native library, whose C interface is described in `csrc/kvlink.h`.

The library is loaded at first use; if there is none, `missing()` says why and what helps, and the
rest of the package works without it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_kvlink._native import crc32c as fallback
from omni_kvlink._native import dlpack
from omni_kvlink._native.loader import CompiledPart
from omni_kvlink.errors import NativeError
from omni_kvlink.system.waits import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence
ABI = 9
DIMS = 4
"""Dimensions of a view above its contiguous run."""
CHUNK = 1 << 20
NO_DIGEST = -1
AUTO, STREAM = 0, 2  # enum kvl_stores
LARGE = 8 << 20
"""Bytes above which AUTO stores past the cache."""
SMALL = 64 << 10
"""Bytes up to which a call keeps the GIL: to get it back from another thread takes longer."""
LIBRARY = "_kvlink.so"
ENVIRONMENT = "OMNI_KVLINK_FEATURES"
"""Environment variable that forces an instruction set, as `features` names it."""

CURE = "install a C++17 compiler (or set CXX) and reinstall omni-kvlink"
DEADLINE, UNSUPPORTED, DIGEST, BOUNDS, OVERLAP, ARGUMENT = 7, 6, 4, 2, 3, 1  # enum kvl_status

PackedView = tuple[int, ...]
"""A `kvl_view` as 16 integers, made by `packed_view`; empty for a tensor it cannot describe."""
_ONES, _ZEROS = (1,) * DIMS, (0,) * DIMS
_LAST_SECOND = 1e9
"""A moment of the monotonic clock, after 30 years of a machine: a later deadline is none."""
_FLAT = (*_ONES, *_ZEROS, 0, 0, 1, 0)
_VIEW, _SPAN = 16, 3
_SWAPS = sys.byteorder == "little"
"""Whether digests, which travel big-endian, have another byte order here."""


class _CopyOptions(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("threads", "stores", "deadline"))


class Report(ctypes.Structure):
    """A `kvl_report`, of the call that failed."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("copy", "chunk", "threads"))


class _Layout(ctypes.Structure):
    _fields_ = (
        *(("before", ctypes.c_char_p), ("before_nbytes", ctypes.c_uint64)),
        ("crc", ctypes.c_uint64),
        *(("after", ctypes.c_char_p), ("after_nbytes", ctypes.c_uint64)),
        *(("digests", ctypes.c_uint64), ("digests_nbytes", ctypes.c_uint64)),
        *(("pieces", ctypes.c_void_p), ("count", ctypes.c_uint64)),
    )


class CopyFailed(NativeError):
    """A call of the library failed; `status` is a `kvl_status`."""

    def __init__(self, message: str, status: int, report: Report):
        super().__init__(message)
        self.status = status
        self.copy: int = report.copy  # index of the copy concerned
        self.chunk: int = report.chunk  # MiB of that copy


def packed_flat_view(base: int, nbytes: int) -> PackedView:
    """Pack a view of contiguous bytes at address `base`."""
    return (base, nbytes, 0, nbytes, *_FLAT)


def packed_view(
    base: int,
    extent: int,
    run: int,
    *,
    offset: int = 0,
    sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> PackedView:
    """Pack a view of contiguous runs of `run` bytes in the `extent` bytes at address `base`.

    The first run is at `base + offset`. `sizes` and `strides` are the runs in each dimension and
    the bytes between them, outermost first, at most `DIMS`. The library checks it against `extent`.
    """
    pad = DIMS - len(sizes)
    dims = (*_ONES[:pad], *sizes, *_ZEROS[:pad], *strides)
    return (base, extent, offset, run, *dims, 0, 0, 1, 0)


def packed_indexed_view(
    view: PackedView, index: int, *, limit: int, split: int = 1, stride: int = 0
) -> PackedView:
    """Return `view` with its first dimension looked up in the int64 array at address `index`.

    A block has `split` entries, `stride` bytes apart; all must be below `limit`. See `kvl_view`.
    """
    return (*view[:12], index, limit, split, stride)


def packed_view_at(template: PackedView, base: int, extent: int, *, index: int) -> PackedView:
    """Return an indexed view with the sizes and strides of `template`, at other addresses."""
    return (base, extent, *template[2:12], index, *template[13:])


class CopyBatch:
    """The copies of one call between views and one payload, packed as an array of C structs.

    The memory at all addresses must stay valid until the call has returned. `threads=0` chooses
    the number of copying threads; `stores` is `AUTO` or `STREAM`. Calls that have not finished at
    the `deadline` (`time.monotonic`), which is looked at every few MiB, fail with `DEADLINE`.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        threads: int = 0,
        stores: int = 0,
        deadline: float = NEVER,
    ):
        self._payload = address, nbytes
        nanoseconds = 0 if deadline >= _LAST_SECOND else max(1, int(deadline * 1e9))
        self._options = _CopyOptions(threads, stores, nanoseconds)
        self._views: list[int] = []
        self._spans: list[int] = []
        self._count = self._num_digests = 0
        self.report = Report()

    def __len__(self) -> int:
        return self._count

    def add(self, start: int, nbytes: int, view: PackedView = (), *, digest: bool) -> None:
        """Add the tensor at byte `start` of the payload; with `digest`, also its digests.

        `view` is the tensor outside the payload; `gather` and `scatter` require it.
        """
        span = (start, nbytes, self._num_digests if digest else NO_DIGEST)
        if view:
            self._views += view
            self._views += span
        self._spans += span
        self._count += 1
        if digest:
            self._num_digests += -(-nbytes // CHUNK)

    def gather(self) -> bytes:
        """Copy the views into the payload; return all digests, 4 bytes each."""
        return self._call("kvl_gather", self._copies())

    def digest(self) -> bytes:
        """Return the digests of the bytes in the payload."""
        return self._call("kvl_digest", self._spans)

    def scatter(self, digests: bytes) -> None:
        """Copy the payload into the views and compare it with `digests`."""
        self._call("kvl_scatter", self._copies(), digests)

    def verify(self, digests: bytes) -> None:
        """Compare the bytes in the payload with `digests`."""
        self._call("kvl_verify", self._spans, digests)

    def error(self, failed: CopyFailed) -> Exception:
        """Return the error to raise when the library has failed; subclasses name the tensor."""
        return failed

    def _copies(self) -> list[int]:
        if len(self._views) != self._count * (_VIEW + _SPAN):
            raise ValueError("a copy without a view")
        return self._views

    def _call(self, name: str, entries: list[int], expected: bytes | None = None) -> bytes:
        """Call the library, with the digests to compare with, if any; return all digests."""
        digests = array("I", bytes(4 * self._num_digests) if expected is None else expected)
        if _SWAPS:
            digests.byteswap()
        if len(digests) != self._num_digests:
            raise ValueError(f"{len(digests)} digests for {self._num_digests} chunks")
        library, packed = _load(), array("q", entries)
        calls = _held if self._payload[1] <= SMALL else library
        status = getattr(calls, name)(
            *self._payload,
            packed.buffer_info()[0] if packed else None,
            self._count,
            digests.buffer_info()[0] if digests else None,
            len(digests),
            ctypes.byref(self._options),
            ctypes.byref(self.report),
        )
        if status:
            raise self.error(CopyFailed(_last_error(library), status, self.report)) from None
        if _SWAPS:
            digests.byteswap()
        return digests.tobytes()


def gather_dense(
    address: int, nbytes: int, start: int, source: int, length: int, *, digest: bool
) -> int:
    """Copy `length` bytes at address `source` to byte `start` of the payload at `address`.

    Returns their CRC-32C, 0 without `digest`, or a negative number if the library refused: then
    `CopyBatch.gather` says why. With a digest, it copies no more than `CHUNK` bytes.
    """
    library = _load()
    calls = _held if nbytes <= SMALL else library
    crc: int = calls.kvl_gather_dense(address, nbytes, start, source, length, digest)
    return crc


class PackedLayout:
    """A `kvl_layout`: what the headers of one layout have in common, and the layout's tensors.

    Args:
        before: the text before the request id, with zeros for the eight digits of its CRC.
        crc: where these are.
        after: the text after the request id, with zeros for the digits of the digests.
        digests: where the list of digests is, and its length.
        pieces: of each tensor its start behind the header, its bytes, where the eight digits of its
            digest are in `after` (`NO_DIGEST`: it has none), and code and bits of its DLDataType.
        shapes: of each tensor.

    Attributes:
        sizes: bytes of each tensor.
        itemsizes: bytes of an element of each.
    """

    def __init__(
        self,
        before: bytes,
        crc: int,
        after: bytes,
        digests: tuple[int, int],
        pieces: Sequence[tuple[int, int, int, tuple[int, int]]],
        shapes: Sequence[tuple[int, ...]],
    ):
        sizes = {shape: array("q", shape) for shape in set(shapes)}  # those of a cache are one
        ranks = {shape: (len(shape), size.buffer_info()[0]) for shape, size in sizes.items()}
        self._sizes = [sizes[shape] for shape in shapes]
        rows = [
            (start, length, digest, code | bits << 8 | 1 << 16, *ranks[shape])
            for (start, length, digest, (code, bits)), shape in zip(pieces, shapes, strict=True)
        ]
        self._pieces = array("q", chain.from_iterable(rows))
        self.sizes = [length for _, length, *_ in pieces]
        self.itemsizes = [bits // 8 for *_, (_, bits) in pieces]
        self._addresses = struct.Struct(f"{len(pieces)}P")
        self._text = before, crc, after, digests
        self._write()

    def _write(self) -> None:
        before, crc, after, digests = self._text
        text = before, len(before), crc, after, len(after), *digests
        count = len(self.sizes)
        address = self._pieces.buffer_info()[0] if count else None
        self._struct = _Layout(*text, address, count)
        self._address = ctypes.addressof(self._struct)

    def with_text(self, at: int, text: bytes) -> PackedLayout:
        """The same layout, in whose `after` this text replaces as many bytes."""
        before, crc, after, digests = self._text
        other = PackedLayout.__new__(PackedLayout)
        vars(other).update(vars(self))
        other._text = before, crc, after[:at] + text + after[at + len(text) :], digests
        other._write()
        return other

    def pack(self, nbytes: int, header_nbytes: int, quoted_id: bytes, sources: list[int]) -> bytes:
        """Put a small payload of `nbytes` together: its header, and tensors from `sources`.

        Those are addresses of contiguous bytes. NativeError (`CopyFailed`) if the payload does not
        fit into `nbytes`, or the header into `header_nbytes`.
        """
        payload = bytes(nbytes)  # nobody else has it while the library writes to it
        addresses = self._addresses.pack(*sources)
        calls = _held if nbytes <= SMALL else _load()
        status = calls.kvl_pack(
            payload, nbytes, header_nbytes, self._address, quoted_id, len(quoted_id), addresses
        )
        if status:
            raise CopyFailed(_last_error(_load()), status, Report())
        return payload

    def pack_tensors(
        self,
        payload: bytes | int,
        nbytes: int,
        header_nbytes: int,
        request_id: bytes,
        objects: Sequence[object],
        describe: int,
    ) -> bool:
        """Do what `pack` does with tensors as objects, which `describe` describes.

        The payload is new bytes that nobody else has, or the address of `nbytes`. `describe` is an
        address of `dlpack.describer_of`. False, and nothing is written, unless all are contiguous
        tensors of the layout's dtypes and shapes on the host, and JSON writes the request id as it
        is. RuntimeError if one cannot be described.
        """
        if len(objects) != len(self._sizes):
            return False
        addresses = self._addresses.pack(*map(id, objects))
        failed = _held.kvl_pack_tensors(
            *(payload, nbytes, header_nbytes, self._address),
            *(request_id, len(request_id), addresses, describe),
        )
        return not failed

    def make_views(
        self, data: int, nbytes: int, numbers: range, owner: object, make: int
    ) -> list[Any]:
        """The tensors with these numbers as views of the `nbytes` at address `data`.

        There the header ends. Each view keeps `owner`, which keeps the memory. `make` is an address
        of `dlpack.maker_of`; RuntimeError if it cannot make one.
        NativeError if a tensor does not lie in these bytes.
        """
        views = [None] * len(numbers)
        span = numbers.start, len(numbers)
        if _held.kvl_make_views(data, nbytes, self._address, *span, owner, views, make):
            raise NativeError(_last_error(_load()))
        return views

    def open(
        self, address: int, sizes: tuple[int, int], request_id: bytes, owner: object, make: int
    ) -> list[Any] | None:
        """All tensors of a payload at `address` as views, as of `make_views`; checked as `match`.

        `sizes` are the bytes of the payload, and of its header. None if the header is not of this
        length, layout and request id. The caller has the memory alone.
        """
        views: list[Any] = [None] * len(self.sizes)
        failed = _held.kvl_open(
            *(address, *sizes, self._address, request_id, len(request_id), owner, views, make)
        )
        if failed == UNSUPPORTED:
            return None
        if failed:
            raise NativeError(_last_error(_load()))
        return views

    def match(self, text: bytes) -> int:
        """Compare a header's JSON with the layout and its own CRC; characters of its request id.

        0 if it is another layout's or damaged, or if its request id is not simple.
        """
        library = _load()
        calls = _held if len(text) <= SMALL else library
        length: int = calls.kvl_match(text, len(text), self._address)
        return length

    def is_packed(
        self, address: int, nbytes: int, header_nbytes: int, quoted_id: bytes, *, digests: bool
    ) -> bool:
        """Whether the header of a payload at `address` is as `pack` writes it.

        With `digests` also whether its tensors are as their digests say. Tensors without one are
        not compared, and of those of more than `CHUNK` bytes it knows nothing: False then.
        """
        calls = _held if nbytes <= SMALL else _load()
        result: int = calls.kvl_is_packed(
            address, nbytes, header_nbytes, self._address, quoted_id, len(quoted_id), digests
        )
        return bool(result)


def crc32c(data: fallback.Bytes, crc: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes, continued from that of the bytes before them."""
    if type(data) is bytes and len(data) <= SMALL and _part.loaded is not None:
        header: int = _held.kvl_crc32c(crc, data, len(data))  # of each small payload, twice
        return header
    if _part.loaded is None and missing() is not None:
        return fallback.crc32c(data, crc)
    library = _load()
    nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
    calls = _held if nbytes <= SMALL else library
    pointer = data if type(data) is bytes else np.frombuffer(data, np.uint8).ctypes.data
    result: int = calls.kvl_crc32c(crc, pointer, nbytes)
    return result


def features() -> str:
    """Return the instruction set in use: avx512+clmul, avx512, avx2, neon or portable."""
    global _features
    if not _features:
        _features = str(_load().kvl_features(), "ascii")
    return _features


def select(name: str) -> None:
    """Select an instruction set by name, or the best one with "auto"; NativeError if unknown."""
    _select(_load(), name)


def _declare(library: ctypes.CDLL) -> int:
    global _held
    version: int = library.kvl_version()
    library.kvl_features.restype = ctypes.c_char_p
    library.kvl_last_error.restype = ctypes.c_char_p
    _held = ctypes.PyDLL(library._name, handle=library._handle)
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    structs = ctypes.POINTER(_CopyOptions), ctypes.POINTER(Report)
    for calls in (library, _held):
        for name in ("kvl_gather", "kvl_scatter", "kvl_digest", "kvl_verify"):
            call = getattr(calls, name)  # AttributeError: another library
            call.argtypes = (pointer, number, pointer, number, pointer, number, *structs)
        calls.kvl_gather_dense.argtypes = (pointer, number, number, pointer, number, ctypes.c_int)
        calls.kvl_gather_dense.restype = ctypes.c_int64
        calls.kvl_pack.argtypes = (pointer, number, number, pointer, pointer, number, pointer)
        calls.kvl_pack_tensors.argtypes = (
            *(pointer, number, number, pointer, pointer, number, pointer, pointer),
        )
        calls.kvl_make_views.argtypes = (
            *(pointer, number, pointer, number, number),
            *(ctypes.py_object, ctypes.py_object, pointer),
        )
        calls.kvl_open.argtypes = (
            *(pointer, number, number, pointer, pointer, number),
            *(ctypes.py_object, ctypes.py_object, pointer),
        )
        calls.kvl_match.argtypes = (pointer, number, pointer)
        calls.kvl_match.restype = number
        calls.kvl_is_packed.argtypes = (
            *(pointer, number, number, pointer, pointer, number, ctypes.c_int),
        )
        calls.kvl_crc32c.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64)
        calls.kvl_crc32c.restype = ctypes.c_uint32
    if sys.implementation.name == "cpython":
        library.kvl_set_interpreter(ctypes.byref(dlpack.Interpreter.current()))
    _ = library.kvl_select
    forced = os.environ.get(ENVIRONMENT)
    if forced and version == ABI:
        _select(library, forced)
    return version


_held = ctypes.PyDLL(None)  # the library's functions, called with the GIL, once it is loaded
_features = ""  # as the library last told; a call of it costs a small copy more than this
_part = CompiledPart("compiled part", LIBRARY, ABI, CURE, _declare)
missing = _part.missing


def is_loaded() -> bool:
    """Whether the library has been loaded; a call of `crc32c` loads it, if there is one."""
    return _part.loaded is not None


def _load() -> ctypes.CDLL:
    # Without a call once it is loaded: this is in every copy's path.
    return _part.loaded or _part.load()


def _select(library: ctypes.CDLL, name: str) -> None:
    global _features
    failed = library.kvl_select(name.encode())
    _features = ""  # after the call: another thread may have asked meanwhile
    if failed:
        raise NativeError(f"{_last_error(library)}; selected by {ENVIRONMENT} or select()")


def _last_error(library: ctypes.CDLL) -> str:
    return str(library.kvl_last_error(), errors="replace")


def big_endian(digests: array[int]) -> array[int]:
    """Convert digests between this machine's byte order and big-endian, in place."""
    if _SWAPS:
        digests.byteswap()
    return digests
