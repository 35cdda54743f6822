"""`HeaderTemplate`: the header of all payloads of one layout, encoded once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from omni_kvlink._native import host
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.dtypes import DLPACK
from omni_kvlink.payload.format import ALIGN, KV_VERSION, MAX_MARKS, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.payload.branches import Branch
    from omni_kvlink.payload.header import HeaderEntry

MAX_SMALL = 64 << 10
"""Bytes of a header up to which its template may be kept."""
MAX_ID = 1024
"""Characters of a request id."""
_MAX_ID_TEXT = 8 * MAX_ID
"""Bytes of a request id in a header: a control character takes seven."""
_HEAD = '{"version":[%d,%d],"header_crc32c":"'
_CRC = 8
_AFTER_CRC = b'\\",\\"request_id\\":'
_SIMPLE_ID = "[A-Za-z0-9_.:/@+=,-]{1,1024}"
"""Request ids that JSON writes as they are."""
_IS_SIMPLE = re.compile(_SIMPLE_ID)
_WITH_ID = re.compile(re.escape(_AFTER_CRC) + rb'\\"(%b)\\"' % _SIMPLE_ID.encode())
_SCARCE = {mark: most for mark, most in MAX_MARKS.items() if most < MAX_SMALL}
_OPEN = b'\\"'
SIMPLE_QUOTES = 2 * len(_OPEN)
"""Bytes that `quote_id` adds to a request id that JSON writes as it is."""
_COMMA = '\\",\\"'
_ZEROS = bytes.maketrans(b"123456789abcdef", b"0" * 15)


class HeaderTemplate:
    """The header of a layout as bytes around its CRC, the request id and the digests.

    Made from the fields in the order in which they are written, not from an encoded header: a
    request id, or `extra`, may hold text that looks like a field.

    Args:
        bundle: whether the payload is a bundle.
        branches: all branches of the payload.
        producer: who writes the header.
        entries: the tensors and the padding between them.
        tensors: start and stop in the data section, dtype code and shape of each tensor.
        digests: one string a tensor; those of all payloads of the layout are as long.
    """

    def __init__(
        self,
        *,
        bundle: bool,
        branches: Sequence[Branch],
        producer: Mapping[str, str],
        entries: Mapping[str, HeaderEntry],
        tensors: Sequence[tuple[int, int, str, tuple[int, ...]]],
        digests: Sequence[str],
    ):
        version = KV_VERSION if all(branch.tree is None for branch in branches) else VERSION
        algorithm = "crc32c" if any(digests) else "off"
        self._head = _head(version)
        self._middle = _quoted(
            b',"bundle":%b,"branches":%b,"digest":"%b","digests":['
            % (*map(msgspec.json.encode, (bundle, branches)), algorithm.encode())
        )
        self._blank = _digest_list(digests).translate(_ZEROS)
        listed = b"," + msgspec.json.encode(entries)[1:] if entries else b"}"
        self._tail = _quoted(b'],"producer":%b}' % msgspec.json.encode(producer)) + b'"}' + listed
        self._head_crc = host.crc32c(self._head + b"0" * _CRC)
        self._at_id = len(self._head) + _CRC + len(_AFTER_CRC)
        self._ends = len(self._middle), len(self._blank), len(self._tail)
        parts = (self._head, _AFTER_CRC, self._middle, self._blank, self._tail)
        self._fixed = 8 + _CRC + sum(map(len, parts))
        self._tensors = tensors
        self._packed: host.PackedLayout | None = None

    @property
    def packed(self) -> host.PackedLayout | None:
        """The layout as the native library takes it; None if there is no library. Made once."""
        if not host.is_loaded():  # `__init__` has loaded it, if there is one
            return None
        if self._packed is None:
            pieces, at = [], len(self._middle) + len(_OPEN)
            for tensor, blank in zip(self._tensors, self.blank_digests, strict=True):
                start, stop, code, _ = tensor
                digest = at if blank else host.NO_DIGEST
                pieces.append((start, stop - start, digest, DLPACK[code]))
                at += len(blank) + len(_COMMA)
            self._packed = host.PackedLayout(
                before=self._head + b"0" * _CRC + _AFTER_CRC,
                crc=len(self._head),
                after=self._middle + self._blank + self._tail,
                digests=(len(self._middle), len(self._blank)),
                pieces=pieces,
                shapes=[shape for *_, shape in self._tensors],
            )
        return self._packed

    @property
    def is_small(self) -> bool:
        """Whether it may be kept: no request id brings such a header near a limit."""
        text = self._middle + self._tail
        return self._fixed + _MAX_ID_TEXT <= MAX_SMALL and all(
            text.count(mark) + _MAX_ID_TEXT <= most for mark, most in _SCARCE.items()
        )

    @property
    def blank_digests(self) -> list[str]:
        """A digest for each tensor, all its digits zero."""
        return _digests(self._blank)

    def header_nbytes(self, quoted_nbytes: int) -> int:
        """Bytes of the header whose request id has `quoted_nbytes` bytes after `quote_id`."""
        return -(-(self._fixed + quoted_nbytes) // ALIGN) * ALIGN

    def render(self, request_id: str, digests: Sequence[str], nbytes: int = 0) -> bytes:
        """Return the header: length, JSON, and spaces up to the alignment and `nbytes` at least.

        SchemaError if the digests are not of the layout's widths, in lower case.
        """
        listed = _digest_list(digests)
        if listed.translate(_ZEROS) != self._blank:
            raise SchemaError("digests of other widths than the payload's tensors have")
        quoted = quote_id(request_id)
        size = self._fixed + len(quoted)
        length = max(size + -size % ALIGN, nbytes) - 8
        rest = b"".join((_AFTER_CRC, quoted, self._middle, listed, self._tail))
        rest = rest.ljust(length - len(self._head) - _CRC)
        crc = b"%08x" % host.crc32c(rest, self._head_crc)
        return b"".join((length.to_bytes(8, "little"), self._head, crc, rest))

    def match(self, text: bytes) -> str:
        """The request id with which `render` makes this JSON with its padding; "" if none does.

        Every byte is compared, and the CRC. "" also for a request id that is not simple: the
        decoder of all headers reads those.
        """
        packed, start = self.packed, self._at_id + len(_OPEN)
        length = self._match(text) if packed is None else packed.match(text)
        return text[start : start + length].decode()

    def digests(self, request_id: str, text: bytes) -> list[str]:
        """The digests in a header's JSON, of which `match` has returned this request id."""
        first = self._at_id + len(request_id) + SIMPLE_QUOTES + len(self._middle)
        return _digests(text[first : first + len(self._blank)])

    def _match(self, text: bytes) -> int:
        """Match a header as the native library does: `host.PackedLayout.match`."""
        found = _WITH_ID.match(text, self._at_id - len(_AFTER_CRC))
        if found is None:
            return 0
        middle, blank, tail = self._ends
        start, at = found.span()
        first = at + middle
        last = first + blank
        end, listed = last + tail, text[first:last]
        if text[at:first] != self._middle or text[last:end] != self._tail:
            return 0
        if text[: start - _CRC] != self._head or listed.translate(_ZEROS) != self._blank:
            return 0
        if text[end:].strip(b" "):
            return 0
        if text[start - _CRC : start] != b"%08x" % host.crc32c(text[start:], self._head_crc):
            return 0
        return len(found[1])


def is_simple(request_id: str) -> bool:
    """Whether `match` finds this request id."""
    return _IS_SIMPLE.fullmatch(request_id) is not None


def _quoted(part: bytes) -> bytes:
    """Part of the manifest's JSON as it stands in the header: inside a string of JSON."""
    return msgspec.json.encode(part.decode())[1:-1]


def _head(version: tuple[int, int]) -> bytes:
    return b'{"__metadata__":{"kvlink":"' + _quoted((_HEAD % version).encode())


def quote_id(request_id: str) -> bytes:
    """The request id as it stands in a header."""
    if _IS_SIMPLE.fullmatch(request_id):
        return b'\\"%b\\"' % request_id.encode()
    return _quoted(msgspec.json.encode(request_id))


def _digests(listed: bytes) -> list[str]:
    return listed[2:-2].decode().split(_COMMA) if listed else []


def _digest_list(digests: Sequence[str]) -> bytes:
    return f'\\"{_COMMA.join(digests)}\\"'.encode() if digests else b""
