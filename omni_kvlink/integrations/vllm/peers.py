"""The links to the producers that a consumer reads from; each is opened at its first use."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink
from omni_kvlink.errors import ClosedError, SchemaError, TransferTimeout
from omni_kvlink.integrations.vllm.allowed_peers import AllowedPeers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


_ATTEMPT = 5.0
"""Seconds of one attempt to connect, after which a `close` is noticed."""


class PeerLink:
    """The link to one producer, while it is open, and the calls that open or wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # per URL: a slow peer does not block the others
        self.link: KVConsumer | None = None
        self.calls = 0


class Peers:
    """Consumer links by URL; a request may name one that an entry allows. Thread-safe.

    `entries` and the lines of `file` are URLs and patterns; see `AllowedPeers`.
    """

    def __init__(self, entries: Sequence[str], options: Mapping[str, Any], *, file: str = ""):
        self._allowed, self._options = AllowedPeers(entries, file), dict(options)
        self._lock = threading.Lock()
        self._links: dict[str, PeerLink] = {}
        self._closed = False

    def link(self, url: str, *, timeout: float) -> KVConsumer:
        """The link to a producer, the default one if `url` is empty; blocks until it serves.

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
        with self._lock:
            peer = self._links.setdefault(url, PeerLink())
            peer.calls += 1
        try:
            return self._open(url, peer, timeout)
        finally:
            with self._lock:
                peer.calls -= 1
                self._forget(url, peer)

    def is_connected(self, url: str) -> bool:
        """Whether `link` would return at once, and a get need not reconnect; never blocks."""
        with self._lock:
            peer = self._links.get(url)
        link = peer.link if peer is not None else None
        return link is not None and link.is_connected

    def close_unused(self, in_use: Collection[str]) -> None:
        """Close the links, beside those `in_use`, to producers that are gone or not allowed now."""
        with self._lock:
            peers = [(url, peer) for url, peer in self._links.items() if url not in in_use]
        for url, peer in peers:
            if peer.link is None or (peer.link.is_connected and self._allowed.allow(url)):
                continue
            with self._lock:
                link = None
                if not peer.calls:
                    link, peer.link = peer.link, None
                    self._forget(url, peer)
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

    def _open(self, url: str, peer: PeerLink, timeout: float) -> KVConsumer:
        deadline = time.monotonic() + timeout
        if not peer.lock.acquire(timeout=max(0.0, timeout)):
            raise TransferTimeout(f"{url}: no connection after {timeout:g} s", waited=timeout)
        try:
            while True:
                if self._closed:
                    raise ClosedError("the connector was shut down")
                if peer.link is not None:
                    return peer.link
                left = max(0.0, deadline - time.monotonic())
                try:
                    limit = min(left, _ATTEMPT)
                    peer.link = KVLink.connect(url, timeout=limit, **self._options)
                except TransferTimeout:
                    if left <= _ATTEMPT:
                        raise
        finally:
            peer.lock.release()

    def _forget(self, url: str, peer: PeerLink) -> None:
        """Forget a URL that has no link: requests may name many that nobody serves."""
        if peer.link is None and not peer.calls and self._links.get(url) is peer:
            del self._links[url]
