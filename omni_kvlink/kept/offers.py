"""`OfferSender`: tells one store what this process keeps, so that the store fetches it."""

from __future__ import annotations

import contextlib
import math
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.errors import ClosedError, KVLinkError
from omni_kvlink.kept.store_messages import MAX_OFFERED, Attachment, KeptOffer, offer_payload
from omni_kvlink.system.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.kept.kept_receipts import KeptReceipts
    from omni_kvlink.link import KVProducer

MAX_QUEUED = 65_536
"""Keys that wait to be offered; when there are more, all that is kept is offered again later.
Withdrawals always wait: a store that misses one would give away what its writer has withdrawn.
"""


class _Change(NamedTuple):
    """A key that is kept from now on, or withdrawn."""

    key: str
    is_kept: bool


class OfferSender:
    """Offers keys to one store, in their order, one message at a time, in a thread of its own.

    The store releases a message when it has fetched what it offers, so that few keys wait in
    memory: the rest is in the sender's queue.
    """

    def __init__(self, link: KVProducer, attachment: Attachment, kept: KeptReceipts):
        self._link, self._attachment, self._kept = link, attachment, kept
        self._queue: SimpleQueue[_Change | threading.Event | None] = SimpleQueue()
        self._offers_all = False
        self.offered, self.taken = 0, 0
        self._thread = threading.Thread(target=self._send_all, name="kvlink-offer", daemon=True)
        start_thread(self._thread)

    def add(self, key: str, *, is_kept: bool = True) -> None:
        """Offer a key, or say that it was withdrawn; does not block."""
        if not is_kept or self._queue.qsize() < MAX_QUEUED:
            self._queue.put(_Change(key, is_kept))
        elif not self._offers_all:
            self.add_all()  # its event wakes the thread, which may have emptied the queue meanwhile

    def add_all(self) -> None:
        """Offer all that is kept now: to a store that has just come, or is back."""
        self._offers_all = True
        self._queue.put(threading.Event())

    def drain(self, timeout: float) -> bool:
        """Wait until the store has taken all that was added before; False after `timeout` s."""
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout)

    def stop(self) -> None:
        """End the thread, once the link is closed."""
        self._queue.put(None)
        self._thread.join()

    def stats(self) -> dict[str, int]:
        """Keys that wait, that were offered, and of which the store has taken note."""
        return {"queued": self._queue.qsize(), "offered": self.offered, "taken": self.taken}

    def _send_all(self) -> None:
        entry = self._queue.get()
        while entry is not None:
            if isinstance(entry, threading.Event):
                if self._offers_all and not self._send_kept():
                    return
                entry.set()
                entry = self._queue.get()
                continue
            changes, rest = [entry], list[_Change | threading.Event | None]()
            with contextlib.suppress(Empty):
                while len(changes) < MAX_OFFERED and not rest:
                    following = self._queue.get_nowait()
                    if isinstance(following, _Change) and following.is_kept == entry.is_kept:
                        changes.append(following)
                    else:
                        rest.append(following)
            if not self._send(changes):
                return
            if self._offers_all and not rest and self._queue.empty() and not self._send_kept():
                return
            entry = rest[0] if rest else self._queue.get()

    def _send(self, changes: Sequence[_Change]) -> bool:
        """Put an offer, and wait until the store has released it; False if the link is closed.

        An offer has changes of one kind: their order would be lost in it.
        """
        keys = [change.key for change in changes]
        offer = KeptOffer(keys, []) if changes[0].is_kept else KeptOffer([], keys)
        payload = offer_payload(self._attachment.inbox_key, offer)
        try:
            receipt = self._link.put(payload, readers=1, ttl=math.inf, timeout=math.inf)
            self.offered += len(keys)
            receipt.wait(timeout=math.inf)
            self.taken += len(keys)
        except ClosedError:
            return False
        except KVLinkError:  # a reader aborted it, or there is no memory for it
            self._offers_all = True
        return True

    def _send_kept(self) -> bool:
        """Offer all that is kept; False if the link is closed."""
        self._offers_all, keys = False, self._kept.live()
        for first in range(0, len(keys), MAX_OFFERED):
            batch = keys[first : first + MAX_OFFERED]
            if not self._send([_Change(key, is_kept=True) for key in batch]):
                return False
        return True
