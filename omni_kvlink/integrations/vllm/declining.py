"""Reads that no request needs any more: producers must neither wait for them nor keep blocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.lowlevel import PendingGet, begin_get

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer
    from omni_kvlink.integrations.vllm.peers import Peers
    from omni_kvlink.integrations.vllm.step import CancelledLoad

log = logging.getLogger(f"vllm.{__name__}")

MAX_DECLINED = 4096
"""Reads that may wait for their caches; the oldest is withdrawn for another one."""

Submit: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a function in the thread pool."""


class DeclinedRead:
    """One declined read: a get that waits, without a thread, until its cache is put.

    The get, unlike an abort, also reaches a cache that is put later. The cache is aborted if the
    read was its only one, and else released as read. `request` and `_take` run in the thread pool.
    """

    def __init__(self, declined: CancelledLoad, rank: int, end: Callable[[CancelledLoad], None]):
        self.declined, self._rank, self._end = declined, rank, end
        self._lock = threading.Lock()
        self._link: KVConsumer | None = None
        self._pending: PendingGet | None = None
        self._is_claimed = False

    def request(self, peers: Peers, timeout: float, submit: Submit) -> None:
        """Request the cache; blocks while it connects, `timeout` seconds at most."""
        declined = self.declined
        try:
            self._link = peers.link(declined.url, timeout=timeout, rank=self._rank)
            pending = begin_get(self._link, declined.key, timeout=timeout, streamed=True)
        except Exception as error:
            log.warning("cache %.200r could not be declined: %s", declined.key, str(error))
            self._end(declined)
            return
        with self._lock:
            self._pending, is_withdrawn = pending, self._is_claimed
        if is_withdrawn:
            pending.cancel()
        else:
            pending.future.add_done_callback(lambda _: self._claim() and submit(self._take))

    def withdraw(self) -> None:
        """Cancel the get: the read is left to others."""
        with self._lock:  # `request` sees the claim, or this sees its get: one of them cancels
            pending = None if self._is_claimed else self._pending
            self._is_claimed = True
        if pending is not None:
            pending.cancel()

    def _claim(self) -> bool:
        """Whether the caller is the first, and so the one, to end the get."""
        with self._lock:
            first, self._is_claimed = not self._is_claimed, True
        return first

    def _take(self) -> None:
        """Abort or release the cache, which is there."""
        declined = self.declined
        assert self._pending is not None
        assert self._link is not None
        try:
            delivery = self._pending.wait(timeout=0.0)
            try:
                if declined.readers == 1:
                    self._link.abort(declined.key, declined.reason)
            finally:
                delivery.release()
        except Exception as error:  # it has failed, or its producer has: nothing waits there
            log.debug("cache %.200r was not declined: %s", declined.key, str(error))
        self._end(declined)


class Decliner:
    """The declined reads of a consumer's worker; thread-safe."""

    def __init__(self, peers: Peers, submit: Submit, timeout: float):
        self._peers, self._submit, self._timeout = peers, submit, timeout
        self._lock = threading.Lock()
        self._reads: dict[tuple[str, str], DeclinedRead] = {}  # the oldest first

    def decline(self, declined: CancelledLoad, rank: int) -> None:
        """Take the read of a request at a rank of its producer when it is there; does not block."""
        read, oldest = DeclinedRead(declined, rank, self._forget), None
        name = declined.request_id, declined.key
        with self._lock:
            if name in self._reads:
                return
            if len(self._reads) >= MAX_DECLINED:
                oldest = self._reads.pop(next(iter(self._reads)))
            self._reads[name] = read
        if oldest is not None:
            oldest.withdraw()
        self._submit(lambda: read.request(self._peers, self._timeout, self._submit))

    def withdraw(self, url: str, key: str) -> None:
        """Leave the reads of a cache to a request that names it again."""
        self._withdraw(lambda one: (one.url, one.key) == (url, key))

    def close(self) -> None:
        """Withdraw all reads."""
        self._withdraw(lambda one: True)

    def _withdraw(self, matches: Callable[[CancelledLoad], bool]) -> None:
        with self._lock:
            reads = [(name, read) for name, read in self._reads.items() if matches(read.declined)]
            for name, _ in reads:
                del self._reads[name]
        for _, read in reads:
            read.withdraw()

    def _forget(self, declined: CancelledLoad) -> None:
        with self._lock:
            self._reads.pop((declined.request_id, declined.key), None)
