"""Shared memory: memory files passed over a Unix socket, mapped once by each consumer."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.connectors.base import Options, refuse_keys
from omni_kvlink.connectors.protocol.get_table import GetTable
from omni_kvlink.connectors.protocol.messages import (
    MAX_BATCH,
    MAX_MESSAGE,
    PROTOCOL,
    SLOT,
    Abort,
    Cancel,
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
    common_version,
    decode_all,
    encode,
    encode_all,
    own_hello,
)
from omni_kvlink.connectors.runtime.consumer import (
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
    readable_pidfd,
)
from omni_kvlink.connectors.runtime.producer import Listener, PeerHandle, PooledProducer
from omni_kvlink.connectors.runtime.turns import MANY_TURNS, TURN, TurnCounts
from omni_kvlink.connectors.runtime.wakeup import wait_readable
from omni_kvlink.connectors.shm import rendezvous
from omni_kvlink.connectors.shm.reader_arenas import ReaderArenas
from omni_kvlink.errors import (
    ClosedError,
    ConnectorError,
    KVLinkError,
    PeerLostError,
    TransferTimeout,
    WireError,
    format_seconds,
)
from omni_kvlink.memory.arena import GRAIN
from omni_kvlink.memory.ownership import CallAtEnd, closer
from omni_kvlink.system.failures import is_of_system, system_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.connectors.protocol.answer import LazyEvent
    from omni_kvlink.memory.region import Mapping, Region

T = TypeVar("T")
MAX_PEERS = 1024
MAX_GREETING = 128
"""Connections that may be without a Hello; one more disconnects the oldest."""
MAX_BACKLOG = 4096
"""Messages that may wait for a peer that does not read; then it is disconnected."""
MAX_BACKLOG_NBYTES = 64 << 20
"""Bytes of them."""
_ACCEPT_PAUSE = 1.0
"""Seconds without accepting, after it failed for want of a descriptor and none was closed here."""
_LEADER_SECONDS = 1.0
"""Seconds that a thread may take to leave a connection whose producer has ended to the loop."""
_RETRY_SECONDS = 0.03
"""How often a consumer tries again while what serves its name hangs up."""
_MAX_POLL = 86_400_000  # milliseconds; poll counts them in an int
_ANSWERS = (Offer, Status, Failed)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_FD_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class ShmChannel:
    """A SEQPACKET socket that carries whole messages and descriptors, and never blocks.

    `send` and `flush` are thread-safe; `receive` is for one thread. The channel owns `sock`.
    `backlogged` is called in the sender's thread when messages wait for `flush`.
    """

    def __init__(self, sock: socket.socket, backlogged: Callable[[], None]):
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._backlogged = backlogged
        self._lock = threading.Lock()
        self._backlog: deque[tuple[bytes, Mapping | None]] = deque()
        self._backlog_nbytes = 0
        rendezvous.close_in_child(sock)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 after `close`."""
        return self._fd

    @property
    def is_hung_up(self) -> bool:
        """Whether the peer has closed its end; one that has only finished still receives."""
        if self._sock is None:
            return True
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    @property
    def has_unread(self) -> bool:
        """Whether a message, or the end of the connection, is there to be received."""
        if self._sock is None:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait for `flush`."""
        return bool(self._backlog)

    @property
    def is_backlog_full(self) -> bool:
        """Whether the peer has not read for so long that it should be disconnected."""
        return len(self._backlog) > MAX_BACKLOG or self._backlog_nbytes > MAX_BACKLOG_NBYTES

    def send(self, message: Message, memory: Mapping | None = None) -> None:
        """Send now, or queue in order; the descriptor of `memory` is passed with the message.

        The end of the connection is reported by `receive`.
        """
        self._send_or_queue([encode(message)], memory)

    def send_all(self, messages: Sequence[Message]) -> None:
        """Send several messages as few; all else as for `send`."""
        self._send_or_queue(encode_all(messages), None)

    def flush(self) -> bool:
        """Send queued messages as far as the socket takes them; return whether none is left."""
        with self._lock:
            while self._backlog:
                if not self._put(*self._backlog[0]):
                    return False
                self._backlog_nbytes -= len(self._backlog.popleft()[0])
            return True

    def finish(self) -> None:
        """Send nothing more, also not what is queued; the peer's messages are still received."""
        with self._lock:
            self._backlog.clear()
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)

    def finish_receiving(self) -> None:
        """Let nobody send anything more; what was sent before is still received, then the end."""
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RD)

    def receive(self, turn: float = float("inf")) -> Iterator[tuple[list[Message], int]]:
        """Yield the messages that arrived together, with their descriptor (the caller's) or -1.

        Ends when none is there, or after `turn` messages: a peer that sends faster than they are
        handled must not keep the caller. Raises ConnectionError if the connection has ended,
        WireError if the peer sent no message.
        """
        was_reset = False
        while self._sock is not None and turn > 0:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    MAX_MESSAGE, _FD_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed before it had read everything: Linux reports that before the
                # peer's last messages, which can still be received.
                if was_reset:
                    raise
                was_reset = True
                continue
            except OSError as error:
                raise ConnectionError(f"the connection broke: {error.strerror}") from None
            fds = _descriptors(ancillary) if ancillary else []
            try:
                if not data:
                    raise ConnectionError("the connection was closed")
                if flags & _CUT or len(fds) > 1:
                    raise WireError(
                        "a message is too long, or carries too many descriptors, or more than "
                        "this process may open (ulimit -n)"
                    )
                messages = decode_all(data)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
            turn -= len(messages)
            yield messages, fds[0] if fds else -1

    def peek(self) -> list[Message]:
        """Return the messages that would be received next, which stay; none if none are here.

        Raises ConnectionError if the connection has ended, WireError if the peer sent no message.
        """
        data: bytes | None = b""
        # With the lock: `close`, by another thread, must not free the descriptor meanwhile.
        with self._lock:
            if self._sock is not None:
                data = _peeked(self._sock)
        if data == b"":
            raise ConnectionError("the connection was closed")
        return [] if data is None else decode_all(data)

    def skip(self) -> None:
        """Discard the messages that `peek` returned."""
        with self._lock:
            if self._sock is not None:
                _skip(self._sock)

    def close(self) -> None:
        """End the connection, also for copies of the socket that a forked child may hold."""
        with self._lock:
            self._fd = -1
            sock, self._sock = self._sock, None
            self._backlog.clear()
            self._backlogged = lambda: None  # breaks the cycle with the owner
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _send_or_queue(self, parts: Sequence[bytes], memory: Mapping | None) -> None:
        is_queued = False
        with self._lock:
            if self._sock is None:
                return
            for data in parts:
                if self._backlog or not self._put(data, memory):
                    self._backlog.append((data, memory))
                    self._backlog_nbytes += len(data)
                    is_queued = True
        if is_queued:
            self._backlogged()

    def _put(self, data: bytes, memory: Mapping | None) -> bool:
        if self._sock is None:
            return True
        try:
            if memory is None:
                self._sock.send(data, socket.MSG_NOSIGNAL)
            else:
                fds = array.array("i", [memory.fd])
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            # The peer is gone, or a message is lost (no more descriptors may travel): either way
            # the connection is over. The loop receives what is left of it, then its end.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        return True


