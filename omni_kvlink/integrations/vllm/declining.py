"""Reads that no request needs any more: producers must neither wait for them nor keep blocks."""

from __future__ import annotations

import logging
import math
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.lowlevel import BackgroundGet, begin_get

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.integrations.vllm.peers import Peers
    from omni_kvlink.integrations.vllm.step import CancelledLoad
    from omni_kvlink.lowlevel import Delivery

log = logging.getLogger(f"vllm.{__name__}")

MAX_DECLINED = 4096
"""Reads that may wait for their payloads; the oldest is withdrawn for another one."""


class DeclinedRead(NamedTuple):
    """A declined read: a get that waits, without a thread, until its payload is put."""

    declined: CancelledLoad
    get: BackgroundGet


class Decliner:
    """The declined reads of a consumer; thread-safe. `submit` runs a function in a thread pool.

    The get of a read, unlike an abort, also reaches a payload that is put later, which is aborted
    if the read was its only one, and else released as read.
    """

    def __init__(
        self, peers: Peers, submit: Callable[[Callable[[], None]], object], timeout: float
    ):
        self._peers, self._submit, self._timeout = peers, submit, timeout
        self._lock = threading.Lock()
        self._reads: dict[tuple[str, str], DeclinedRead] = {}  # the oldest first

    def decline(self, declined: CancelledLoad, rank: int = 0) -> None:
        """Take the read of a request at a rank of its producer when it is there; does not block."""
        get = BackgroundGet(
            declined.key,
            partial(self._peers.link, declined.url, rank=rank),
            partial(begin_get, streamed=True),
            math.inf,
            submit=self._submit,
            copy=lambda delivery: self._take(read, delivery),
            fail=lambda error: self._fail(read, error),
        )
        read, name = DeclinedRead(declined, get), (declined.request_id, declined.key)
        oldest: DeclinedRead | None = None
        with self._lock:
            if name in self._reads:
                return
            if len(self._reads) >= MAX_DECLINED:
                oldest = self._reads.pop(next(iter(self._reads)))
            self._reads[name] = read
        if oldest is not None:
            oldest.get.cancel()
        self._submit(partial(get.request, self._timeout))

    def withdraw(self, url: str, key: str) -> None:
        """Leave the reads of a payload to a request that names it again."""
        self._withdraw(lambda read: (read.url, read.key) == (url, key))

    def close(self) -> None:
        """Withdraw all reads."""
        self._withdraw(lambda read: True)

    def _withdraw(self, matches: Callable[[CancelledLoad], bool]) -> None:
        with self._lock:
            reads = [read for read in self._reads.values() if matches(read.declined)]
        for read in reads:
            self._forget(read)
            read.get.cancel()

    def _take(self, read: DeclinedRead, delivery: Delivery) -> None:
        """Abort or release the payload, which is there."""
        declined, get = read
        try:
            try:
                if declined.readers == 1:
                    get.link.abort(declined.key, declined.reason)
            finally:
                delivery.release()
        except Exception as error:
            self._fail(read, error)
        else:
            self._forget(read)

    def _fail(self, read: DeclinedRead, error: Exception) -> None:
        if read.get.is_requested:  # the payload has failed, or its producer: nothing waits there
            log.debug("payload %.200r was not declined: %s", read.declined.key, str(error))
        else:
            log.warning("payload %.200r could not be declined: %s", read.declined.key, str(error))
        self._forget(read)

    def _forget(self, read: DeclinedRead) -> None:
        with self._lock:
            self._reads.pop((read.declined.request_id, read.declined.key), None)
