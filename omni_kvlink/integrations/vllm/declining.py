"""Reads that no request needs any more: producers must neither wait for them nor keep blocks."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.lowlevel import BackgroundGet, begin_get

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm.peers import Peers
    from omni_kvlink.integrations.vllm.step import CancelledLoad
    from omni_kvlink.lowlevel import Delivery

log = logging.getLogger(f"vllm.{__name__}")

MAX_DECLINED = 4096
"""Reads that may wait for their caches; the oldest is withdrawn for another one."""

Submit: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a function in the thread pool."""


class DeclinedRead:
    """One declined read: a get that waits, without a thread, until its cache is put.

    The get, unlike an abort, also reaches a cache that is put later. The cache is aborted if the
    read was its only one, and else released as read.
    """

    def __init__(
        self,
        declined: CancelledLoad,
        rank: int,
        peers: Peers,
        submit: Submit,
        end: Callable[[CancelledLoad], None],
    ):
        self.declined, self._end = declined, end
        self.get = BackgroundGet(
            declined.key,
            partial(peers.link, declined.url, rank=rank),
            partial(begin_get, streamed=True),
            math.inf,
            submit=submit,
            copy=self._take,
            fail=self._fail,
        )

    def _take(self, delivery: Delivery) -> None:
        """Abort or release the cache, which is there."""
        declined = self.declined
        try:
            try:
                if declined.readers == 1:
                    self.get.link.abort(declined.key, declined.reason)
            finally:
                delivery.release()
        except Exception as error:
            self._fail(error)
        else:
            self._end(declined)

    def _fail(self, error: Exception) -> None:
        if self.get.is_requested:  # the cache has failed, or its producer: nothing waits there
            log.debug("cache %.200r was not declined: %s", self.declined.key, str(error))
        else:
            log.warning("cache %.200r could not be declined: %s", self.declined.key, str(error))
        self._end(self.declined)


class Decliner:
    """The declined reads of a consumer's worker; thread-safe."""

    def __init__(self, peers: Peers, submit: Submit, timeout: float):
        self._peers, self._submit, self._timeout = peers, submit, timeout
        self._lock = threading.Lock()
        self._reads: dict[tuple[str, str], DeclinedRead] = {}  # the oldest first

    def decline(self, declined: CancelledLoad, rank: int = 0) -> None:
        """Take the read of a request at a rank of its producer when it is there; does not block."""
        read = DeclinedRead(declined, rank, self._peers, self._submit, self._forget)
        oldest: DeclinedRead | None = None
        name = declined.request_id, declined.key
        with self._lock:
            if name in self._reads:
                return
            if len(self._reads) >= MAX_DECLINED:
                oldest = self._reads.pop(next(iter(self._reads)))
            self._reads[name] = read
        if oldest is not None:
            oldest.get.cancel()
        self._submit(partial(read.get.request, self._timeout))

    def withdraw(self, url: str, key: str) -> None:
        """Leave the reads of a cache to a request that names it again."""
        self._withdraw(lambda read: (read.url, read.key) == (url, key))

    def close(self) -> None:
        """Withdraw all reads."""
        self._withdraw(lambda read: True)

    def _withdraw(self, matches: Callable[[CancelledLoad], bool]) -> None:
        with self._lock:
            reads = [(name, read) for name, read in self._reads.items() if matches(read.declined)]
            for name, _ in reads:
                del self._reads[name]
        for _, read in reads:
            read.get.cancel()

    def _forget(self, declined: CancelledLoad) -> None:
        with self._lock:
            self._reads.pop((declined.request_id, declined.key), None)
