"""How far a streamed payload has come, on the side that reads it."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from ..errors import KVLinkError


class Progress:
    """Fed by the connection's thread, waited for by any other; tensors count as in the manifest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._error: KVLinkError | None = None
        self._waiting: dict[Future[None], range] = {}
        self.whole: Future[None] = Future()
        """Ends with the commit, or with the error that ended the stream."""
        self.whole.set_running_or_notify_cancel()

    def announce(self, first: int, digests: tuple[bytes, ...]) -> None:
        """The tensors from number `first` on are there."""
        with self._lock:
            self._digests.update(enumerate(digests, first))
            ready = [future for future, tensors in self._waiting.items() if self._has(tensors)]
            for future in ready:
                del self._waiting[future]
        for future in ready:
            future.set_result(None)

    def commit(self) -> None:
        """All are there."""
        if not self.whole.done():
            self.whole.set_result(None)

    def end(self, error: KVLinkError) -> None:
        """No more will come: whoever waits raises, and so does whoever asks later."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiting, self._waiting = list(self._waiting), {}
        for future in waiting:
            future.set_exception(error)
        if not self.whole.done():
            self.whole.set_exception(error)

    def when(self, tensors: range) -> Future[None]:
        """A future that ends when all of them are there, or with the error."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # only this object ends it
        with self._lock:
            has, error = self._has(tensors), self._error
            if not has and error is None:
                self._waiting[future] = tensors
                return future
        if error is None or (has and self._is_whole):
            future.set_result(None)
        else:
            future.set_exception(error)
        return future

    def forget(self, future: Future[None]) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._waiting.pop(future, None)

    def digest(self, tensor: int) -> bytes:
        """Four bytes a MiB, of a tensor that is there; empty if digests are off."""
        return self._digests[tensor]

    @property
    def _is_whole(self) -> bool:
        return self.whole.done() and self.whole.exception() is None

    def _has(self, tensors: range) -> bool:
        return all(tensor in self._digests for tensor in tensors)
