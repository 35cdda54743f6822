"""The links to the producers that a consumer reads from; each is opened at its first use."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink
from omni_kvlink.errors import ClosedError, SchemaError, TransferTimeout, format_seconds
from omni_kvlink.integrations.vllm.allowed_peers import AllowedPeers
from omni_kvlink.integrations.vllm.device import log_path
from omni_kvlink.integrations.vllm.ranks import rank_url
from omni_kvlink.lowlevel import named_copier

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


_ATTEMPT = 5.0
"""Seconds of one attempt to connect, after which a `close` is noticed."""


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
