"""The connecting end: maps each memory file once, and is woken by the producer's words."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from functools import partial

from omni_kvlink.connectors.base import Options, refuse_keys
from omni_kvlink.connectors.protocol.get_table import GetTable
from omni_kvlink.connectors.protocol.messages import (
    Abort,
    Cancel,
    Hello,
    Location,
    Memory,
    Message,
    Offer,
    Retire,
    own_hello,
)
from omni_kvlink.connectors.protocol.slot import SLOT
from omni_kvlink.connectors.runtime.consumer import (
    MappedSession,
    Session,
    SessionConsumer,
    check_greeting,
    closed_here,
)
from omni_kvlink.connectors.runtime.event_loop import READ, WRITE, EventLoop, readable_pidfd
from omni_kvlink.connectors.shm.channel import ShmChannel
from omni_kvlink.connectors.shm.rendezvous import dial, peer_identity, socket_path
from omni_kvlink.errors import (
    ConnectorError,
    KVLinkError,
    PeerLostError,
    TransferTimeout,
    WireError,
)
from omni_kvlink.memory.arena import GRAIN
from omni_kvlink.memory.region import Mapping, Region, is_sealed


class ShmConsumer(SessionConsumer):
    """The reading end of `shm://name`."""

    def __init__(self, name: str, options: Options):
        super().__init__(f"shm://{name}")
        refuse_keys(self._url, options)
        self._path = socket_path(name, options.directory)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _interrupt(self) -> None:
        os.eventfd_write(self._stop, 1)

    def __del__(self) -> None:
        # Not in `close`: another thread may still wait for it, and its number must not be reused.
        if hasattr(self, "_stop"):
            os.close(self._stop)

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        deadline = time.monotonic() + timeout
        while True:
            left = 0.0 if no_wait else deadline - time.monotonic()
            sock = dial(self._path, left, self._stop)
            try:
                return ShmSession(self._url, sock, deadline, self._stop)
            except ConnectionError:
                if no_wait or time.monotonic() >= deadline:
                    raise  # else it died in the handshake: wait for the next


class ShmSession(MappedSession):
    """One connection, its mapped arenas, and the thread that listens."""

    def __init__(self, url: str, sock: socket.socket, deadline: float, stop: int):
        self._url = url
        pid, uid = peer_identity(sock)
        if uid != os.geteuid():
            sock.close()
            raise ConnectorError(f"{url} is served by uid {uid}, not by this user")
        self._arenas: dict[int, Mapping] = {}
        self._over = self._leaving = False
        self._held = 0  # offers not yet released; the loop's alone
        self._left = threading.Event()
        self._channel = ShmChannel(sock, self._on_backlog)
        try:
            self.nonce = self._shake_hands(deadline, stop).nonce
        except BaseException:
            self._channel.close()
            raise
        self._pidfd = readable_pidfd(pid) if pid > 0 else -1
        self.inbox = GetTable(self._channel.send, self._post)
        self._loop = EventLoop("kvlink-reader", crashed=self._crashed)
        self._loop.call(self._watch)

    @property
    def is_over(self) -> bool:
        return self._over

    def slot(self, location: Location, draft: int) -> Region:
        mapping = self._arenas.get(location.arena)
        if mapping is None and self._over:
            raise PeerLostError(f"{self._url}: the producer is gone; its payload came too late")
        if mapping is None:
            raise WireError(f"a payload was offered in arena {location.arena}, which nobody passed")
        nbytes = SLOT + location.nbytes + draft
        if location.offset % GRAIN or location.offset + nbytes > mapping.nbytes:
            raise WireError(
                f"a payload of {location.nbytes} bytes was offered at {location.offset} "
                f"in an arena of {mapping.nbytes}"
            )
        return mapping.region.slice(location.offset, nbytes)

    def send(self, message: Abort) -> None:
        self._channel.send(message)

    def close(self) -> None:
        if self._loop.is_own_thread:  # a forgotten link, collected in this very thread
            self._leave()
            return
        self._loop.call(self._leave)
        self._left.wait()
        if self._over:
            self._loop.stop()

    def _shake_hands(self, deadline: float, stop: int) -> Hello:
        """What the producer said."""
        self._channel.send(own_hello())
        while True:
            left = deadline - time.monotonic()
            ready = select.select([self._channel.fileno(), stop], [], [], max(0.0, left))[0]
            if stop in ready:
                raise closed_here(self._url)
            if left <= 0 or not ready:
                raise TransferTimeout(
                    f"{self._url}: the producer does not answer", phase="shaking hands"
                )
            for message, fd in self._channel.receive():
                if fd >= 0:
                    os.close(fd)
                return check_greeting(self._url, message)

    # In the loop's thread

    def _watch(self) -> None:
        self._loop.watch(self._channel, READ, self._on_events)
        if self._pidfd >= 0:
            self._loop.watch(self._pidfd, READ, self._on_death)

    def _post(self, message: Message) -> None:
        """For finalizers: no lock, no socket."""
        self._loop.call(partial(self._release, message))

    def _release(self, message: Message) -> None:
        self._channel.send(message)
        self._held -= 1
        if self._leaving and not self._held:
            self._end(closed_here(self._url))

    def _leave(self) -> None:
        """Wait for nothing more; go now, or with the last view."""
        self._leaving = True
        for get_state in self.inbox.end(closed_here(self._url)):
            self._channel.send(Cancel(get_state.number))
        if not self._held:
            self._end(closed_here(self._url))
        self._left.set()

    def _on_backlog(self) -> None:
        self._loop.call(self._rearm)

    def _rearm(self) -> None:
        if not self._over:
            get_state = READ if self._channel.flush() else READ | WRITE
            self._loop.watch(self._channel, get_state, self._on_events)

    def _on_events(self, events: int) -> None:
        if events & WRITE:
            self._rearm()
        try:
            for message, fd in self._channel.receive():
                self._on_message(message, fd)
        except ConnectionError:
            self._end(PeerLostError(f"{self._url}: the producer is gone"))
        except KVLinkError as error:
            self._end(error)

    def _on_message(self, message: Message, fd: int) -> None:
        if isinstance(message, Memory):
            self._map(message, fd)
            return
        if fd >= 0:
            os.close(fd)
            raise WireError(f"{self._url} passed a descriptor that was not announced")
        if isinstance(message, Retire):
            self._arenas.pop(message.arena, None)
        else:
            self._held += isinstance(message, Offer)
            self.inbox.on_message(message)

    def _map(self, message: Memory, fd: int) -> None:
        """Trust nothing: an unsealed or shorter file would be a SIGBUS later."""
        if fd < 0:
            raise WireError(f"{self._url} announced an arena without its descriptor")
        if not is_sealed(fd) or os.fstat(fd).st_size != message.nbytes or message.nbytes == 0:
            os.close(fd)
            raise WireError(
                f"{self._url} passed an arena that is not sealed or not of {message.nbytes} bytes"
            )
        self._arenas[message.arena] = Mapping.readonly(fd, message.nbytes)

    def _on_death(self, events: int) -> None:
        self._on_events(READ)
        self._end(PeerLostError(f"{self._url}: the producer's process ended"))

    def _end(self, error: KVLinkError) -> None:
        if self._over:
            return
        self._over = True
        self._channel.flush()
        self._loop.unwatch(self._channel)
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
        self._channel.close()
        self._arenas.clear()
        self.inbox.end(error)
        self._left.set()
        self._loop.stop()

    def _crashed(self, error: BaseException) -> None:
        self._end(PeerLostError(f"{self._url}: the reading thread broke down: {error!r}"))
