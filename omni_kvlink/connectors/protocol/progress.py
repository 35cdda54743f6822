"""`Progress`: how much of a payload that is still being written has been announced."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from omni_kvlink.errors import WireError
from omni_kvlink.payload.format import MAX_HEADER, MAX_TENSORS
from omni_kvlink.system.waits import Answer

if TYPE_CHECKING:
    from omni_kvlink.errors import KVLinkError


class Progress:
    """The part of a streamed payload that is there; tensors are numbered as in the manifest.

    Thread-safe: the connection's thread reports, any other thread waits. `whole` ends with the
    commit, or with the error that ended the stream.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._nbytes = 0
        self._error: KVLinkError | None = None
        self._is_whole = False
        self._waiting: dict[Answer[None], range] = {}
        self.whole: Answer[None] = Answer()
        self.extra = b""  # of the commit

    def announce(self, first: int, digests: tuple[bytes, ...]) -> None:
        """The tensors from number `first` on are there; WireError if a payload cannot have them."""
        numbers = range(first, first + len(digests))
        with self._lock:
            self._nbytes += sum(map(len, digests))
            if numbers.stop > MAX_TENSORS or self._nbytes > MAX_HEADER:
                raise WireError(f"tensors up to {numbers.stop} were announced: no payload has them")
            if any(number in self._digests for number in numbers):
                raise WireError(f"tensors from {first} on were announced twice")
            self._digests.update(zip(numbers, digests, strict=True))
            ready = [answer for answer, tensors in self._waiting.items() if self._has(tensors)]
            for answer in ready:
                del self._waiting[answer]
        for answer in ready:
            answer.set_result(None)

    def commit(self, extra: bytes = b"") -> None:
        """All tensors are there; waiting for one that was not announced fails."""
        self.extra = extra
        gap = WireError("it was committed, but not every layer of it was announced")
        if self._close(gap, whole=True):
            self.whole.set_result(None)

    def fail(self, error: KVLinkError) -> None:
        """No more tensors will come: answers that are awaited, and later ones, get the error."""
        if self._close(error):
            self.whole.set_error(error)

    def when(self, tensors: range) -> Answer[None]:
        """Return an answer that comes when all of these are there, or with the stream's error."""
        answer: Answer[None] = Answer()
        with self._lock:
            if (self._error is None or self._is_whole) and self._has(tensors):
                answer.set_result(None)
            elif self._error is None:
                self._waiting[answer] = tensors
            else:
                answer.set_error(self._error)
        return answer

    def cancel(self, answer: Answer[None]) -> None:
        """Stop tracking an answer of `when`; it is never set then."""
        with self._lock:
            self._waiting.pop(answer, None)

    def digest(self, tensor: int) -> bytes:
        """Return the digest of a tensor that is there: four bytes a MiB; b"" if digests are off."""
        return self._digests[tensor]

    def _close(self, error: KVLinkError, *, whole: bool = False) -> bool:
        with self._lock:
            if self._error is not None:
                return False
            self._error, self._is_whole = error, whole
            waiting, self._waiting = list(self._waiting), {}
        for answer in waiting:
            answer.set_error(error)
        return True

    def _has(self, tensors: range) -> bool:
        return all(tensor in self._digests for tensor in tensors)
