"""How far a streamed payload has come, on the side that reads it."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from omni_kvlink.errors import KVLinkError, WireError
from omni_kvlink.payload.header import MAX_HEADER, MAX_TENSORS


class Progress:
    """Fed by the connection's thread, waited for by any other; tensors count as in the manifest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._nbytes = 0
        self._over: KVLinkError | None = None
        self._is_whole = False
        self._waiting: dict[Future[None], range] = {}
        self.whole: Future[None] = Future()
        """Ends with the commit, or with the error that ended the stream."""
        self.whole.set_running_or_notify_cancel()

    def announce(self, first: int, digests: tuple[bytes, ...]) -> None:
        """The tensors from number `first` on are there.

        Raises:
            WireError: more than any payload has, or one that is there already.
        """
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
        """All are there; a layer that is not, never comes."""
        gap = WireError("it was committed, but not every layer of it was announced")
        if self._stop(gap, whole=True):
            self.whole.set_result(None)

    def end(self, error: KVLinkError) -> None:
        """No more will come: whoever waits raises, and so does whoever asks later."""
        if self._stop(error):
            self.whole.set_exception(error)

    def when(self, tensors: range) -> Future[None]:
        """A future that ends when all of them are there, or with the error."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # only this object ends it
        with self._lock:
            if (self._over is None or self._is_whole) and self._has(tensors):
                future.set_result(None)
            elif self._over is None:
                self._waiting[future] = tensors
            else:
                future.set_exception(self._over)
        return future

    def forget(self, future: Future[None]) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._waiting.pop(future, None)

    def digest(self, tensor: int) -> bytes:
        """Four bytes a MiB, of a tensor that is there; empty if digests are off."""
        return self._digests[tensor]

    def _stop(self, error: KVLinkError, *, whole: bool = False) -> bool:
        with self._lock:
            if self._over is not None:
                return False
            self._over, self._is_whole = error, whole
            waiting, self._waiting = list(self._waiting), {}
        for future in waiting:
            future.set_exception(error)
        return True

    def _has(self, tensors: range) -> bool:
        return all(tensor in self._digests for tensor in tensors)
