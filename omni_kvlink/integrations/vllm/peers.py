"""The links to the producers that a consumer reads from; each is opened at its first use."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink
from omni_kvlink.errors import ClosedError, SchemaError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Peers:
    """Consumer links by URL; a request may name one of `urls` and no other. Thread-safe."""

    def __init__(self, urls: Sequence[str], options: Mapping[str, Any]):
        self._urls, self._options = list(urls), dict(options)
        self._locks = {url: threading.Lock() for url in urls}
        self._links: dict[str, KVConsumer] = {}
        self._closed = False

    def link(self, url: str, *, timeout: float) -> KVConsumer:
        """The link to a producer, the first if `url` is empty; blocks until it serves.

        Raises:
            SchemaError: `url` is not one of `urls`.
            TransferTimeout: no producer serves it within `timeout` seconds.
            ClosedError: `close` was called.
        """
        url = url or self._urls[0]
        if url not in self._locks:
            raise SchemaError(
                f"remote_url {url!r:.200} is not one of this engine's peers: "
                f"{', '.join(self._urls)}"
            )
        started = time.monotonic()
        lock = self._locks[url]  # per URL: a slow peer does not block the others
        if not lock.acquire(timeout=max(0.0, timeout)):
            raise TransferTimeout(f"{url}: no connection after {timeout:g} s", waited=timeout)
        try:
            if self._closed:
                raise ClosedError("the connector was shut down")
            if url not in self._links:
                left = max(0.0, timeout - (time.monotonic() - started))
                self._links[url] = KVLink.connect(url, timeout=left, **self._options)
            return self._links[url]
        finally:
            lock.release()

    def close(self) -> None:
        """Close all links; calls that wait on them raise ClosedError."""
        self._closed = True
        for url, lock in self._locks.items():
            with lock:
                link = self._links.pop(url, None)
            if link is not None:
                link.close()
