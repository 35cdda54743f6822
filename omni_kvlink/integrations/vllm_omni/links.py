"""The links of one connector: each is opened at its first use; all are closed together."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink, KVProducer
from omni_kvlink.errors import ClosedError, TransferTimeout, format_seconds
from omni_kvlink.integrations.vllm_omni.stage_edges import Announcement, StageEdge, announced, find

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm_omni.settings import OmniSettings

log = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, which its processes configure


class Links:
    """One producer or consumer for each stage edge of this process; thread-safe."""

    def __init__(self, settings: OmniSettings):
        self._settings = settings
        self._lock = threading.Lock()
        self._senders: dict[StageEdge, KVProducer] = {}
        self._receivers: dict[StageEdge, KVConsumer] = {}
        self._announcements: list[Announcement] = []
        # Released by its owner alone, so that an interrupt just after `acquire` leaves it free.
        self._connecting: defaultdict[StageEdge, Any] = defaultdict(threading.RLock)
        self._closed = False

    def sender(self, edge: StageEdge) -> KVProducer:
        """The producer of an edge; opens it at the first call.

        Raises:
            BusyError: another process serves this edge.
        """
        with self._lock:
            self._check_open()
            if edge not in self._senders:
                self._senders[edge] = self._serve(edge)
            return self._senders[edge]

    def receiver(self, edge: StageEdge, *, timeout: float) -> KVConsumer:
        """The consumer of an edge; connects at the first call, and blocks until the edge is served.

        Raises:
            TransferTimeout: no process serves this edge within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._check_open()
            connecting = self._connecting[edge]
        try:
            if not connecting.acquire(timeout=max(0.0, timeout)):
                text = f"{edge.name(self._settings)}: no connection after {format_seconds(timeout)}"
                raise TransferTimeout(text, waited=timeout, phase="connecting")
            link = self._receivers.get(edge)
            path = edge.url_file(self._settings)
            if link is not None and path and link.url != announced(path):  # it has moved
                self.close_receiver(edge, link)
                link = None
            if link is None:
                link = self._connect(edge, deadline)
                with self._lock:
                    if not self._closed:
                        self._receivers[edge] = link
                if self._closed:
                    link.close()
                    self._check_open()
            return link
        finally:
            with contextlib.suppress(RuntimeError):  # it was not acquired
                connecting.release()

    def close_receiver(self, edge: StageEdge, link: KVConsumer) -> None:
        """Close a consumer whose sender is gone; the next call of `receiver` connects anew."""
        with self._lock:
            if self._receivers.get(edge) is not link:
                return
            del self._receivers[edge]
        link.close()

    def stats(self) -> list[dict[str, Any]]:
        """The `stats` of every open link."""
        with self._lock:
            links = [*self._senders.values(), *self._receivers.values()]
        return [link.stats() for link in links]

    def close(self) -> None:
        """Close all links; received tensors stay valid. A second call does nothing."""
        with self._lock:
            self._closed = True
            links = [*self._receivers.values(), *self._senders.values()]
            announcements, self._announcements = self._announcements, []
            self._receivers.clear()
            self._senders.clear()
        for link in links:
            link.close()
        for announcement in announcements:
            announcement.close()

    def _serve(self, edge: StageEdge) -> KVProducer:
        link = KVLink.serve(edge.url(self._settings), **self._settings.of_sender)
        if path := edge.announcement(self._settings):
            users = self._settings.of_sender.get("allow_uids", ())
            try:
                self._announcements.append(Announcement(path, link.url, users))
            except BaseException:
                link.close()
                raise
        log.info("stage edge %s is sent over %s", edge.name(self._settings), link.url)
        return link

    def _connect(self, edge: StageEdge, deadline: float) -> KVConsumer:
        path = edge.url_file(self._settings)
        seconds = max(0.0, deadline - time.monotonic())
        url = find(path, timeout=seconds) if path else edge.url(self._settings)
        seconds = max(0.0, deadline - time.monotonic())
        link = KVLink.connect(url, timeout=seconds, **self._settings.of_receiver)
        log.info("stage edge %s is received over %s", edge.name(self._settings), link.url)
        return link

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the connector is closed")