def _peeked(sock: socket.socket) -> bytes | None:
    try:
        return sock.recv(MAX_MESSAGE, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError as error:
        raise ConnectionError(f"the connection broke: {error.strerror}") from None


def _skip(sock: socket.socket) -> None:
    try:  # noqa: SIM105 (a context manager costs a small `get` more than the call)
        sock.recv(1)
    except OSError:  # the connection has ended
        pass


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


class ShmPeerConnection(PeerHandle):
    """A connected consumer. `pidfd` is readable when its process ends; -1 if there is none.

    `turns`: how many of its turns in a row ended early; after each, the loop has deferred the next.
    """

    def __init__(
        self, listener: ShmListener, channel: ShmChannel, pid: int, pidfd: int, refusal: str
    ):
        super().__init__(listener)
        self.channel, self.pidfd, self.name = channel, pidfd, f"pid {pid}"
        self.turns = 0
        self.refusal = refusal  # why it will be refused; "" if it may stay
        self.arenas: set[int] = set()  # whose descriptors it was passed
        self.hello: Hello | None = None  # its first message, once the handshake is complete


class ShmListener(Listener):
    """The producer's side; passes memory files, which have no names and so are never left over.

    A peer that is disconnected while it may still read leased memory is `_detached`: until it has
    released everything, or its process ends.
    """

    transports = ("shm",)

    def __init__(self, name: str, directory: str, producer: PooledProducer):
        self._producer, self._loop = producer, producer.loop
        self._path = rendezvous.socket_path(name, directory)
        self._peers: set[ShmPeerConnection] = set()
        self._greeting: dict[ShmPeerConnection, None] = {}  # those without a Hello, oldest first
        self._detached: set[ShmPeerConnection] = set()
        self._refused: Counter[str] = Counter()
        self._throttled = TurnCounts()
        self._accept_again = float("inf")  # when a pause ends (`time.monotonic`)
        self._listener = rendezvous.NamedListener(self._path)

    def open(self) -> None:
        """Accept connections from now on."""
        self._loop.watch(self._listener.sock, READ, self._accept)

    def tick(self, now: float) -> float:
        """Accept again when a pause has ended."""
        if self._accept_again <= now:
            self._accept_again = float("inf")
            self.open()
        return self._accept_again

    def health(self) -> dict[str, Any]:
        """Return the socket, the readers, refusals by reason, who floods and who is detached."""
        return {
            "socket": self._path,
            "readers": len(self._peers),
            "refused": dict(self._refused),
            "throttled": self._throttled.stats(),
            "detached": self._detached_nbytes(),
        }

    def _detached_nbytes(self) -> dict[str, int]:
        """What each process that was disconnected may still read, in bytes, by its name."""
        found = Counter[str]()
        for peer in list(self._detached):
            found[peer.name] += self._producer.pinned_nbytes(peer)
        return dict(found)

    def send(self, peer: ShmPeerConnection, message: Message) -> None:
        """Send a message; before an offer, the memory file that it refers to."""
        if isinstance(message, Offer) and not message.inline:
            self._pass(peer, message.location.arena)
        peer.channel.send(message)

    def send_all(self, peer: ShmPeerConnection, messages: Sequence[Message]) -> None:
        """Send messages in one; before it, the memory files that its offers refer to."""
        for message in messages:
            if isinstance(message, Offer) and not message.inline:
                self._pass(peer, message.location.arena)
        peer.channel.send_all(messages)

    def pass_arena(self, arena: int) -> None:
        """Have the connected peers map an arena before anything is offered in it."""
        for peer in self._peers:
            if peer.hello is not None:
                self._pass_ahead(peer, arena)

    def retire_arena(self, arena: int) -> None:
        """Have the peers unmap an arena."""
        self._loop.call(partial(self._send_retire, arena))

    def close(self) -> None:
        """Disconnect every peer and remove the socket."""
        for peer in list(self._peers):
            peer.channel.flush()
            self._disconnect(peer)
        for peer in list(self._detached):
            self._reap(peer)
        self._accept_again = float("inf")
        self._loop.unwatch(self._listener.sock)
        self._listener.close()

    def _pass(self, peer: ShmPeerConnection, arena: int) -> None:
        """Send a peer the memory file of an arena, once; the producer's lock is held."""
        if arena not in peer.arenas:
            mapping = self._producer.pool.mapping(arena)
            peer.channel.send(Memory(arena, mapping.nbytes), mapping)
            peer.arenas.add(arena)  # last: after an interrupt it is sent again

    # In the loop's thread

    def _pass_ahead(self, peer: ShmPeerConnection, arena: int) -> None:
        # With the lock: no offer in this arena overtakes it.
        with self._producer.lock, contextlib.suppress(ClosedError):
            self._pass(peer, arena)

    def _send_retire(self, arena: int) -> None:
        for peer in self._peers:
            if arena in peer.arenas:
                peer.arenas.discard(arena)
                peer.channel.send(Retire(arena))

    def _accept(self, events: int) -> None:
        """Accept one connection: without a descriptor, a try when there is none fails, too."""
        try:
            sock, _ = self._listener.sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._pause()  # the connection stays in the kernel's queue
            return
        try:
            self._add_peer(sock)
        except OSError:
            self._pause()
            sock.close()  # it will try again

    def _pause(self) -> None:
        """Accept nothing for a while: there is no free descriptor, and trying again would spin."""
        self._refused["accept failed"] += 1
        self._loop.unwatch(self._listener.sock)
        self._accept_again = time.monotonic() + _ACCEPT_PAUSE

    def _add_peer(self, sock: socket.socket) -> None:
        """Add a connection; OSError if there is no descriptor for its process."""
        pid, uid = rendezvous.peer_identity(sock)
        if uid != os.geteuid():
            self._refused["other user"] += 1
            channel = ShmChannel(sock, lambda: None)
            channel.send(Refused(f"uid {uid} may not read from uid {os.geteuid()}", PROTOCOL))
            channel.close()
            return
        pidfd = readable_pidfd(pid)
        is_full = len(self._peers) >= MAX_PEERS
        refusal = f"{MAX_PEERS} readers are connected already" if is_full else ""
        channel = ShmChannel(sock, lambda: self._loop.call(partial(self._flush, peer)))
        peer = ShmPeerConnection(self, channel, pid, pidfd, refusal)
        self._peers.add(peer)
        self._greeting[peer] = None
        try:
            self._watch(peer)
            if peer.pidfd >= 0:
                self._loop.watch(peer.pidfd, READ, lambda events: self._on_exit(peer))
        except ConnectorError:
            self._refused["accept failed"] += 1
            self._disconnect(peer)
        if len(self._greeting) > MAX_GREETING:
            self._refused["no hello"] += 1
            self._disconnect(next(iter(self._greeting)))

    def _flush(self, peer: ShmPeerConnection) -> None:
        """Send queued messages when the socket has space; a peer that never reads is detached."""
        if peer not in self._peers:
            return
        if peer.channel.is_backlog_full:
            self._refused["too slow"] += 1
            self._finish(peer)
            return
        peer.channel.flush()
        self._watch(peer)

    def _watch(self, peer: ShmPeerConnection) -> None:
        """Wait for what the peer sends, but for its next turn; and for space, if messages wait."""
        reads = 0 if peer.turns else READ
        events = reads | (WRITE if peer.channel.has_backlog else 0)
        self._loop.watch(peer.channel, events, partial(self._on_events, peer))

    def _on_events(self, peer: ShmPeerConnection, events: int) -> None:
        if events & WRITE:
            self._flush(peer)
        if events & READ and not peer.turns:
            self._take_turn(peer)

    def _take_turn(self, peer: ShmPeerConnection) -> None:
        """Receive what one turn takes; the rest stays in the socket, which holds up its sender."""
        self._receive(peer, TURN)
        before, peer.turns = peer.turns, peer.turns + 1 if peer.channel.has_unread else 0
        if peer.turns:
            self._throttled.add(peer.name)
            self._loop.defer(partial(self._take_turn, peer), paused=peer.turns > MANY_TURNS)
        if bool(peer.turns) is not bool(before):
            self._watch(peer)

    def _receive(self, peer: ShmPeerConnection, turn: float) -> None:
        try:
            for messages, fd in peer.channel.receive(turn):
                if fd >= 0:
                    os.close(fd)
                    raise WireError("a reader passes no descriptors")
                if peer not in self._peers:
                    messages = [one for one in messages if isinstance(one, Release)]
                    self._producer.handle_all(peer, messages)
                elif peer.hello is not None:
                    self._producer.handle_all(peer, messages)
                else:
                    self._on_hello(peer, messages)
        except ConnectionError:
            self._disconnect(peer)
        except WireError:
            self._refused["bad message"] += 1
            self._disconnect(peer)

    def _on_hello(self, peer: ShmPeerConnection, messages: Sequence[Message]) -> None:
        message = messages[0] if len(messages) == 1 else None
        if not isinstance(message, Hello):
            raise WireError("the first message must be Hello")
        if peer.refusal or common_version(message.versions) is None:
            # Not before its Hello was read: closing a socket with unread messages loses ours.
            self._refused["refused" if peer.refusal else "other version"] += 1
            peer.channel.send(Refused(peer.refusal or "no common version", PROTOCOL))
            raise ConnectionError("refused")
        peer.hello = message
        self._greeting.pop(peer, None)
        peer.channel.send(self._producer.hello)
        for arena in self._producer.pool.prefaulted:
            self._pass_ahead(peer, arena)

    def _on_exit(self, peer: ShmPeerConnection) -> None:
        """The peer's process ended. A child of it may hold the socket open: read what it sent."""
        if peer in self._peers:
            peer.channel.finish_receiving()
            self._receive(peer, float("inf"))
        self._disconnect(peer)
        self._reap(peer)

    def _finish(self, peer: ShmPeerConnection) -> None:
        """Send a peer nothing more. It learns that, and sends a Release of all that it holds."""
        if self._detach(peer):
            peer.channel.finish()
            self._watch(peer)
        else:
            self._disconnect(peer)

    def _disconnect(self, peer: ShmPeerConnection) -> None:
        """Close a connection; until its process ends, the peer may still read what it mapped."""
        may_read = self._detach(peer)
        self._loop.unwatch(peer.channel)
        peer.channel.close()
        if not may_read or peer.pidfd < 0:
            self._reap(peer)

    def _detach(self, peer: ShmPeerConnection) -> bool:
        """Lease a peer nothing more; return whether it may still read what it was leased."""
        if peer in self._peers:
            self._peers.discard(peer)
            self._greeting.pop(peer, None)
            self._detached.add(peer)
        return self._producer.on_disconnect(peer)

    def _reap(self, peer: ShmPeerConnection) -> None:
        """A disconnected peer can read no more: the memory of its leases may be reused."""
        if peer in self._detached:
            self._detached.discard(peer)
            self._loop.unwatch(peer.channel)
            peer.channel.close()
            if peer.pidfd >= 0:
                self._loop.unwatch(peer.pidfd)
                os.close(peer.pidfd)
            self._producer.on_peer_lost(peer)
            if self._accept_again < float("inf"):
                self._accept_again = 0.0  # descriptors were closed


class ShmConsumer(SessionConsumer):
    """The consuming end of `shm://name`."""

    def __init__(self, name: str, options: Options):
        super().__init__(f"shm://{name}")
        refuse_keys(self._url, options)
        self._path = rendezvous.socket_path(name, options.directory)
        self._cancelled = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not in `close`: another thread may still wait for it, and its number must not be reused.
        CallAtEnd.of(self, closer(self._cancelled))

    def _interrupt(self) -> None:
        os.eventfd_write(self._cancelled, 1)

    def _open(self, timeout: float, *, no_wait: bool = False) -> ShmSession:
        deadline = time.monotonic() + timeout
        while True:
            left = 0.0 if no_wait else deadline - time.monotonic()
            sock = rendezvous.dial(self._path, left, self._cancelled)
            try:
                return ShmSession(self._url, sock, deadline, self._cancelled)
            except PeerLostError as error:  # the producer died during the handshake, or is no one
                left = deadline - time.monotonic()
                if no_wait:
                    raise
                if left <= 0:
                    text, phase = (
                        f"{error}, which it did for {format_seconds(timeout)}",
                        "shaking hands",
                    )
                    raise TransferTimeout(text, waited=timeout, phase=phase) from None
                wait_readable(min(left, _RETRY_SECONDS), self._cancelled)


class ShmSession(MappedSession):
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

    def __init__(self, url: str, sock: socket.socket, deadline: float, cancelled: int):
        self._url = url
        self._arenas = ReaderArenas(url)
        # Held by the thread that receives: the loop's, or one that waits for a payload. Released by
        # its owner alone, so that an interrupt just after `acquire` leaves it free.
        self._receiving = threading.RLock()
        self._leader = 0  # the thread that receives while it waits for a payload; 0: the loop's
        self._watching = threading.Lock()  # held while it is decided what the loop waits for
        self._has_exited = False  # the producer's process
        self._posted = deque[Message]()  # by finalizers, to be sent in this order
        self._pid = os.getpid()
        self._flushing = threading.RLock()  # held by the thread that sends them
        self._coalescing = set[int]()  # threads that send themselves what they post
        self._leases = set[int]()  # gets whose offers are not released
        self._reads = READ  # 0 when nothing more is to be received
        self._has_turn = False  # the loop has deferred its next turn to receive
        self._turns = 0  # in a row that ended early
        self._throttled = 0
        self._has_ended = False
        self._close_done = threading.Event()
        self._pidfd = self._wake = -1
        self._channel = ShmChannel(sock, lambda: self._loop.call(self._flush))
        dropped = list[CallAtEnd]()
        try:
            pid, uid = rendezvous.peer_identity(sock)
            if uid != os.geteuid():
                raise ConnectorError(f"{url} is served by uid {uid}, not by this user")
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            # Not in `close`: a thread that waits may still poll it.
            dropped.append(CallAtEnd.of(self, closer(self._wake)))
            self.incarnation = self._greet(deadline, cancelled).incarnation
            self._pidfd = readable_pidfd(pid)
            self._loop = EventLoop("kvlink-reader", crashed=self._crashed)
        except BaseException as error:
            self._channel.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            for one in dropped:  # now: the session is in a reference cycle
                one.run()
            if isinstance(error, Exception) and is_of_system(error):
                raise system_error(error, f"{url}: the handshake failed") from None
            raise
        wake = partial(self._loop.call, partial(_call, weakref.WeakMethod(self._send_posted)))
        post = partial(_post, self._posted, self._coalescing, wake)
        self.get_table = GetTable(self._send, post, self._channel.send_all, self.coalesce)
        self._loop.call(self._watch)

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

    def send(self, message: Abort) -> None:
        """Send a message to the producer; does not block."""
        self._channel.send(message)

    def coalesce(self, act: Callable[[], T]) -> T:
        """Call `act`; this thread sends its releases, with its first request or after it.

        Releases of finalizers at other times are sent by the loop, which must be woken for that.
        """
        thread = threading.get_ident()
        if thread in self._coalescing or os.getpid() != self._pid:
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

    def health(self) -> dict[str, Any]:
        """Return how much of the producer's memory is mapped, and how often it was throttled."""
        return {"mapped": self._arenas.stats(), "throttled": self._throttled}

    def close(self) -> None:
        """Fail the gets; disconnect when the last view is freed."""
        if self._loop.is_own_thread:  # the link was garbage-collected in this very thread
            self._close_here()
            return
        self._loop.call(self._close_here)
        self._close_done.wait()
        if self._has_ended:
            self._loop.close()

    def receive_until(self, event: LazyEvent, deadline: float) -> None:
        """Receive in the calling thread until `event` is set, unless another thread receives.

        It returns early, and leaves the rest to the loop, at whatever is no answer to a get.
        """
        if event.is_set() or self._loop.is_own_thread:
            return
        try:
            if self._receiving.acquire(blocking=False):
                self._leader = threading.get_ident()
                self._lead(event, deadline)
        finally:
            try:
                self._stop_leading()
            except BaseException:  # an interrupt: without this nobody would receive
                self._stop_leading()
                self._watch_channel()
                raise

    def _lead(self, event: LazyEvent, deadline: float) -> None:
        self._watch_channel()
        fd = self._channel.fileno()
        if fd < 0:
            return  # it has ended
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not event.is_set():
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(min(1e3 * left + 1, _MAX_POLL)):
                return
            if not self._receive_answer():
                return

    def _receive_answer(self) -> bool:
        """Handle what came next, if it answers gets; return whether it does, or there is none.

        An interrupt at any line loses nothing: the message is taken away at last, and to handle it
        twice changes nothing.
        """
        try:
            messages = self._channel.peek()
        except (ConnectionError, WireError):
            return False
        if not messages:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return not self._has_exited
        for message in messages:
            if not isinstance(message, _ANSWERS):
                return False
        self._on_messages(messages, -1)
        self._channel.skip()
        return True

    def _wake_leader(self) -> None:
        """Have the thread that receives look whether its get was ended; any thread."""
        if self._leader:
            os.eventfd_write(self._wake, 1)

    def _stop_leading(self) -> None:
        if self._leader == threading.get_ident():
            self._leader = 0
        is_released = False
        try:
            self._receiving.release()
            is_released = True
        except RuntimeError:  # another thread receives
            pass
        if is_released:  # only now: what is here wakes the loop once
            self._watch_channel()

    def _greet(self, deadline: float, cancelled: int) -> Hello:
        """Send Hello and return the producer's."""
        self._channel.send(own_hello())
        while True:
            left = deadline - time.monotonic()
            ready = wait_readable(left, self._channel.fileno(), cancelled)
            if cancelled in ready:
                raise closed_here(self._url)
            if left <= 0 or not ready:
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

    # In the loop's thread

    def _watch(self) -> None:
        if self._has_ended:
            return  # a thread that received for a moment had the channel watched earlier
        try:
            self._watch_channel()
            if self._pidfd >= 0:
                self._loop.watch(self._pidfd, READ, self._on_exit)
        except ConnectorError as error:
            self._close(PeerLostError(f"{self._url}: {error}"))
            self._end()

    def _send_posted(self, *last: Message) -> None:
        """Send what finalizers have posted, then `last`, which is at most one; any thread."""
        with self._flushing:
            while self._posted or last:
                messages = _first(self._posted, MAX_BATCH - len(last))
                self._channel.send_all([*messages, *last])
                last = ()
                for message in messages:
                    if isinstance(message, Release):
                        self._leases.discard(message.get_id)
                    with contextlib.suppress(ValueError):  # a signal handler was faster
                        self._posted.remove(message)
        if self.is_closed:
            self._loop.call(self._flush)

    def _close_here(self) -> None:
        self._close(closed_here(self._url))
        self._close_done.set()

    def _flush(self) -> None:
        """Send what the socket takes; disconnect a closed session that has released everything."""
        if self._has_ended:
            return
        is_sent = self._channel.flush()
        if is_sent and self.is_closed and not self._leases:
            self._end()
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
                self._loop.watch(self._channel, events | EDGE, self._on_events)
            else:
                self._loop.unwatch(self._channel)

    def _on_events(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if not self._has_turn:
            self._take_turn()

    def _take_turn(self) -> None:
        """Receive what one turn takes, and the rest in later ones: calls and deadlines come first.

        The channel is watched for what arrives anew: what is there already wakes nobody.
        """
        self._has_turn = False
        if not self._receiving.acquire(blocking=False):
            return  # a thread that waits for a payload receives
        try:
            self._receive(TURN)
            self._has_turn = bool(self._reads) and self._channel.has_unread
        finally:
            self._receiving.release()
        self._turns = self._turns + 1 if self._has_turn else 0
        if self._has_turn:
            self._throttled += 1
            self._loop.defer(self._take_turn, paused=self._turns > MANY_TURNS)

    def _receive(self, turn: float) -> None:
        if not self._reads or self._has_ended:
            return
        try:
            for messages, fd in self._channel.receive(turn):
                self._on_messages(messages, fd)
        except ConnectionError:
            self._reads = 0
            self._close(PeerLostError(f"{self._url}: the producer is gone"))
        except KVLinkError as error:
            if self.is_closed:
                self._reads = 0
            self._close(error)
        except OSError as error:  # gets are repeated over another connection
            self._close(PeerLostError(str(system_error(error, self._url))))

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

    def _on_exit(self, events: int) -> None:
        self._has_exited = True
        os.eventfd_write(self._wake, 1)
        self._channel.finish_receiving()  # a child of it may hold the socket open
        if self._receiving.acquire(timeout=_LEADER_SECONDS):
            try:
                self._receive(float("inf"))
            finally:
                self._receiving.release()
        self._close(PeerLostError(f"{self._url}: the producer's process ended"))
        self._end()

    def _close(self, error: KVLinkError) -> None:
        """Fail the gets; disconnect now, or when the last lease was released."""
        if not self.is_closed:
            self.is_closed = True
            # Its traceback would keep this session alive, and with it a descriptor.
            error.__traceback__ = error.__context__ = None
            for get_state in self.get_table.close(error):
                self._channel.send(Cancel(get_state.get_id))
            self._wake_leader()
        if self._channel.is_hung_up:
            self._end()  # nobody is there to release anything to
        else:
            self._flush()

    def _end(self) -> None:
        """Disconnect, and end the loop."""
        if self._has_ended:
            return
        self._has_ended = True
        os.eventfd_write(self._wake, 1)
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

    def _crashed(self, error: BaseException) -> None:
        self._close(PeerLostError(f"{self._url}: the reading thread broke down: {error!r}"))
        self._end()


def _post(
    posted: deque[Message], coalescing: set[int], wake: Callable[[], None], message: Message
) -> None:
    """Have a session send a message; for finalizers: it takes no lock, and no socket.

    After its end a session is kept by no view that is still in use.
    """
    posted.append(message)
    if threading.get_ident() not in coalescing:
        wake()


def _first(posted: deque[Message], most: int) -> list[Message]:
    """Return the first posted messages, without removing them.

    A signal handler may remove some meanwhile.
    """
    messages = list[Message]()
    with contextlib.suppress(IndexError):
        while len(messages) < most:
            messages.append(posted[len(messages)])
    return messages


def _call(send: weakref.WeakMethod[Any]) -> None:
    method = send()
    if method is not None:
        method()
