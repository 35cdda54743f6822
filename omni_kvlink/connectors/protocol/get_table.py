"""The consumer's half of the protocol: what is wanted, what came, without I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from omni_kvlink.connectors.protocol.messages import (
    Cancel,
    Committed,
    Failed,
    Get,
    Layer,
    Message,
    Offer,
    Outcome,
    Release,
    Status,
    unexpected,
)
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.errors import KVLinkError, PeerLostError, TransferFailed, TransferTimeout

NEVER_ANNOUNCED = "never announced by the producer"


class GetState:
    """One waiting `get`: its future ends with the producer's Offer, or the error to raise."""

    def __init__(self, number: int, key: str, streamed: bool = False):
        self.number, self.key, self.streamed = number, key, streamed
        self.arrival: object = None  # of a connector that brings the bytes here first
        self.phase = NEVER_ANNOUNCED
        self.started = time.monotonic()
        self.progress: Progress | None = None
        self.future: Future[Offer] = Future()
        self.future.set_running_or_notify_cancel()  # only the inbox ends it

    def timed_out(self) -> TransferTimeout:
        waited = time.monotonic() - self.started
        return TransferTimeout(
            f"no payload {self.key!r} after {waited:.3f} s: {self.phase}",
            key=self.key,
            waited=waited,
            phase=self.phase,
        )


class GetTable:
    """The wants of one connection; thread-safe.

    Args:
        send: takes a message for the producer; must not block.
        post: the same for finalizers: it may not even take a lock.
    """

    def __init__(self, send: Callable[[Message], None], post: Callable[[Message], None]):
        self._send, self._post = send, post
        self._lock = threading.Lock()
        self._open: dict[int, GetState] = {}
        self._streams: dict[int, GetState] = {}
        self._held: set[int] = set()
        self._number = 0
        self._over: KVLinkError | None = None

    def want(self, key: str, *, streamed: bool = False, early: bool = False) -> GetState:
        """Ask for a key; streamed: also while it is being written.

        Args:
            early: its bytes may come while it is being written, although its reader wants it whole.

        Raises:
            PeerLostError: the connection is over.
        """
        with self._lock:
            if self._over is not None:
                raise type(self._over)(str(self._over))
            self._number += 1
            wanted = self._open[self._number] = GetState(self._number, key, streamed)
        self._send(Get(wanted.number, key, streamed or early))
        return wanted

    def cancel(self, wanted: GetState) -> bool:
        """Stop waiting; False if the answer came first, so that the caller must take it."""
        with self._lock:
            if self._open.pop(wanted.number, None) is None:
                return False
        self._send(Cancel(wanted.number))
        return True

    def wait(self, wanted: GetState, timeout: float) -> Offer:
        """Sleep until the answer comes.

        Raises:
            TransferTimeout, TransferFailed, PeerLostError
        """
        try:
            return wanted.future.result(max(0.0, timeout))
        except FutureTimeout as error:
            if isinstance(error, TransferTimeout):  # the same class since Python 3.11
                raise
            if not self.cancel(wanted):
                return wanted.future.result()
            raise wanted.timed_out() from None
        except BaseException:
            if not self.cancel(wanted) and wanted.future.exception() is None:
                self.release(wanted.number, wanted.future.result().epoch, "unread")
            raise

    def find(self, number: int) -> GetState | None:
        """A want that is not answered yet."""
        with self._lock:
            return self._open.get(number)

    def release(self, want: int, epoch: int, outcome: Outcome, reason: str = "") -> None:
        self._streams.pop(want, None)
        self._held.discard(want)
        self._post(Release(want, epoch, outcome, reason))

    def on_message(self, message: Message) -> None:
        """Wake the `get` a message is for; an offer that came too late goes back unread."""
        if isinstance(message, Status):
            with self._lock:
                if message.want in self._open:
                    self._open[message.want].phase = message.phase
        elif isinstance(message, Offer):
            wanted = self._take(message.want)
            if message.want in self._held:
                return  # said twice: it is in use
            if wanted is None:
                self.release(message.want, message.epoch, "unread")
            else:
                self._held.add(message.want)
                if message.draft:
                    wanted.progress = Progress()
                    self._streams[message.want] = wanted
                wanted.future.set_result(message)
        elif isinstance(message, Failed):
            wanted = self._take(message.want)
            if wanted is not None:
                wanted.future.set_exception(failure(wanted.key, message))
            else:
                self._end_stream(message.want, message)
        elif isinstance(message, (Layer, Committed)):
            self._on_progress(message)
        else:
            unexpected(message)

    def end(self, error: KVLinkError) -> list[GetState]:
        """The connection is over: every waiting `get` raises, and so does every later one."""
        with self._lock:
            if self._over is None:
                self._over = error
            waiting, self._open = list(self._open.values()), {}
        for wanted in waiting:
            wanted.future.set_exception(type(error)(f"{error}; {wanted.key!r} was awaited"))
        self._end_streams(error)
        return waiting

    def fail(self, key: str, error: KVLinkError) -> None:
        """Wake every waiting `get` of one key with an error."""
        with self._lock:
            waiting = [wanted for wanted in self._open.values() if wanted.key == key]
            for wanted in waiting:
                del self._open[wanted.number]
        for wanted in waiting:
            wanted.future.set_exception(error)
        self._end_streams(error, key)

    @property
    def waiting(self) -> int:
        return len(self._open)

    def _on_progress(self, message: Layer | Committed) -> None:
        """Of a stream that was let go of, nothing is wanted any more."""
        wanted = self._streams.get(message.want)
        if wanted is None or wanted.progress is None:
            return
        if isinstance(message, Layer):
            wanted.progress.announce(message.first, message.digests)
        else:
            wanted.progress.commit()

    def _end_stream(self, number: int, message: Failed) -> None:
        wanted = self._streams.pop(number, None)
        if wanted is not None and wanted.progress is not None:
            wanted.progress.end(failure(wanted.key, message))

    def _end_streams(self, error: KVLinkError, key: str | None = None) -> None:
        for number in list(self._streams):  # of pairs, a finalizer could run in the midst
            wanted = self._streams.get(number)
            if wanted is not None and wanted.progress is not None and key in (None, wanted.key):
                self._streams.pop(number, None)
                wanted.progress.end(error)

    def _take(self, number: int) -> GetState | None:
        with self._lock:
            return self._open.pop(number, None)


def failure(key: str, message: Failed) -> KVLinkError:
    """What a `get` raises when the producer says this."""
    if message.ending == "closed":
        return PeerLostError(f"the producer closed the link while {key!r} was awaited")
    return TransferFailed(
        f"payload {key!r} {message.ending}: {message.reason}", key=key, reason=message.reason
    )
