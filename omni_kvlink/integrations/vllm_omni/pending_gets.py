"""Gets that outlive one call: an engine that polls a key sends one request to the sender."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from omni_kvlink.errors import TransferTimeout
from omni_kvlink.integrations.vllm_omni.polled_get import PolledGet
from omni_kvlink.lowlevel import open_delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omni_kvlink import KVConsumer, Received
    from omni_kvlink.integrations.vllm_omni.polled_get import Lost
    from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge

STALE_SECONDS = 5.0
"""Seconds after its last poll until a pending get is cancelled."""


class PendingGets:
    """Pending gets by edge and key, so that a `get` of 1 ms loses no payload; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gets: dict[tuple[StageEdge, str], PolledGet] = {}
        self._checked = time.monotonic()

    def share(self, seconds: float) -> float:
        """The share of each pending get, polled in turn, if all together may wait so long."""
        return seconds / max(1, len(self._gets))

    def get(
        self,
        links: Mapping[StageEdge, KVConsumer],
        edge: StageEdge,
        key: str,
        *,
        timeout: float,
        lost: Lost,
    ) -> tuple[StageEdge, Received]:
        """Do the same as `KVConsumer.get`, but keep the request pending after a timeout.

        `links` are those to the replicas of the sender, of which one has the payload; they may be
        others at the next call. Returns the replica's edge, too. `lost` may raise: see `PolledGet`.

        Raises:
            TransferTimeout: the payload has not arrived yet.
            PeerLostError: the last of the replicas is gone.
        """
        started, deadline = time.perf_counter(), time.monotonic() + timeout
        self.cancel_stale()
        with self._lock:
            get = self._gets.pop((edge, key), None) or PolledGet()
        try:
            is_alone = len(links) == 1  # else none is waited for to come back
            get.request(links, key, timeout=timeout if is_alone else 0.0, lost=lost)
            result = get.wait(deadline, lost)
        except BaseException:
            get.cancel()
            raise
        if result is not None:
            source, link, delivery = result
            return source, open_delivery(link, delivery, started=started, verify="auto")
        get.polled = time.monotonic()
        with self._lock:
            kept = self._gets.setdefault((edge, key), get)
        if kept is not get:  # another thread began one, too
            get.cancel()
        text = f"no payload {key!r} yet"
        raise TransferTimeout(text, key=key, waited=timeout, phase="requested")

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
                get.cancel()
