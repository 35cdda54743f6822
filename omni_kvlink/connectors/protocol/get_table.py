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
        self.inbound: object = None  # of a connector that brings the bytes here first
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

    def request(self, key: str, *, streamed: bool = False, early: bool = False) -> GetState:
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
            get_state = self._open[self._number] = GetState(self._number, key, streamed)
        self._send(Get(get_state.number, key, streamed or early))
        return get_state

    def cancel(self, get_state: GetState) -> bool:
        """Stop waiting; False if the answer came first, so that the caller must take it."""
        with self._lock:
            if self._open.pop(get_state.number, None) is None:
                return False
        self._send(Cancel(get_state.number))
        return True

    def wait(self, get_state: GetState, timeout: float) -> Offer:
        """Sleep until the answer comes.

        Raises:
            TransferTimeout, TransferFailed, PeerLostError
        """
        try:
            return get_state.future.result(max(0.0, timeout))
        except FutureTimeout as error:
            if isinstance(error, TransferTimeout):  # the same class since Python 3.11
                raise
            if not self.cancel(get_state):
                return get_state.future.result()
            raise get_state.timed_out() from None
        except BaseException:
            if not self.cancel(get_state) and get_state.future.exception() is None:
                self.release(get_state.number, get_state.future.result().epoch, "unread")
            raise

    def find(self, number: int) -> GetState | None:
        """A want that is not answered yet."""
        with self._lock:
            return self._open.get(number)

    def release(self, get_id: int, epoch: int, outcome: Outcome, reason: str = "") -> None:
        self._streams.pop(get_id, None)
        self._held.discard(get_id)
        self._post(Release(get_id, epoch, outcome, reason))

    def on_message(self, message: Message) -> None:
        """Wake the `get` a message is for; an offer that came too late goes back unread."""
        if isinstance(message, Status):
            with self._lock:
                if message.get_id in self._open:
                    self._open[message.get_id].phase = message.phase
        elif isinstance(message, Offer):
            get_state = self._take(message.get_id)
            if message.get_id in self._held:
                return  # said twice: it is in use
            if get_state is None:
                self.release(message.get_id, message.epoch, "unread")
            else:
                self._held.add(message.get_id)
                if message.draft:
                    get_state.progress = Progress()
                    self._streams[message.get_id] = get_state
                get_state.future.set_result(message)
        elif isinstance(message, Failed):
            get_state = self._take(message.get_id)
            if get_state is not None:
                get_state.future.set_exception(failure(get_state.key, message))
            else:
                self._end_stream(message.get_id, message)
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
        for get_state in waiting:
            get_state.future.set_exception(type(error)(f"{error}; {get_state.key!r} was awaited"))
        self._end_streams(error)
        return waiting

    def fail(self, key: str, error: KVLinkError) -> None:
        """Wake every waiting `get` of one key with an error."""
        with self._lock:
            waiting = [get_state for get_state in self._open.values() if get_state.key == key]
            for get_state in waiting:
                del self._open[get_state.number]
        for get_state in waiting:
            get_state.future.set_exception(error)
        self._end_streams(error, key)

    @property
    def waiting(self) -> int:
        return len(self._open)

    def _on_progress(self, message: Layer | Committed) -> None:
        """Of a stream that was let go of, nothing is wanted any more."""
        get_state = self._streams.get(message.get_id)
        if get_state is None or get_state.progress is None:
            return
        if isinstance(message, Layer):
            get_state.progress.announce(message.first, message.digests)
        else:
            get_state.progress.commit()

    def _end_stream(self, number: int, message: Failed) -> None:
        get_state = self._streams.pop(number, None)
        if get_state is not None and get_state.progress is not None:
            get_state.progress.end(failure(get_state.key, message))

    def _end_streams(self, error: KVLinkError, key: str | None = None) -> None:
        for number in list(self._streams):  # of pairs, a finalizer could run in the midst
            get_state = self._streams.get(number)
            if (
                get_state is not None
                and get_state.progress is not None
                and key in (None, get_state.key)
            ):
                self._streams.pop(number, None)
                get_state.progress.end(error)

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
