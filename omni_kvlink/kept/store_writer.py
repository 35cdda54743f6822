"""`StoreWriter`: fetches what one process offers to a store."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import (
    ClosedError,
    KVLinkError,
    MissingError,
    PeerLostError,
    SchemaError,
    WireError,
)
from omni_kvlink.kept.link_thread import LinkThread
from omni_kvlink.kept.store_messages import RESERVED, Attachment, read_offer
from omni_kvlink.link import MAX_TIMEOUT, begin, get_requests, open_delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.kept.store_contents import StoreContents
    from omni_kvlink.kept.store_messages import KeptOffer
    from omni_kvlink.link import KVConsumer

CONNECT_SECONDS = 10.0
"""In which a store connects to a process that has asked for it."""
_FETCH_SECONDS = 60.0
"""In which one payload must come; a writer that is stopped for longer is left."""
_FETCHED_TOGETHER = 4
"""Payloads that are requested at once: their memory is the writer's, or of this process."""


class StoreWriter:
    """A process that offers payloads; a thread of the store reads its offers and its payloads.

    Every byte of a payload is checked before it is kept. `on_end` is called in that thread when
    the process is gone, or could not be connected to.
    """

    def __init__(
        self,
        attachment: Attachment,
        options: dict[str, Any],
        contents: StoreContents,
        on_end: Callable[[StoreWriter], None],
    ):
        self.attachment, self.reason = attachment, ""
        self._options, self._contents, self._on_end = options, contents, on_end
        self._counters = Counter(dict.fromkeys(("fetched", "known", "missing", "refused"), 0))
        self._thread = LinkThread()
        self._thread.start(self._run)

    def __repr__(self) -> str:
        return f"<StoreWriter at {self.attachment.url}>"

    def close(self) -> None:
        """Leave the process; the offer that is being fetched is offered again to the next store."""
        self._thread.close()

    def stats(self) -> dict[str, Any]:
        """The URL; payloads fetched, known before, missing there, and refused."""
        return {"url": self.attachment.url, **self._counters}

    def _run(self) -> None:
        attachment = self.attachment
        try:
            options = self._options
            consumer = self._thread.connect(attachment.url, options, timeout=CONNECT_SECONDS)
            while True:
                self._take_next(consumer)
        except KVLinkError as error:
            self.reason = str(error)
        finally:
            if self._thread.consumer is not None:
                self._thread.consumer.close()
            self._on_end(self)

    def _take_next(self, consumer: KVConsumer) -> None:
        """Wait for an offer, and release it when its payloads are kept."""
        started, requests = time.perf_counter(), get_requests([self.attachment.inbox_key])
        [get] = begin(consumer, requests, timeout=CONNECT_SECONDS)
        # Not `KVConsumer.get`, which waits for a process that is gone to come back.
        delivery = get.wait(timeout=MAX_TIMEOUT)
        received = open_delivery(consumer, delivery, started=started, verify="full")
        try:
            offer = read_offer(received.data)
        except SchemaError:
            self._counters["refused"] += 1
            received.release()
            return
        try:
            self._take(consumer, offer)
        except BaseException:
            received.release_unread()
            raise
        received.release()

    def _take(self, consumer: KVConsumer, offer: KeptOffer) -> None:
        for key in offer.withdrawn:
            self._contents.remove(key)
        new = [key for key in offer.kept if not key.startswith(RESERVED)]
        known_keys = [key for key in new if key in self._contents]
        self._counters["known"] += len(known_keys)
        new = [key for key in new if key not in set(known_keys)]
        for first in range(0, len(new), _FETCHED_TOGETHER):
            self._fetch(consumer, new[first : first + _FETCHED_TOGETHER])

    def _fetch(self, consumer: KVConsumer, keys: Sequence[str]) -> None:
        started = time.perf_counter()
        pending = begin(consumer, get_requests(keys, wait=False), timeout=CONNECT_SECONDS)
        for get in pending:
            self._counters[self._keep(consumer, get, started)] += 1

    def _keep(self, consumer: KVConsumer, get: PendingGet, started: float) -> str:
        """Keep a payload that was requested; return what is counted."""
        try:
            delivery = get.wait(timeout=_FETCH_SECONDS)
            received = open_delivery(consumer, delivery, started=started, verify="full")
        except MissingError:
            return "missing"  # it was evicted there, or withdrawn
        except (PeerLostError, ClosedError):
            raise
        except WireError:
            return "refused"  # it was damaged, or put without digests
        except KVLinkError:
            get.cancel()
            return "refused"
        try:
            is_kept = self._contents.add(received.manifest, received.encoded())
        except BaseException:
            received.release_unread()
            raise
        received.release()
        return "fetched" if is_kept else "refused"
