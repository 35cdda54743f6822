"""The links to the producers that a consumer reads from; each is opened at its first use."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink
from omni_kvlink.errors import ClosedError, SchemaError, TransferTimeout
from omni_kvlink.integrations.vllm.ranks import rank_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Peers:
    """Consumer links by URL and rank; a request names one of `urls` and no other. Thread-safe."""

    def __init__(self, urls: Sequence[str], options: Mapping[str, Any]):
        self._urls, self._options = list(urls), dict(options)
        self._guard = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._links: dict[tuple[str, int], KVConsumer] = {}
        self._closed = False

    def link(self, url: str, *, timeout: float, rank: int = 0) -> KVConsumer:
        """The link to a rank of a producer, the first if `url` is empty; blocks until it serves.

        Raises:
            SchemaError: `url` is not one of `urls`.
            TransferTimeout: no producer serves it within `timeout` seconds.
            ClosedError: `close` was called.
        """
        url = url or self._urls[0]
        if url not in self._urls:
            raise SchemaError(
                f"remote_url {url!r:.200} is not one of this engine's peers: "
                f"{', '.join(self._urls)}"
            )
        started = time.monotonic()
        with self._guard:  # per rank: a slow peer does not block the others
            lock = self._locks.setdefault((url, rank), threading.Lock())
        if not lock.acquire(timeout=max(0.0, timeout)):
            raise TransferTimeout(f"{url}: no connection after {timeout:g} s", waited=timeout)
        try:
            if self._closed:
                raise ClosedError("the connector was shut down")
            if (url, rank) not in self._links:
                left = max(0.0, timeout - (time.monotonic() - started))
                link = KVLink.connect(rank_url(url, rank), timeout=left, **self._options)
                self._links[url, rank] = link
            return self._links[url, rank]
        finally:
            lock.release()

    def close(self) -> None:
        """Close all links; calls that wait on them raise ClosedError."""
        self._closed = True
        with self._guard:
            locks = list(self._locks.items())
        for place, lock in locks:
            with lock:
                link = self._links.pop(place, None)
            if link is not None:
                link.close()
