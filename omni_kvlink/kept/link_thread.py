"""`LinkThread`: a thread that reads one link, which can be ended while it connects or waits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.runtime.consumer import cancel_connect
from omni_kvlink.errors import ClosedError
from omni_kvlink.link import KVConsumer, KVLink
from omni_kvlink.system.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_JOIN_SECONDS = 0.1
"""Until a thread that goes on connecting is cancelled again."""


class LinkThread:
    """Runs a function that calls `connect` and reads the `consumer`; see `close`.

    Attributes:
        consumer: the end that `connect` opened; None before.
        is_closing: set by `close`.
    """

    def __init__(self) -> None:
        self.consumer: KVConsumer | None = None
        self.is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], None]) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=run, name="kvlink-kept", daemon=True)
        start_thread(self._thread)

    def connect(self, url: str, options: dict[str, Any], *, timeout: float) -> KVConsumer:
        """Open the consumer's end, in the thread; ClosedError if `close` was called before."""
        if self.is_closing.is_set():
            raise ClosedError(f"{url}: closed before it was connected")
        self.consumer = KVLink.connect(url, timeout=timeout, **options)
        return self.consumer

    def close(self) -> None:
        """Close the consumer's end, and wait for the thread, unless this is that thread."""
        self.is_closing.set()
        thread = self._thread
        while True:
            if self.consumer is not None:
                self.consumer.close()
            elif thread is not None and thread.ident is not None:
                cancel_connect(thread.ident)
            if thread is None or thread is threading.current_thread() or not thread.is_alive():
                return
            thread.join(_JOIN_SECONDS)
