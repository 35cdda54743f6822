"""The producers that a consumer reads from; each is connected when it is first needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from omni_kvlink.errors import ClosedError, SchemaError, TransferTimeout
from omni_kvlink.link import KVLink


class Peers:
    """Links by URL; thread-safe.

    Args:
        urls: all that may be connected: what a request names is not believed.
        options: of `KVLink.connect`.
    """

    def __init__(self, urls: Sequence[str], options: Mapping[str, Any]):
        self._urls, self._options = list(urls), dict(options)
        self._locks = {url: threading.Lock() for url in urls}
        self._links: dict[str, KVLink] = {}
        self._closed = False

    def link(self, url: str, *, timeout: float) -> KVLink:
        """The link to a producer, the first if `url` is empty; waits for it to be there.

        Raises:
            SchemaError: it is none of the peers.
            TransferTimeout: no producer within `timeout` seconds.
        """
        url = url or self._urls[0]
        if url not in self._locks:
            raise SchemaError(
                f"remote_url {url!r:.200} is none of this engine's peers: {', '.join(self._urls)}"
            )
        started, lock = time.monotonic(), self._locks[url]  # a slow peer holds up no other
        if not lock.acquire(timeout=max(0.0, timeout)):
            raise TransferTimeout(f"{url}: no connection after {timeout:g} s", waited=timeout)
        try:
            if self._closed:
                raise ClosedError("the connector was shut down")
            if url not in self._links:
                left = timeout - (time.monotonic() - started)
                self._links[url] = KVLink.connect(url, timeout=left, **self._options)
            return self._links[url]
        finally:
            lock.release()

    def close(self) -> None:
        """Close all; what waits on them ends with ClosedError."""
        self._closed = True
        for url, lock in self._locks.items():
            with lock:
                link = self._links.pop(url, None)
            if link is not None:
                link.close()
