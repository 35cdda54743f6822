"""The producers that a consumer may read from: URLs, patterns of URLs, and a file of both."""

from __future__ import annotations

import logging
import os
import re
import threading
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import LinkUrl
from omni_kvlink.settings import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger(f"vllm.{__name__}")

_NAME, _NUMBER = "[A-Za-z0-9_-]+", "[0-9]{1,5}"


class PeerPattern:
    """A URL of a producer, or several: each `*` in its address stands for one part of it.

    A `*` is one or more letters, digits, `-` and `_`; never a dot, colon or slash. In a port, and
    in a host whose other parts are numbers, it is a number.

    Raises:
        SchemaError: the entry is no URL, or a `*` is in its scheme or its options.
    """

    def __init__(self, entry: str):
        scheme, separator, tail = entry.partition("://") if isinstance(entry, str) else ("", "", "")
        address, mark, options = tail.partition("?")
        if not (scheme and separator and address) or "*" in scheme + options:
            raise SchemaError(
                f"peers: {entry!r:.200} is neither a URL, such as shm://prefill-0, nor one with * "
                "in its address, such as shm://prefill-* or zmq+tcp://10.0.0.*:7000"
            )
        self.entry, self.is_wild = entry, "*" in address
        LinkUrl().read(entry, "peers")  # its connector, and its options
        prefix, suffix = re.escape(scheme + separator), re.escape(mark + options)
        self._expression = re.compile(prefix + _address_expression(address) + suffix)

    def matches(self, url: str) -> bool:
        """Whether a URL is the entry's, or one of those that the entry stands for."""
        return self._expression.fullmatch(url) is not None


def _address_expression(address: str) -> str:
    """The regular expression of an address with `*` in it."""
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch("[0-9*]+", port):
        host, colon, port = address, "", ""
    is_numeric = re.fullmatch(r"[0-9.*]*[0-9][0-9.*]*", host) is not None
    parts = ((host, _NUMBER if is_numeric else _NAME), (colon + port, _NUMBER))
    return "".join(wild.join(map(re.escape, text.split("*"))) for text, wild in parts)


class PeerEntry(Text):
    """An entry of `peers`."""

    def _read(self, value: Any, name: str) -> str:
        return PeerPattern(value).entry


class AllowedPeers:
    """The entries of `peers`, and those of a file, which may change at run time. Thread-safe.

    The file has one entry a line; empty lines and those that begin with `#` are left out. If it
    cannot be read later on, or has a wrong line, its last entries stay valid.

    Raises:
        SchemaError: an entry is wrong, or the file cannot be read.
    """

    def __init__(self, entries: Iterable[str], file: str = ""):
        self._fixed = [PeerPattern(entry) for entry in entries]
        self._file, self._lock = file, threading.Lock()
        self._stamp = self._stat()
        self._listed = self._read() if file else []

    def allow(self, url: str) -> bool:
        """Whether a request may name this URL; reads the file again if it has changed."""
        return any(pattern.matches(url) for pattern in self._current())

    def default(self) -> str:
        """The URL that is meant if a request names none: the first entry that is no pattern."""
        for pattern in self._current():
            if not pattern.is_wild:
                return pattern.entry
        raise SchemaError(
            f"the request names no remote_url, and peers has only patterns ({self}): pass on all "
            "kv_transfer_params of the producer's answer, or name a URL in peers"
        )

    def __str__(self) -> str:
        return ", ".join(pattern.entry for pattern in self._current())

    def _current(self) -> list[PeerPattern]:
        if self._file:
            with self._lock:
                self._reread()
                return [*self._fixed, *self._listed]
        return self._fixed

    def _reread(self) -> None:
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._listed = self._read()
        except SchemaError as error:
            log.warning("%s; its last entries stay valid", str(error))

    def _stat(self) -> tuple[int, ...]:
        """The file's identity, size and times; empty if it is not there."""
        try:
            stat = os.stat(self._file)
        except OSError:
            return ()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

    def _read(self) -> list[PeerPattern]:
        try:
            with open(self._file, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise SchemaError(f"peers_file {self._file} cannot be read: {error}") from None
        return [PeerPattern(line) for line in lines if line and not line.startswith("#")]
