"""The links of one connector: opened when a payload first needs them, closed together."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from omni_kvlink.errors import ClosedError, TransferTimeout
from omni_kvlink.integrations.vllm_omni.settings import OmniSettings
from omni_kvlink.integrations.vllm_omni.stage_edges import Announcement, StageEdge, announced, find
from omni_kvlink.link import KVLink


class Links:
    """One end for each place that this process sends to or receives from; thread-safe."""

    def __init__(self, settings: OmniSettings):
        self._settings = settings
        self._lock = threading.Lock()
        self._served: dict[StageEdge, tuple[KVLink, Announcement | None]] = {}
        self._seats: dict[StageEdge, _Seat] = {}
        self._closed = False

    def sender(self, place: StageEdge) -> KVLink:
        """The end that puts.

        Raises:
            BusyError: another process serves this place.
        """
        with self._lock:
            self._check_open()
            if place not in self._served:
                self._served[place] = self._serve(place)
            return self._served[place][0]

    def receiver(self, place: StageEdge, *, timeout: float) -> KVLink:
        """The end that gets.

        Raises:
            TransferTimeout: nobody serves this place yet.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._check_open()
            seat = self._seats.setdefault(place, _Seat())
        if not seat.lock.acquire(timeout=max(0.0, timeout)):
            raise TransferTimeout(
                f"{place.name(self._settings)}: no connection after {timeout:g} s",
                waited=timeout,
                phase="connecting",
            )
        try:
            if seat.link is not None and self._has_moved(place, seat.link):
                self.forget(place, seat.link)
            if seat.link is None:
                link = self._connect(place, deadline)
                with self._lock:
                    if not self._closed:
                        seat.link = link
                if seat.link is None:  # closed meanwhile
                    link.close()
                    self._check_open()
            assert seat.link is not None
            return seat.link
        finally:
            seat.lock.release()

    def forget(self, place: StageEdge, link: KVLink) -> None:
        """Its sender is gone, and the next one may be found elsewhere."""
        with self._lock:
            seat = self._seats.get(place)
            if seat is None or seat.link is not link:
                return
            seat.link = None
        link.close()

    def stats(self) -> list[dict[str, Any]]:
        return [link.stats() for link in self._all()]

    def close(self) -> None:
        """A second call does nothing; tensors that were handed out live on."""
        with self._lock:
            self._closed = True
            served, self._served = list(self._served.values()), {}
            links = [seat.link for seat in self._seats.values() if seat.link is not None]
            self._seats.clear()
        for link in [*links, *(link for link, _ in served)]:
            link.close()
        for _, announcement in served:
            if announcement is not None:
                announcement.withdraw()

    def _all(self) -> list[KVLink]:
        with self._lock:
            reading = [seat.link for seat in self._seats.values()]
            return [*(link for link, _ in self._served.values()), *filter(None, reading)]

    def _serve(self, place: StageEdge) -> tuple[KVLink, Announcement | None]:
        options = dataclasses.asdict(self._settings.of_sender)
        link = KVLink.serve(place.url(self._settings), **options)
        if not place.is_announced(self._settings):
            return link, None
        try:
            return link, Announcement(place.file(self._settings, "url"), link.url)
        except BaseException:
            link.close()
            raise

    def _connect(self, place: StageEdge, deadline: float) -> KVLink:
        url = place.url(self._settings)
        if place.is_announced(self._settings):
            left = max(0.0, deadline - time.monotonic())
            url = find(place.file(self._settings, "url"), timeout=left)
        left = max(0.0, deadline - time.monotonic())
        options = dataclasses.asdict(self._settings.of_receiver)
        return KVLink.connect(url, timeout=left, **options)

    def _has_moved(self, place: StageEdge, link: KVLink) -> bool:
        """Whether its sender has gone from the address that the system chose for it."""
        return place.is_announced(self._settings) and link.url != announced(
            place.file(self._settings, "url")
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the connector is closed")


class _Seat:
    """A receiver's link, and who connects it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.link: KVLink | None = None
