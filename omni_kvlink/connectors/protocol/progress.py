"""`Progress`: how much of a payload that is still being written has been announced."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from omni_kvlink.errors import WireError
from omni_kvlink.payload.format import MAX_HEADER, MAX_TENSORS

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
        self._waiting: dict[Future[None], range] = {}
        self.whole: Future[None] = Future()
        self.whole.set_running_or_notify_cancel()

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
            ready = [future for future, tensors in self._waiting.items() if self._has(tensors)]
            for future in ready:
                del self._waiting[future]
        for future in ready:
            future.set_result(None)

    def commit(self) -> None:
        """All tensors are there; waiting for one that was not announced fails."""
        gap = WireError("it was committed, but not every layer of it was announced")
        if self._close(gap, whole=True):
            self.whole.set_result(None)

    def fail(self, error: KVLinkError) -> None:
        """No more tensors will come: futures that wait, and later ones, get the error."""
        if self._close(error):
            self.whole.set_exception(error)

    def when(self, tensors: range) -> Future[None]:
        """Return a future that ends when all of these are there, or with the stream's error."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # only this object ends it
        with self._lock:
            if (self._error is None or self._is_whole) and self._has(tensors):
                future.set_result(None)
            elif self._error is None:
                self._waiting[future] = tensors
            else:
                future.set_exception(self._error)
        return future

    def cancel(self, future: Future[None]) -> None:
        """Stop tracking a future of `when`; it is never set then."""
        with self._lock:
            self._waiting.pop(future, None)

    def digest(self, tensor: int) -> bytes:
        """Return the digest of a tensor that is there: four bytes a MiB; b"" if digests are off."""
        return self._digests[tensor]

    def _close(self, error: KVLinkError, *, whole: bool = False) -> bool:
        with self._lock:
            if self._error is not None:
                return False
            self._error, self._is_whole = error, whole
            waiting, self._waiting = list(self._waiting), {}
        for future in waiting:
            future.set_exception(error)
        return True

    def _has(self, tensors: range) -> bool:
        return all(tensor in self._digests for tensor in tensors)
