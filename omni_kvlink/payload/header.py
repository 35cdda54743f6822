"""The header's JSON: bounded before it is decoded, decoded by type, without duplicate keys."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from omni_kvlink._native.host import crc32c
from omni_kvlink.errors import IntegrityError, VersionError, WireError
from omni_kvlink.payload.branches import Branch, Count
from omni_kvlink.payload.format import MAX_HEADER, MAX_MARKS, VERSION

_ZERO_CRC = b"0" * 8
_CRC_FIELD = b'header_crc32c\\":\\"'


class HeaderEntry(msgspec.Struct):
    """One value of the header: a tensor, or (with only `kvlink` set) `__metadata__`."""

    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: tuple[Count, ...] = ()
    data_offsets: tuple[Count, Count] | msgspec.UnsetType = msgspec.UNSET
    kvlink: str | msgspec.UnsetType = msgspec.UNSET


class _VersionOnly(msgspec.Struct):
    version: tuple[int, int]


class Note(msgspec.Struct, kw_only=True):
    """The content of the `kvlink` string; `HeaderTemplate` writes it."""

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
    """The decoded JSON of a header; entries and note are not yet checked."""

    def __init__(self, text: bytes):
        self._text = text
        self.entries: dict[str, HeaderEntry] = _decode(text, _ENTRIES)
        metadata = self.entries.pop("__metadata__", HeaderEntry())
        if metadata.kvlink is msgspec.UNSET or metadata.dtype is not msgspec.UNSET:
            raise WireError("no kvlink manifest in __metadata__: another kind of safetensors file")
        self._note_json = metadata.kvlink.encode()
        version = _decode(self._note_json, _VERSION_ONLY).version
        if version[0] != VERSION[0]:
            raise VersionError(
                f"payload version {version[0]}.{version[1]}; this library reads {VERSION[0]}.x "
                f"(it writes {VERSION[0]}.{VERSION[1]}): use the same major version on both sides"
            )
        self.note: Note = _decode(self._note_json, _NOTE)
        at = text.find(_CRC_FIELD) + len(_CRC_FIELD)
        blank = text[:at] + _ZERO_CRC + text[at + 8 :]
        if at < len(_CRC_FIELD) or self.note.header_crc32c != f"{crc32c(blank):08x}":
            raise IntegrityError("the header's own digest does not match: its bytes were changed")

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
