"""The header as text: bounded before it is decoded, decoded by type, encoded one way only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from crc32c import crc32c

from omni_kvlink.errors import IntegrityError, VersionError, WireError
from omni_kvlink.payload.branch import MAX_TENSORS as MAX_TENSORS
from omni_kvlink.payload.branch import Branch, Count

ALIGN = 256
"""Every tensor, and the data section itself, starts on a multiple of this many bytes."""
VERSION = (1, 1)
"""The newest version that this library writes."""
KV_VERSION = (1, 0)
"""The version of a payload without a `TensorTransferData`, which every 1.x reads."""
MAX_HEADER = 1 << 20
_MOST = {mark: n * MAX_TENSORS for mark, n in ((b'"', 28), (b"{", 3), (b"[", 5), (b",", 40))}
"""How often a mark may stand in a header: bounds what decoding allocates."""
CRC_ZERO = "0" * 8
_CRC_FIELD = b'header_crc32c\\":\\"'


class Entry(msgspec.Struct):
    """One value of the header: a tensor, or (with only `kvlink` set) `__metadata__`."""

    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: tuple[Count, ...] = ()
    data_offsets: tuple[Count, Count] | msgspec.UnsetType = msgspec.UNSET
    kvlink: str | msgspec.UnsetType = msgspec.UNSET


class _Speaks(msgspec.Struct):
    version: tuple[int, int]


class Note(msgspec.Struct, kw_only=True):
    """What the `kvlink` string holds, in the order it is written."""

    version: tuple[int, int]
    header_crc32c: str
    request_id: str
    bundle: bool
    branches: list[Branch]
    digest: str
    digests: list[str]
    producer: dict[str, str]


_ENTRIES = msgspec.json.Decoder(dict[str, Entry])
_NOTE = msgspec.json.Decoder(Note)
_SPEAKS = msgspec.json.Decoder(_Speaks)


class Header:
    """A header that was read: its entries by name, and the note; what they say is not checked yet.

    Attributes:
        nbytes: of the header with its length field, so where the data starts.
    """

    def __init__(self, buffer: bytes | memoryview, total: int):
        self._text = _text_of(buffer, total)
        self.nbytes = 8 + len(self._text)
        self.entries: dict[str, Entry] = _decode(self._text, _ENTRIES)
        self._note_json = _kvlink_note(self.entries)
        _check_version(self._note_json)
        self.note: Note = _decode(self._note_json, _NOTE)
        _check_digest(self._text, self.note.header_crc32c)

    def refuse_duplicates(self) -> None:
        """No key twice: the decoder keeps the last of two, another reader might keep the first.

        A header that encodes back to the same bytes has none. One that does not (a later minor
        version, another writer) is walked once more by a parser that shows every pair.
        """
        if _encode(self.note, self.entries, self.nbytes) == self._text:
            return
        try:
            for part in (self._text, self._note_json):  # len: nobody needs these numbers
                json.loads(part, object_pairs_hook=_refuse_twins, parse_int=len, parse_float=len)
        except (json.JSONDecodeError, RecursionError) as error:
            raise WireError(f"not a kvlink header: {error}") from None


def write_header(note: Note, entries: Mapping[str, Entry], nbytes: int = 0) -> bytes:
    """The payload's first bytes: length, JSON, and padding with spaces up to `nbytes` at least."""
    text = _encode(note, entries, nbytes)
    at = text.index(_CRC_FIELD) + len(_CRC_FIELD)
    text = text[:at] + b"%08x" % crc32c(text) + text[at + 8 :]
    return len(text).to_bytes(8, "little") + text


def _encode(note: Note, entries: Mapping[str, Entry], nbytes: int) -> bytes:
    metadata = {"kvlink": msgspec.json.encode(note).decode()}
    text = msgspec.json.encode({"__metadata__": metadata, **entries})
    return text.ljust(max(len(text) + -(len(text) + 8) % ALIGN, nbytes - 8))


def _text_of(buffer: bytes | memoryview, total: int) -> bytes:
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
    if what := excess(text):
        raise WireError(f"too much in the header: {what}")
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a kvlink header: {error}") from None


def excess(text: bytes) -> str:
    """What would cost too much memory to decode, or "": one wide character widens its string."""
    if len(text) > MAX_HEADER // 2 and (b"\\u" in text or not text.isascii()):
        return f"with non-ASCII characters, {len(text)} bytes"
    return next((f"{mark!r}" for mark, most in _MOST.items() if text.count(mark) > most), "")


def _kvlink_note(entries: dict[str, Entry]) -> bytes:
    note = entries.pop("__metadata__", Entry())
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


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise WireError("a key stands twice in one object of the header")


def _check_digest(text: bytes, claimed: str) -> None:
    at = text.find(_CRC_FIELD) + len(_CRC_FIELD)
    blank = text[:at] + CRC_ZERO.encode() + text[at + 8 :]
    if at < len(_CRC_FIELD) or claimed != f"{crc32c(blank):08x}":
        raise IntegrityError("the header's own digest does not match: its bytes were changed")
