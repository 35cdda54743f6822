"""Gets that outlive one call: an engine that polls a key sends one request to the sender."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import TYPE_CHECKING

from omni_kvlink.errors import TransferTimeout
from omni_kvlink.lowlevel import PendingGet, begin_get, open_delivery

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer, Received
    from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge

STALE_SECONDS = 5.0
"""Seconds after its last poll until a pending get is cancelled."""


class PendingGets:
    """Pending gets by edge and key, so that a `get` of 1 ms loses no payload; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gets: dict[tuple[StageEdge, str], tuple[PendingGet, float]] = {}

    def get(self, link: KVConsumer, edge: StageEdge, key: str, *, timeout: float) -> Received:
        """Do the same as `KVConsumer.get`, but keep the request pending after a timeout.

        Raises:
            TransferTimeout: the payload has not arrived yet.
        """
        started = time.perf_counter()
        self.cancel_stale()
        with self._lock:
            pending, _ = self._gets.pop((edge, key), (None, 0.0))
        if pending is None:
            pending = begin_get(link, key, timeout=timeout)
        try:
            done, _ = concurrent.futures.wait([pending.future], timeout)
        except BaseException:
            pending.cancel()
            raise
        if not done:
            with self._lock:
                kept, _ = self._gets.setdefault((edge, key), (pending, time.monotonic()))
            if kept is not pending:  # another thread began one, too
                pending.cancel()
            text = f"no payload {key!r} yet"
            raise TransferTimeout(text, key=key, waited=timeout, phase="requested")
        return open_delivery(link, pending.wait(timeout=0.0), started=started, verify="auto")

    def cancel(self, key: str | None = None) -> None:
        """Cancel the gets of a key, or all; their payloads go to other receivers."""
        self._cancel([name for name in list(self._gets) if key in (None, name[1])])

    def cancel_stale(self) -> None:
        """Cancel gets that were not polled for `STALE_SECONDS`."""
        before = time.monotonic() - STALE_SECONDS
        self._cancel([name for name, (_, at) in list(self._gets.items()) if at < before])

    def __len__(self) -> int:
        return len(self._gets)

    def _cancel(self, names: list[tuple[StageEdge, str]]) -> None:
        for name in names:
            with self._lock:
                pending, _ = self._gets.pop(name, (None, 0.0))
            if pending is not None:
                pending.cancel()
