"""The requests of one engine that read a payload which several of them name; without I/O."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ReadEnd(enum.Enum):
    """The end of the read of a request that does not need it any more."""

    NONE = "the request has none, or has used it"
    RETURN = "another request of this engine takes it"
    DECLINE = "no request of this engine takes it: the producer must not wait for it"


class PayloadReads:
    """The reads of one payload, and the live requests of this engine that name it.

    A payload has `readers` reads, and each request takes one, to load it or to decline it. If more
    requests than `readers` name it, the last ones have none: they use what the others have loaded.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.taken: dict[str, Request] = {}  # the requests that took a read
        self._waiting: dict[str, Request] = {}  # those without one so far
        self._live: set[str] = set()

    @property
    def unused(self) -> int:
        """Reads that no request has taken."""
        return max(0, self.readers - len(self.taken))

    def add(self, request: Request, readers: int) -> None:
        """A request names the payload."""
        self.readers = max(self.readers, readers)
        self._waiting[request.request_id] = request
        self._live.add(request.request_id)

    def take(self, request: Request) -> bool:
        """Give a request a read, for a load; False if there is none left for it."""
        if request.request_id not in self._waiting or not self.unused:
            return False
        self.taken[request.request_id] = self._waiting.pop(request.request_id)
        return True

    def give_up(self, request: Request) -> ReadEnd:
        """The request does not need the payload: it has not used its read, or has taken none."""
        name = request.request_id
        was_waiting = self._waiting.pop(name, None) is not None
        # A request that was waiting would decline one of the unused reads.
        is_needed = len(self._waiting) > self.unused - was_waiting
        if was_waiting:
            if is_needed:
                return ReadEnd.NONE
            self.taken[name] = request
            return ReadEnd.DECLINE
        if name not in self.taken:
            return ReadEnd.NONE
        if is_needed:
            del self.taken[name]
            return ReadEnd.RETURN
        return ReadEnd.DECLINE

    def remove(self, request: Request) -> bool:
        """A request has ended; True if it was the last one that named the payload."""
        self._live.discard(request.request_id)
        return not self._live
