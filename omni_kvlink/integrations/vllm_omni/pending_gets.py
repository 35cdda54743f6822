"""Gets that outlive one call: an engine that polls a key sends one request to the sender."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.errors import TransferTimeout
from omni_kvlink.lowlevel import LazyEvent, PendingGet, begin_get, open_delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink import KVConsumer, Received
    from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge

STALE_SECONDS = 5.0
"""Seconds after its last poll until a pending get is cancelled."""
MIN_WAIT = 0.0002
"""Seconds; to wait less takes longer than to look."""


class PolledGet(NamedTuple):
    """A pending get, an event that is set when it is done, and when it was last polled."""

    pending: PendingGet
    done: LazyEvent
    polled: float


class PendingGets:
    """Pending gets by edge and key, so that a `get` of 1 ms loses no payload; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gets: dict[tuple[StageEdge, str], PolledGet] = {}
        self._checked = time.monotonic()

    def share(self, seconds: float) -> float:
        """The share of each pending get, polled in turn, if all together may wait so long."""
        return seconds / max(1, len(self._gets))

    def get(self, link: KVConsumer, edge: StageEdge, key: str, *, timeout: float) -> Received:
        """Do the same as `KVConsumer.get`, but keep the request pending after a timeout.

        Raises:
            TransferTimeout: the payload has not arrived yet.
        """
        started = time.perf_counter()
        self.cancel_stale()
        with self._lock:
            kept = self._gets.pop((edge, key), None)
        if kept is None:
            done = LazyEvent()
            kept = PolledGet(begin_get(link, key, timeout=timeout), done, started)
            kept.pending.add_done_callback(lambda _: done.set())
        pending = kept.pending
        try:
            if timeout >= MIN_WAIT and not pending.is_done:
                kept.done.wait(timeout)
        except BaseException:
            pending.cancel()
            raise
        if not pending.is_done:
            polled = kept._replace(polled=time.monotonic())
            with self._lock:
                kept = self._gets.setdefault((edge, key), polled)
            if kept is not polled:  # another thread began one, too
                pending.cancel()
            text = f"no payload {key!r} yet"
            raise TransferTimeout(text, key=key, waited=timeout, phase="requested")
        return open_delivery(link, pending.wait(timeout=0.0), started=started, verify="auto")

    def cancel(self, matches: Callable[[StageEdge, str], bool] = lambda edge, key: True) -> None:
        """Cancel the gets whose edge and key match, or all; their payloads go to others."""
        self._cancel([name for name in list(self._gets) if matches(*name)])

    def cancel_stale(self) -> None:
        """Cancel gets that were not polled for `STALE_SECONDS`; looks now and then."""
        now = time.monotonic()
        if now < self._checked + STALE_SECONDS / 5:
            return
        self._checked, oldest = now, now - STALE_SECONDS
        self._cancel([name for name, get in list(self._gets.items()) if get.polled < oldest])

    def __len__(self) -> int:
        return len(self._gets)

    def _cancel(self, names: list[tuple[StageEdge, str]]) -> None:
        for name in names:
            with self._lock:
                get = self._gets.pop(name, None)
            if get is not None:
                get.pending.cancel()
