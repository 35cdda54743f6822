"""The links of one connector: each is opened at its first use; all are closed together."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink, KVProducer
from omni_kvlink.errors import ClosedError, TransferTimeout
from omni_kvlink.integrations.vllm_omni.stage_edges import Announcement, StageEdge, announced, find

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm_omni.settings import OmniSettings


class Links:
    """One producer or consumer for each stage edge of this process; thread-safe."""

    def __init__(self, settings: OmniSettings):
        self._settings = settings
        self._lock = threading.Lock()
        self._served: dict[StageEdge, tuple[KVProducer, Announcement | None]] = {}
        self._receivers: dict[StageEdge, _ReceiverSlot] = {}
        self._closed = False

    def sender(self, edge: StageEdge) -> KVProducer:
        """The producer of an edge; opens it at the first call.

        Raises:
            BusyError: another process serves this edge.
        """
        with self._lock:
            self._check_open()
            if edge not in self._served:
                self._served[edge] = self._serve(edge)
            return self._served[edge][0]

    def receiver(self, edge: StageEdge, *, timeout: float) -> KVConsumer:
        """The consumer of an edge; connects at the first call, and blocks until the edge is served.

        Raises:
            TransferTimeout: no process serves this edge within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._check_open()
            slot = self._receivers.setdefault(edge, _ReceiverSlot())
        if not slot.lock.acquire(timeout=max(0.0, timeout)):
            raise TransferTimeout(
                f"{edge.name(self._settings)}: no connection after {timeout:g} s",
                waited=timeout,
                phase="connecting",
            )
        try:
            if slot.link is not None and self._has_moved(edge, slot.link):
                self.close_receiver(edge, slot.link)
            if slot.link is None:
                link = self._connect(edge, deadline)
                with self._lock:
                    if not self._closed:
                        slot.link = link
                if slot.link is None:  # `close` was called meanwhile
                    link.close()
                    self._check_open()
            assert slot.link is not None
            return slot.link
        finally:
            slot.lock.release()

    def close_receiver(self, edge: StageEdge, link: KVConsumer) -> None:
        """Close a consumer whose sender is gone; the next call of `receiver` connects anew."""
        with self._lock:
            slot = self._receivers.get(edge)
            if slot is None or slot.link is not link:
                return
            slot.link = None
        link.close()

    def stats(self) -> list[dict[str, Any]]:
        """The `stats` of every open link."""
        return [link.stats() for link in self._all()]

    def close(self) -> None:
        """Close all links; received tensors stay valid. A second call does nothing."""
        with self._lock:
            self._closed = True
            served, self._served = list(self._served.values()), {}
            links = [slot.link for slot in self._receivers.values() if slot.link is not None]
            self._receivers.clear()
        for link in [*links, *(link for link, _ in served)]:
            link.close()
        for _, announcement in served:
            if announcement is not None:
                announcement.close()

    def _all(self) -> list[KVProducer | KVConsumer]:
        with self._lock:
            reading = [slot.link for slot in self._receivers.values()]
            return [*(link for link, _ in self._served.values()), *filter(None, reading)]

    def _serve(self, edge: StageEdge) -> tuple[KVProducer, Announcement | None]:
        options = dataclasses.asdict(self._settings.of_sender)
        link = KVLink.serve(edge.url(self._settings), **options)
        if not edge.is_announced(self._settings):
            return link, None
        try:
            return link, Announcement(edge.file(self._settings, "url"), link.url)
        except BaseException:
            link.close()
            raise

    def _connect(self, edge: StageEdge, deadline: float) -> KVConsumer:
        url = edge.url(self._settings)
        if edge.is_announced(self._settings):
            left = max(0.0, deadline - time.monotonic())
            url = find(edge.file(self._settings, "url"), timeout=left)
        left = max(0.0, deadline - time.monotonic())
        options = dataclasses.asdict(self._settings.of_receiver)
        return KVLink.connect(url, timeout=left, **options)

    def _has_moved(self, edge: StageEdge, link: KVConsumer) -> bool:
        """Whether the edge's announced URL differs from the one that the link is connected to."""
        return edge.is_announced(self._settings) and link.url != announced(
            edge.file(self._settings, "url")
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the connector is closed")


class _ReceiverSlot:
    """The consumer of an edge, and the lock that is held while it connects."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.link: KVConsumer | None = None
