"""`inproc://name`: both ends in one process; the protocol of the other connectors by calls."""

from __future__ import annotations

import threading
import time
from functools import partial

from omni_kvlink.connectors.base import Backend, Options, refuse_keys
from omni_kvlink.connectors.protocol.get_table import GetTable
from omni_kvlink.connectors.protocol.messages import SLOT, Abort, Location, Message
from omni_kvlink.connectors.runtime.consumer import (
    MappedSession,
    Session,
    SessionConsumer,
    closed_here,
)
from omni_kvlink.connectors.runtime.producer import Listener, PeerHandle, PooledProducer
from omni_kvlink.errors import BusyError, ClosedError, PeerLostError, TransferTimeout
from omni_kvlink.memory.region import Mapping, Region

_listeners: dict[str, InprocListener] = {}
_changed = threading.Condition()


class InprocListener(Listener):
    """The producer's side: consumers get views of the producer's own memory."""

    def __init__(self, name: str, producer: PooledProducer):
        self._name, self._producer = name, producer
        self._sessions: set[InprocSession] = set()
        with _changed:
            if _listeners.setdefault(name, self) is not self:
                raise BusyError(f"inproc://{name} is served already in this process")
            _changed.notify_all()

    @property
    def incarnation(self) -> str:
        """Identifies the run of the producer."""
        return self._producer.incarnation

    def open(self) -> None:
        """Do nothing: sessions come by calls."""

    def add(self, session: InprocSession) -> None:
        """Register a session."""
        self._sessions.add(session)

    def handle(self, session: InprocSession, message: Message) -> None:
        """Handle a session's message in the producer's loop; callable from finalizers."""
        self._producer.loop.call(partial(self._producer.handle, session, message))

    def detach(self, session: InprocSession) -> None:
        """Remove a session that is closed; its leases stay until their views are freed."""
        self._producer.loop.call(partial(self._detach, session))

    def region(self, location: Location, draft: int) -> Region:
        """Return the slot of an offer."""
        whole = self._producer.pool.mapping(location.arena).region
        return Region(
            whole.address + location.offset,
            SLOT + location.nbytes + draft,
            whole.owner,
            readonly=True,
        )

    def send(self, peer: InprocSession, message: Message) -> None:
        """Hand a message to the session, in the calling thread."""
        peer.get_table.on_message(message)

    def close(self) -> None:
        """Free the name and fail the gets of every session."""
        with _changed:
            if _listeners.get(self._name) is self:
                del _listeners[self._name]
        for session in self._sessions:
            session.on_disconnect(
                PeerLostError(f"inproc://{self._name} was closed by its producer")
            )
        self._sessions.clear()

    def _detach(self, session: InprocSession) -> None:
        self._sessions.discard(session)
        self._producer.cancel_gets(session)


class InprocSession(MappedSession, PeerHandle):
    """A consumer's connection to a producer of the same process."""

    listener: InprocListener

    def __init__(self, url: str, listener: InprocListener):
        PeerHandle.__init__(self, listener)
        self._url, self._closed = url, False
        self.incarnation = listener.incarnation
        post = partial(listener.handle, self)
        self.get_table = GetTable(post, post)
        listener.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether either side closed the link."""
        return self._closed

    def slot(self, location: Location, draft: int) -> Region:
        """Return the slot in the memory of the producer."""
        try:
            return self.listener.region(location, draft)
        except ClosedError as error:
            raise PeerLostError(f"{self._url}: the producer closed the link") from error

    def send(self, message: Abort) -> None:
        """Hand a message to the loop of the producer."""
        self.listener.handle(self, message)

    def on_disconnect(self, error: PeerLostError) -> None:
        """The producer closed the link: fail the gets."""
        self._closed = True
        self.get_table.close(error)

    def close(self) -> None:
        """Fail the gets; the views that exist stay valid."""
        self._closed = True
        self.get_table.close(closed_here(self._url))
        self.listener.detach(self)


class InprocConsumer(SessionConsumer):
    """The consuming end of `inproc://name`."""

    def __init__(self, name: str):
        super().__init__(f"inproc://{name}")
        self._name = name

    def _interrupt(self) -> None:
        with _changed:
            _changed.notify_all()

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        deadline = time.monotonic() + (0.0 if no_wait else timeout)
        with _changed:
            while self._name not in _listeners:
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        f"nobody serves {self._url} after {timeout:g} s",
                        waited=timeout,
                        phase="connecting",
                    )
                _changed.wait(left)
            return InprocSession(self._url, _listeners[self._name])


def _serve(name: str, options: Options) -> PooledProducer:
    refuse_keys(f"inproc://{name}", options)
    return PooledProducer(name, options, Mapping.anonymous, partial(InprocListener, name))


def _connect(name: str, options: Options, timeout: float) -> InprocConsumer:
    refuse_keys(f"inproc://{name}", options)
    consumer = InprocConsumer(name)
    consumer.connect(timeout)
    return consumer


BACKEND = Backend(serve=_serve, connect=_connect)
