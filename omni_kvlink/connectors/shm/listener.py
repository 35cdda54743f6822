"""The serving end: a listening socket; the memory files are passed to who comes."""

from __future__ import annotations

import os
import socket
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.protocol.messages import (
    PROTOCOL,
    Hello,
    Memory,
    Message,
    Offer,
    Refused,
    Retire,
    agree,
)
from omni_kvlink.connectors.runtime.event_loop import READ, WRITE, readable_pidfd
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.connectors.shm.channel import ShmChannel
from omni_kvlink.connectors.shm.rendezvous import listen, peer_identity, socket_path, unlink
from omni_kvlink.errors import WireError

if TYPE_CHECKING:
    from omni_kvlink.connectors.runtime.producer import PooledProducer

MAX_PEERS = 1024


class ShmPeerConnection(PeerHandle):
    """A connected peer: its channel, its life, which arenas it has."""

    def __init__(self, listener: ShmListener, channel: ShmChannel, pid: int, refusal: str):
        super().__init__(listener)
        self.channel, self.pid, self.refusal = channel, pid, refusal
        self.pidfd = readable_pidfd(pid) if pid > 0 else -1
        self.arenas: set[int] = set()
        self.hello: Hello | None = None

    def close(self) -> None:
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class ShmListener(Listener):
    """Readers map the producer's memory files; these have no names, so none can be left."""

    transports = ("shm",)

    def __init__(self, name: str, directory: str, producer: PooledProducer):
        self._producer, self._loop = producer, producer.loop
        self._path = socket_path(name, directory)
        self._readers: set[ShmPeerConnection] = set()
        self._detached: set[ShmPeerConnection] = set()
        self._counts: Counter[str] = Counter()
        self._listener = listen(self._path)

    def open(self) -> None:
        self._loop.watch(self._listener, READ, self._accept)

    def health(self) -> dict[str, Any]:
        return {
            "socket": self._path,
            "readers": len(self._readers),
            "refused": dict(self._counts),
        }

    # Messages out

    def send(self, reader: ShmPeerConnection, message: Message) -> None:
        if isinstance(message, Offer):
            self._pass_memory(reader, message.location.arena)
        reader.channel.send(message)

    def _pass_memory(self, reader: ShmPeerConnection, arena: int) -> None:
        if arena not in reader.arenas:
            mapping = self._producer.pool.mapping(arena)
            reader.arenas.add(arena)
            reader.channel.send(Memory(arena, mapping.nbytes), mapping.fd)

    def forget(self, arena: int) -> None:
        self._loop.call(partial(self._say_retired, arena))

    def _say_retired(self, arena: int) -> None:
        for reader in self._readers:
            if arena in reader.arenas:
                reader.arenas.discard(arena)
                reader.channel.send(Retire(arena))

    # Peers, in the loop's thread

    def _accept(self, events: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                self._counts["accept failed"] += 1  # out of descriptors: the backlog keeps them
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        pid, uid = peer_identity(sock)
        refusal = ""
        if uid != os.geteuid():
            refusal = f"uid {uid} may not read from uid {os.geteuid()}"
        elif len(self._readers) >= MAX_PEERS:
            refusal = f"{MAX_PEERS} readers are connected already"
        channel = ShmChannel(sock, lambda: self._loop.call(partial(self._rearm, reader)))
        reader = ShmPeerConnection(self, channel, pid, refusal)
        self._readers.add(reader)
        self._loop.watch(reader.channel, READ, partial(self._on_events, reader))
        if reader.pidfd >= 0:
            self._loop.watch(reader.pidfd, READ, lambda events: self._on_death(reader))

    def _rearm(self, reader: ShmPeerConnection) -> None:
        """Messages wait for a reader: flush when its socket has room, or give it up."""
        if reader not in self._readers:
            return
        if reader.channel.is_hopeless:
            self._counts["too slow"] += 1
            self._drop(reader)
            return
        get_state = READ if reader.channel.flush() else READ | WRITE
        self._loop.watch(reader.channel, get_state, partial(self._on_events, reader))

    def _on_events(self, reader: ShmPeerConnection, events: int) -> None:
        if events & WRITE:
            self._rearm(reader)
        if not events & READ:
            return
        try:
            for message, fd in reader.channel.receive():
                if fd >= 0:
                    os.close(fd)
                    raise WireError("a reader passes no descriptors")
                self._on_reader_message(reader, message)
        except ConnectionError:
            self._drop(reader)
        except WireError:
            self._counts["bad message"] += 1
            self._drop(reader)

    def _on_reader_message(self, reader: ShmPeerConnection, message: Message) -> None:
        if reader.hello is not None:
            self._producer.handle(reader, message)
        elif not isinstance(message, Hello):
            raise WireError("the first message must be Hello")
        elif reader.refusal or agree(message.versions) is None:
            # Not before its Hello was read: closing over unread words would lose ours.
            self._counts["refused" if reader.refusal else "other version"] += 1
            reader.channel.send(Refused(reader.refusal or "no common version", PROTOCOL))
            raise ConnectionError("refused")
        else:
            reader.hello = message
            reader.channel.send(self._producer.hello)

    def _on_death(self, reader: ShmPeerConnection) -> None:
        """The process ended; its last words count, even if a child of it holds the socket open."""
        if reader in self._readers:
            self._on_events(reader, READ)
            self._drop(reader)
        self._add_tombstone(reader)

    def _drop(self, reader: ShmPeerConnection) -> None:
        """End a connection. A process that lives may still look at what it was offered."""
        if reader not in self._readers:
            return
        self._readers.discard(reader)
        self._loop.unwatch(reader.channel)
        reader.channel.close()
        self._detached.add(reader)
        is_looking = self._producer.detach(reader)
        if not is_looking or reader.pidfd < 0:
            self._add_tombstone(reader)

    def _add_tombstone(self, reader: ShmPeerConnection) -> None:
        """Nobody looks any more: the memory that the reader saw may be reused."""
        if reader in self._detached:
            self._detached.discard(reader)
            if reader.pidfd >= 0:
                self._loop.unwatch(reader.pidfd)
            reader.close()
            self._producer.on_peer_lost(reader)

    def shut(self) -> None:
        for reader in list(self._readers):
            reader.channel.flush()
            self._drop(reader)
        for reader in list(self._detached):
            self._add_tombstone(reader)
        self._loop.unwatch(self._listener)
        unlink(self._path, self._listener)
