"""The consumer's end of `shm://name`: each connection maps the producer's memory files."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakMethod

from omni_kvlink.connectors.base import Options, refuse_keys
from omni_kvlink.connectors.protocol.get_table import GetTable
from omni_kvlink.connectors.protocol.messages import (
    MAX_BATCH,
    SLOT,
    Abort,
    Cancel,
    Contained,
    Failed,
    Hello,
    Location,
    Memory,
    Message,
    Offer,
    Refused,
    Release,
    Retire,
    Status,
    own_hello,
)
from omni_kvlink.connectors.protocol.path import SHM_PATH
from omni_kvlink.connectors.runtime.consumer import (
    MappedGet,
    MappedSession,
    SessionConsumer,
    check_hello,
    closed_here,
)
from omni_kvlink.connectors.runtime.event_loop import (
    EDGE,
    READ,
    WRITE,
    EventLoop,
    LeadingReceiver,
    Wake,
    readable_pidfd,
)
from omni_kvlink.connectors.runtime.owner import peer_identity
from omni_kvlink.connectors.runtime.turns import MANY_TURNS, TURN
from omni_kvlink.connectors.runtime.user_files import wait_readable
from omni_kvlink.connectors.shm import rendezvous
from omni_kvlink.connectors.shm.channel import ShmChannel
from omni_kvlink.connectors.shm.reader_arenas import ReaderArenas
from omni_kvlink.errors import (
    ConnectorError,
    KVLinkError,
    PeerLostError,
    TransferTimeout,
    WireError,
    format_seconds,
    without_frames,
)
from omni_kvlink.memory.arena import GRAIN
from omni_kvlink.memory.region import call_if_alive
from omni_kvlink.system import process
from omni_kvlink.system.failures import is_of_system, system_error

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Sequence

    from omni_kvlink.memory.region import Region

T = TypeVar("T")
_LEADER_SECONDS = 1.0
"""Seconds that a thread may take to leave a connection whose producer has ended to the loop."""
_RETRY_SECONDS = 0.03
"""Seconds after which a consumer tries again while what serves its name hangs up."""
_ANSWERS = (Offer, Status, Failed, Contained)


class ShmConsumer(SessionConsumer):
    """The consuming end of `shm://name`."""

    def __init__(self, name: str, options: Options):
        super().__init__(f"shm://{name}", options.require)
        refuse_keys(self._url, options)
        self._allow_uids = options.allow_uids
        self._path = rendezvous.socket_path(name, options.directory, self._allow_uids)
        self._cancelled: Wake | None = Wake()

    def _interrupt(self) -> None:
        cancelled, self._cancelled = self._cancelled, None  # closed once no thread uses it
        if cancelled is not None:
            cancelled.set()

    def _open(self, timeout: float, *, no_wait: bool = False) -> ShmSession:
        deadline, cancelled = time.monotonic() + timeout, self._cancelled
        if cancelled is None:
            raise closed_here(self._url)
        while True:
            wait = 0.0 if no_wait else deadline - time.monotonic()
            is_shared = bool(self._allow_uids)
            sock = rendezvous.dial(self._path, wait, cancelled.fd, is_shared=is_shared)
            try:
                return ShmSession(
                    self._url, sock, deadline, cancelled.fd, self._allow_uids, self._require
                )
            except PeerLostError as error:  # the producer died during the handshake, or is no one
                wait = deadline - time.monotonic()
                if no_wait:
                    raise
                if wait <= 0:
                    text = f"{error}, which it did for {format_seconds(timeout)}"
                    raise TransferTimeout(text, waited=timeout, phase="shaking hands") from None
                wait_readable(min(wait, _RETRY_SECONDS), cancelled.fd)


class ShmSession(LeadingReceiver, MappedSession):
    """One connection, its mapped arenas, and the thread that receives; it owns `sock`.

    The constructor blocks until the handshake is complete, until `deadline` (`time.monotonic`) at
    most, or until the descriptor `cancelled` becomes readable: the link was closed.

    When the session is closed (`is_closed`) while its payloads are in use, the connection stays
    until the last is released: the producer reuses their memory then, and not before.

    Raises:
        TransferTimeout: the producer did not answer in time.
        PeerLostError: it went away during the handshake.
        ConnectorError: it is another user's, or refused this process; or there is no descriptor.
    """

    def __init__(
        self,
        url: str,
        sock: socket.socket,
        deadline: float,
        cancelled: int,
        allow_uids: Collection[int],
        require: Sequence[str] = (),
    ):
        super().__init__()
        self.path = SHM_PATH
        self._url = url
        self._arenas = ReaderArenas(url)
        self._watching = threading.Lock()  # held while it is decided what the loop waits for
        self._has_exited = False  # the producer's process
        self._posted = deque[Message]()  # by finalizers, to be sent in this order
        self._process = process.current
        self._flushing = threading.RLock()  # held by the thread that sends them
        self._coalescing = set[int]()  # threads that send themselves what they post
        self._leases = set[int]()  # gets whose offers are not released
        self._reads = READ  # 0 when nothing more is to be received
        self._has_turn = False  # the loop has deferred its next turn to receive
        self._turns = 0  # in a row that ended early
        self._throttled = 0
        self._has_ended = False
        self._close_done = threading.Event()
        self._pidfd = -1
        self._channel = ShmChannel(sock, lambda: self._loop.call(self._flush_in_loop))
        try:
            self._pid, _ = peer_identity(sock)
            refusal = rendezvous.refusal(sock, allow_uids, "send to")
            if refusal:
                raise ConnectorError(f"{url}: {refusal}")
            self._wake = Wake()
            self._channel.send(own_hello(require=tuple(require)))
            hello = self._receive_hello(deadline, cancelled)
            self.take_hello(hello)
            self._pidfd = readable_pidfd(self._pid)
            self._loop = EventLoop("kvlink-reader", crashed=self._crashed_in_loop)
        except BaseException as error:
            self._channel.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._wake = None  # now: the session is in a reference cycle
            if isinstance(error, Exception) and is_of_system(error):
                raise system_error(error, f"{url}: the handshake failed") from None
            raise
        wake = partial(self._loop.call, partial(call_if_alive, WeakMethod(self._send_posted)))
        post = partial(_post, self._posted, self._coalescing, wake)
        make, send_all = partial(MappedGet, self), self._channel.send_all
        self.get_table = GetTable(make, self._send, post, send_all, self.coalesce)
        self._loop.call(self._watch_in_loop)

    def slot(self, location: Location, draft: int) -> Region:
        """Return the mapped slot of an offer, if it lies within an arena that was passed."""
        mapping = self._arenas.get(location.arena)
        if mapping is None and self._has_ended:
            raise PeerLostError(f"{self._url}: the producer is gone; its payload came too late")
        if mapping is None:
            raise WireError(
                f"a payload was offered in arena {location.arena}, which was not passed"
            )
        nbytes = SLOT + location.nbytes + draft
        if location.offset % GRAIN or location.offset + nbytes > mapping.nbytes:
            raise WireError(
                f"a payload of {location.nbytes} bytes was offered at {location.offset} "
                f"in an arena of {mapping.nbytes}"
            )
        return mapping.region.slice(location.offset, nbytes)

    def send(self, message: Abort | Refused) -> None:
        """Send a message to the producer; does not block."""
        self._channel.send(message)

    def coalesce(self, act: Callable[[], T]) -> T:
        """Call `act`; this thread sends its releases, with its first request or after it.

        Releases of finalizers at other times are sent by the loop, which must be woken for that.
        """
        thread = threading.get_ident()
        if thread in self._coalescing or not self._process.is_current:
            return act()  # a forked child sends nothing
        try:
            self._coalescing.add(thread)
            result = act()
            self._coalescing.discard(thread)
            if self._posted:
                self._send_posted()
        except BaseException:
            self._coalescing.discard(thread)
            self._loop.call(self._send_posted)
            raise
        return result

    def fail(self, key: str, error: KVLinkError) -> None:
        """Fail every get of this key that waits here."""
        super().fail(key, error)
        self._wake_leader()

    def stats(self) -> dict[str, Any]:
        """Return the producer's process, what is mapped of it, and how often it was throttled.

        `pid` is 0 if that process is in another namespace of processes.
        """
        mapped = self._arenas.stats()
        return {"pid": self._pid, "mapped": mapped, "throttled": self._throttled}

    def close(self) -> None:
        """Fail the gets; disconnect when the last view is freed."""
        if self._loop.is_own_thread:  # the link was garbage-collected in this very thread
            self._close_in_loop()
            return
        self._loop.call(self._close_in_loop)
        self._close_done.wait()
        if self._has_ended:
            self._loop.close()

    def _begin_leading(self, get: object) -> int:
        self._watch_channel()
        return self._channel.fd

    def _receive_next(self, get: object) -> bool:
        """Handle what came next, if it answers gets; return whether to wait on.

        An interrupt at any line loses nothing: the message is taken away at last, and to handle it
        twice changes nothing.
        """
        try:
            messages = self._channel.peek()
        except (ConnectionError, WireError):
            return False
        if messages:
            for message in messages:
                if not isinstance(message, _ANSWERS):
                    return False
            self._on_messages(messages, -1)
            self._channel.skip()
        return not self._has_exited

    def _receive_hello(self, deadline: float, cancelled: int) -> Hello:
        """Return the producer's Hello, the answer to this side's."""
        while True:
            seconds = deadline - time.monotonic()
            ready = wait_readable(seconds, self._channel.fd, cancelled)
            if cancelled in ready:
                raise closed_here(self._url)
            if seconds <= 0 or not ready:
                raise TransferTimeout(
                    f"{self._url}: the producer does not answer", phase="shaking hands"
                )
            for messages, fd in self._channel.receive():
                if fd >= 0:
                    os.close(fd)
                return check_hello(self._url, messages[0])

    def _send(self, message: Message) -> None:
        """Send a message of the table, behind what this thread has released."""
        if self._posted and threading.get_ident() in self._coalescing:
            self._send_posted(message)
        else:
            self._channel.send(message)

    def _watch_in_loop(self) -> None:
        if self._has_ended:
            return  # a thread that received for a moment had the channel watched earlier
        try:
            self._watch_channel()
            if self._pidfd >= 0:
                self._loop.watch(self._pidfd, READ, self._on_exit_in_loop)
        except ConnectorError as error:
            self._end_gets_in_loop(PeerLostError(f"{self._url}: {error}"))
            self._disconnect_in_loop()

    def _send_posted(self, *last: Message) -> None:
        """Send what finalizers have posted, then `last`, which is at most one; any thread."""
        with self._flushing:
            while self._posted or last:
                # In one step: signal handlers and finalizers change the deque.
                messages = [*self._posted][: MAX_BATCH - len(last)]
                self._channel.send_all([*messages, *last])
                last = ()
                for message in messages:
                    if isinstance(message, Release):
                        self._leases.discard(message.get_id)
                    try:  # noqa: SIM105 (a context manager costs more than the rest)
                        self._posted.remove(message)
                    except ValueError:  # a signal handler was faster
                        pass
        if self.is_closed:
            self._loop.call(self._flush_in_loop)

    def _close_in_loop(self) -> None:
        self._end_gets_in_loop(closed_here(self._url))
        self._close_done.set()

    def _flush_in_loop(self) -> None:
        """Send what the socket takes; disconnect a closed session that has released everything."""
        if self._has_ended:
            return
        is_sent = self._channel.flush()
        if is_sent and self.is_closed and not self._leases:
            self._disconnect_in_loop()
        else:
            self._watch_channel()

    def _watch_channel(self) -> None:
        """Have the loop wait for what it handles now; any thread, after each change of that.

        It is woken once for what is there, and again when more comes: woken as long as anything is
        there, it would spin, and hold up the thread that is about to receive that.
        """
        with self._watching:
            reads = 0 if self._leader else self._reads
            events = 0 if self._has_ended else reads | (WRITE if self._channel.has_backlog else 0)
            if events:
                self._loop.watch(self._channel.fd, events | EDGE, self._on_events_in_loop)
            else:
                self._loop.unwatch(self._channel.fd)

    def _on_events_in_loop(self, events: int) -> None:
        if events & WRITE:
            self._flush_in_loop()
        if not self._has_turn:
            self._take_turn_in_loop()

    def _take_turn_in_loop(self) -> None:
        """Receive what one turn takes, and the rest in later ones: calls and deadlines come first.

        The channel is watched for what arrives anew: what is there already wakes nobody.
        """
        self._has_turn = False
        if not self._receiving.acquire(blocking=False):
            return  # a thread that waits for a payload receives
        try:
            self._receive_in_loop(TURN)
            is_drained = not self._reads or self._channel.is_drained
            self._has_turn = not is_drained and self._channel.has_unread
        finally:
            self._receiving.release()
        self._turns = self._turns + 1 if self._has_turn else 0
        if self._has_turn:
            self._throttled += 1
            self._loop.defer(self._take_turn_in_loop, paused=self._turns > MANY_TURNS)

    def _receive_in_loop(self, turn: float) -> None:
        if not self._reads or self._has_ended:
            return
        try:
            for messages, fd in self._channel.receive(turn):
                self._on_messages(messages, fd)
        except ConnectionError:
            self._reads = 0
            self._end_gets_in_loop(PeerLostError(f"{self._url}: the producer is gone"))
        except KVLinkError as error:
            if self.is_closed:
                self._reads = 0
            self._end_gets_in_loop(error)
        except OSError as error:  # gets are repeated over another connection
            self._end_gets_in_loop(PeerLostError(str(system_error(error, self._url))))

    def _on_messages(self, messages: Sequence[Message], fd: int) -> None:
        if isinstance(messages[0], Memory) and len(messages) == 1:
            self._arenas.add(messages[0], fd)
            return
        if fd >= 0:
            os.close(fd)
            raise WireError(f"{self._url} passed a descriptor that was not announced")
        for message in messages:
            if isinstance(message, Retire):
                self._arenas.pop(message.arena, None)
                continue
            if isinstance(message, Offer):
                # What was released before goes out first: a process killed after a get has not
                # kept the lease of the one before.
                if self._posted:
                    self._send_posted()
                self._leases.add(message.get_id)
            self.get_table.on_message(message)

    def _on_exit_in_loop(self, events: int) -> None:
        self._has_exited = True
        if self._wake is not None:
            self._wake.set()
        self._channel.finish_receiving()  # a child of it may hold the socket open
        if self._receiving.acquire(timeout=_LEADER_SECONDS):
            try:
                self._receive_in_loop(float("inf"))
            finally:
                self._receiving.release()
        self._end_gets_in_loop(PeerLostError(f"{self._url}: the producer's process ended"))
        self._disconnect_in_loop()

    def _end_gets_in_loop(self, error: KVLinkError) -> None:
        """Fail the gets; disconnect now, or when the last lease was released."""
        if not self.is_closed:
            self.is_closed = True
            # They would keep this session alive, and with it a descriptor.
            for get_state in self.get_table.close(without_frames(error)):
                self._channel.send(Cancel(get_state.get_id))
            self._wake_leader()
        if self._channel.is_hung_up:
            self._disconnect_in_loop()  # nobody is there to release anything to
        else:
            self._flush_in_loop()

    def _disconnect_in_loop(self) -> None:
        """Disconnect, and end the loop."""
        if self._has_ended:
            return
        self._has_ended = True
        wake, self._wake = self._wake, None  # closed once no thread uses it
        if wake is not None:
            wake.set()
        self._channel.flush()
        self._watch_channel()
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
        self._channel.close()
        self._arenas.clear()
        self.get_table.disconnect()
        self._close_done.set()
        self._loop.close()

    def _crashed_in_loop(self, error: BaseException) -> None:
        self._end_gets_in_loop(
            PeerLostError(f"{self._url}: the reading thread broke down: {error!r}")
        )
        self._disconnect_in_loop()


def _post(
    posted: deque[Message], coalescing: set[int], wake: Callable[[], None], message: Message
) -> None:
    """Have a session send a message; for finalizers: it takes no lock, and no socket.

    After its end a session is kept by no view that is still in use.
    """
    posted.append(message)
    if threading.get_ident() not in coalescing:
        wake()
