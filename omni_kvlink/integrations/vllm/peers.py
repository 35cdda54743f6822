"""The producers that a consumer may read from, and the links to them, opened at their first use."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink
from omni_kvlink.errors import ClosedError, SchemaError, TransferTimeout, format_seconds
from omni_kvlink.integrations.vllm.device import log_path
from omni_kvlink.integrations.vllm.ranks import rank_url
from omni_kvlink.lowlevel import LinkUrl, named_copier
from omni_kvlink.settings import Text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

log = logging.getLogger(f"vllm.{__name__}")

_ATTEMPT = 5.0
"""Seconds of one attempt to connect, after which a `close` is noticed."""

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


class PeerLink:
    """The link to a rank of a producer, while it is open, and the calls that open or await it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of its own: a slow peer does not block the others
        self.link: KVConsumer | None = None
        self.calls = 0


class Peers:
    """Consumer links by URL and rank; a request may name a URL that an entry allows. Thread-safe.

    `entries` and the lines of `file` are URLs and patterns; see `AllowedPeers`.
    """

    def __init__(self, entries: Sequence[str], options: Mapping[str, Any], *, file: str = ""):
        self._allowed = AllowedPeers(entries, file)
        self.copier = named_copier(options.get("copier", "auto"))  # of all links
        self._options = {**options, "copier": self.copier}
        self._lock = threading.Lock()
        self._links: dict[tuple[str, int], PeerLink] = {}
        self._closed = False

    def link(self, url: str, *, timeout: float, rank: int = 0) -> KVConsumer:
        """The link to a rank of a producer, of the default one if `url` is empty; may wait for it.

        Raises:
            SchemaError: no entry allows `url`; or it is empty, and there is no default.
            TransferTimeout: no producer serves it within `timeout` seconds.
            ClosedError: `close` was called.
        """
        url = url or self._allowed.default()
        if not self._allowed.allow(url):
            raise SchemaError(
                f"remote_url {url!r:.200} is not one of this engine's peers: {self._allowed}"
            )
        key = url, rank
        with self._lock:
            peer = self._links.setdefault(key, PeerLink())
            peer.calls += 1
        try:
            return self._open(key, peer, timeout)
        finally:
            with self._lock:
                peer.calls -= 1
                self._forget(key, peer)

    def is_connected(self, url: str, rank: int = 0) -> bool:
        """Whether `link` would return at once, and a get need not reconnect; never blocks."""
        with self._lock:
            peer = self._links.get((url, rank))
        link = peer.link if peer is not None else None
        return link is not None and link.is_connected

    def close_unused(self, in_use: Collection[str]) -> None:
        """Close the links, beside those `in_use`, to producers that are gone or not allowed now."""
        with self._lock:
            peers = [(key, peer) for key, peer in self._links.items() if key[0] not in in_use]
        for key, peer in peers:
            if peer.link is None or (peer.link.is_connected and self._allowed.allow(key[0])):
                continue
            with self._lock:
                link = None
                if not peer.calls:
                    link, peer.link = peer.link, None
                    self._forget(key, peer)
            if link is not None:
                link.close()

    def close(self) -> None:
        """Close all links; calls that wait on them raise ClosedError."""
        with self._lock:
            self._closed = True
            peers = list(self._links.values())
        for peer in peers:
            with peer.lock:
                link, peer.link = peer.link, None
            if link is not None:
                link.close()

    def _open(self, key: tuple[str, int], peer: PeerLink, timeout: float) -> KVConsumer:
        url, deadline = rank_url(*key), time.monotonic() + timeout
        if not peer.lock.acquire(timeout=max(0.0, timeout)):
            raise TransferTimeout(
                f"{url}: no connection after {format_seconds(timeout)}", waited=timeout
            )
        try:
            while True:
                if self._closed:
                    raise ClosedError("the connector was shut down")
                if peer.link is not None:
                    return peer.link
                seconds = max(0.0, deadline - time.monotonic())
                try:
                    limit = min(seconds, _ATTEMPT)
                    peer.link = KVLink.connect(url, timeout=limit, **self._options)
                    log_path(peer.link, self._options)
                except TransferTimeout:
                    if seconds <= _ATTEMPT:
                        raise
        finally:
            peer.lock.release()

    def _forget(self, key: tuple[str, int], peer: PeerLink) -> None:
        """Forget a URL that has no link: requests may name many that nobody serves."""
        if peer.link is None and not peer.calls and self._links.get(key) is peer:
            del self._links[key]
