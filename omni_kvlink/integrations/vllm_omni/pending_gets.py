"""Payloads that an engine asks for again and again: asked of the sender once."""

from __future__ import annotations

import concurrent.futures
import threading
import time

from omni_kvlink.connectors.base import PendingGet
from omni_kvlink.errors import TransferTimeout
from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge
from omni_kvlink.link import KVLink, Received

KEPT = 5.0
"""Seconds after which what nobody asked for again is asked of the sender no more."""


class PendingGets:
    """Wants that outlive one call, so that a short `get` misses nothing; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wants: dict[tuple[StageEdge, str], tuple[PendingGet, KVLink, float]] = {}

    def get(self, link: KVLink, place: StageEdge, key: str, *, timeout: float) -> Received:
        """As `KVLink.get`, but a call that runs out of time leaves the question standing.

        Raises:
            TransferTimeout: not here yet.
            The errors of `KVLink.get`.
        """
        started = time.perf_counter()
        self.sweep()
        with self._lock:
            want, _, _ = self._wants.pop((place, key), (None, link, 0.0))
        if want is None:
            want = link.begin_get(key, timeout=timeout)
        try:
            done, _ = concurrent.futures.wait([want.future], timeout)
        except BaseException:
            want.cancel()
            raise
        if not done:
            with self._lock:
                other = self._wants.setdefault((place, key), (want, link, time.monotonic()))
            if other[0] is not want:  # two asked at once
                want.cancel()
            raise TransferTimeout(
                f"no payload {key!r} yet", key=key, waited=timeout, phase="asked for"
            )
        return link.open_delivery(want.wait(timeout=0.0), started=started, verify="auto")

    def drop(self, key: str) -> None:
        """Ask for it no more; what came meanwhile goes to another reader."""
        self._cancel([spot for spot in list(self._wants) if spot[1] == key])

    def sweep(self) -> None:
        """Drop what nobody asked for lately."""
        before = time.monotonic() - KEPT
        self._cancel([spot for spot, (*_, at) in list(self._wants.items()) if at < before])

    def close(self) -> None:
        self._cancel(list(self._wants))

    def __len__(self) -> int:
        return len(self._wants)

    def _cancel(self, spots: list[tuple[StageEdge, str]]) -> None:
        for spot in spots:
            with self._lock:
                found = self._wants.pop(spot, None)
            if found is not None:
                found[0].cancel()
