"""A get that is pending at each replica of a sender; one of them has the payload."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.errors import PeerLostError
from omni_kvlink.lowlevel import LazyEvent, PendingGet, begin_get

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omni_kvlink import KVConsumer
    from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge
    from omni_kvlink.lowlevel import Delivery

    Lost: TypeAlias = Callable[[StageEdge, KVConsumer, PeerLostError], None]

MIN_WAIT = 0.0002
"""Seconds; to wait less takes longer than to look."""


class PolledGet:
    """The pending gets of one key, by the edge of each replica; `polled` is when it was last used.

    For one thread at a time. `lost` is called with each replica that is gone, and its link; what it
    raises, a call of this class raises, and of the last replica the error that was passed.
    """

    def __init__(self) -> None:
        self.polled = time.monotonic()
        self._pendings: dict[StageEdge, tuple[KVConsumer, PendingGet]] = {}
        self._done = LazyEvent()  # set when one of them is done

    def request(
        self, links: Mapping[StageEdge, KVConsumer], key: str, *, timeout: float, lost: Lost
    ) -> None:
        """Request the payload where it was not requested yet; see `begin_get` for `timeout`."""
        failed: PeerLostError | None = None
        for edge, link in links.items():
            if edge not in self._pendings:
                try:
                    pending = begin_get(link, key, timeout=timeout)
                except PeerLostError as error:
                    lost(edge, link, error)
                    failed = error
                    continue
                self._pendings[edge] = link, pending
                pending.add_done_callback(partial(_set, self._done))
        if failed is not None and not self._pendings:
            raise failed

    def wait(self, deadline: float, lost: Lost) -> tuple[StageEdge, KVConsumer, Delivery] | None:
        """Block until one has the payload, and cancel the others; None at the deadline."""
        while True:
            self._done.clear()  # before the look: one that is done later sets it
            done = (each for each, (_, pending) in self._pendings.items() if pending.is_done)
            if edge := next(done, None):
                link, pending = self._pendings.pop(edge)
                try:
                    delivery = pending.wait(timeout=0.0)
                except PeerLostError as error:
                    lost(edge, link, error)
                    if not self._pendings:
                        raise
                    continue
                self.cancel()
                return edge, link, delivery
            seconds = deadline - time.monotonic()
            if seconds < MIN_WAIT or not self._done.wait(seconds):
                return None

    def cancel(self) -> None:
        """Cancel all of them; their payloads go to others."""
        for _, pending in self._pendings.values():
            pending.cancel()
        self._pendings.clear()


def _set(done: LazyEvent, _: object) -> None:
    done.set()
