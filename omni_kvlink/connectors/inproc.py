"""`inproc://name`: both ends in one process; the protocol of the other connectors by calls."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.base import Backend, Consumer, Options, refuse_keys
from omni_kvlink.connectors.protocol.get_table import GetTable
from omni_kvlink.connectors.protocol.messages import PROTOCOL, SLOT, Location, Message
from omni_kvlink.connectors.protocol.path import LinkPath
from omni_kvlink.connectors.runtime.consumer import (
    MappedGet,
    MappedSession,
    SessionConsumer,
    closed_here,
)
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.errors import (
    BusyError,
    ClosedError,
    KVLinkError,
    PeerLostError,
    TransferTimeout,
    format_seconds,
)
from omni_kvlink.memory.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region

_PATH = LinkPath("inproc", shared_kernel=True, why="both ends are in one process")
_listeners: dict[str, InprocListener] = {}
_changed = threading.Condition()


def _forget_listeners() -> None:
    """Forget the parent's listeners in a forked child, and a lock that a thread may have held."""
    global _changed
    _listeners.clear()
    _changed = threading.Condition()


os.register_at_fork(after_in_child=_forget_listeners)


class InprocListener(Listener):
    """The producer's side: consumers get readonly views of the producer's memory."""

    paths = (_PATH,)

    def __init__(self, name: str, producer: PooledProducer):
        self._name, self.producer, self.refused = name, producer, Counter()
        self.sessions: set[InprocSession] = set()
        with _changed:
            if _listeners.setdefault(name, self) is not self:
                raise BusyError(f"inproc://{name} is served already in this process")
            _changed.notify_all()

    def readers(self) -> list[PeerHandle]:
        """Return the sessions."""
        return [*self.sessions]

    def stats(self) -> dict[str, Any]:
        """Return refusals by reason."""
        return {"refused": dict(self.refused or ())}

    def open(self) -> None:
        """Do nothing: sessions come by calls."""

    def send(self, peer: InprocSession, message: Message) -> None:
        """Hand a message to the session, in the calling thread."""
        peer.get_table.on_message(message)

    def close(self) -> None:
        """Free the name and fail the gets of every session."""
        with _changed:
            if _listeners.get(self._name) is self:
                del _listeners[self._name]
        for session in self.sessions:
            session.end(PeerLostError(f"inproc://{self._name} was closed by its producer"))
        self.sessions.clear()


class InprocSession(MappedSession, PeerHandle):
    """A consumer's connection to a producer of the same process."""

    listener: InprocListener
    version = PROTOCOL[1]

    def __init__(self, url: str, listener: InprocListener):
        super().__init__(listener)
        self._url, self._producer = url, listener.producer
        self._loop = self._producer.loop
        self.incarnation, self.required = self._producer.incarnation, self._producer.require
        self.set_path(_PATH)
        make = partial(MappedGet, self)
        self.get_table = GetTable(make, self.send, self.send, self.send_all)
        listener.sessions.add(self)

    def slot(self, location: Location, draft: int) -> Region:
        """Return the slot in the memory of the producer, mapped readonly: others read it, too."""
        try:
            readers = self._producer.pool.mapping(location.arena).readers
        except ClosedError as error:
            raise PeerLostError(f"{self._url}: the producer closed the link") from error
        assert readers is not None
        return readers.region.slice(location.offset, SLOT + location.nbytes + draft)

    def inspect_refusal(self) -> str:
        """Return "": it is of the producer's own process."""
        return ""

    def send(self, message: Message) -> None:
        """Handle a message in the loop of the producer; callable from finalizers."""
        self._loop.call(partial(self._producer.handle, self, message))

    def send_all(self, messages: Sequence[Message]) -> None:
        """Handle several messages in the loop of the producer."""
        self._loop.call(partial(self._producer.handle, self, *messages))

    def end(self, error: KVLinkError) -> None:
        """Fail the gets: one of the sides closed the link."""
        self.is_closed = True
        self.get_table.close(error)

    def close(self) -> None:
        """Fail the gets; leases stay until their views are freed."""
        self.end(closed_here(self._url))
        self._loop.call(self._detach)

    def _detach(self) -> None:
        self.listener.sessions.discard(self)
        self._producer.cancel_gets(self)


class InprocConsumer(SessionConsumer):
    """The consuming end of `inproc://name`."""

    def __init__(self, name: str, options: Options):
        super().__init__(f"inproc://{name}", options.require)
        self._name = name

    def _interrupt(self) -> None:
        with _changed:
            _changed.notify_all()

    def _open(self, timeout: float, *, no_wait: bool = False) -> InprocSession:
        deadline = time.monotonic() + (0.0 if no_wait else timeout)
        with _changed:
            while self._name not in _listeners:
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        f"nobody serves {self._url} after {format_seconds(timeout)}",
                        waited=timeout,
                        phase="connecting",
                    )
                _changed.wait(left)
            return InprocSession(self._url, _listeners[self._name])


def _serve(name: str, options: Options) -> PooledProducer:
    refuse_keys(f"inproc://{name}", options)
    make = partial(Mapping.for_readers, "kvlink-inproc")
    return PooledProducer(name, options, make, partial(InprocListener, name))


def _connect(name: str, options: Options, timeout: float) -> Consumer:
    refuse_keys(f"inproc://{name}", options)
    return InprocConsumer(name, options).connect(timeout)


BACKEND = Backend(serve=_serve, connect=_connect)
