"""`inproc://name`: both ends in one process; the protocol of the others, without a socket."""

from __future__ import annotations

import threading
import time
from functools import partial

from omni_kvlink.connectors.base import Backend, Options, refuse_keys
from omni_kvlink.connectors.protocol.get_table import GetTable
from omni_kvlink.connectors.protocol.messages import Abort, Location, Message
from omni_kvlink.connectors.protocol.slot import SLOT
from omni_kvlink.connectors.runtime.consumer import (
    MappedSession,
    Session,
    SessionConsumer,
    closed_here,
)
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.errors import BusyError, ClosedError, PeerLostError, TransferTimeout
from omni_kvlink.memory.region import Mapping, Region

_names: dict[str, InprocListener] = {}
_changed = threading.Condition()


class InprocListener(Listener):
    """Readers of the same process get views of the producer's memory."""

    def __init__(self, name: str, producer: PooledProducer):
        self._name, self._producer = name, producer
        self._sessions: set[InprocSession] = set()
        with _changed:
            if _names.setdefault(name, self) is not self:
                raise BusyError(f"inproc://{name} is served already in this process")
            _changed.notify_all()

    @property
    def nonce(self) -> str:
        return self._producer.nonce

    def open(self) -> None:
        """Sessions come by calls."""

    def attach(self, session: InprocSession) -> None:
        self._sessions.add(session)

    def handle(self, session: InprocSession, message: Message) -> None:
        """Take a reader's message to the loop; safe in finalizers."""
        self._producer.loop.call(partial(self._producer.handle, session, message))

    def detach(self, session: InprocSession) -> None:
        self._producer.loop.call(partial(self._leave, session))

    def region(self, location: Location, draft: int) -> Region:
        whole = self._producer.pool.mapping(location.arena).region
        return Region(
            whole.address + location.offset,
            SLOT + location.nbytes + draft,
            whole.owner,
            readonly=True,
        )

    def send(self, reader: InprocSession, message: Message) -> None:
        reader.inbox.on_message(message)

    def _leave(self, session: InprocSession) -> None:
        """What the session still reads stays its own: its views live in this very process."""
        self._sessions.discard(session)
        self._producer.leave(session)

    def shut(self) -> None:
        with _changed:
            if _names.get(self._name) is self:
                del _names[self._name]
        for session in self._sessions:
            session.end(PeerLostError(f"inproc://{self._name} was closed by its producer"))
        self._sessions.clear()


class InprocSession(MappedSession, PeerHandle):
    """A reader's place at a producer."""

    listener: InprocListener

    def __init__(self, url: str, listener: InprocListener):
        PeerHandle.__init__(self, listener)
        self._url, self._over = url, False
        self.nonce = listener.nonce
        post = partial(listener.handle, self)
        self.inbox = GetTable(post, post)
        listener.attach(self)

    @property
    def is_over(self) -> bool:
        return self._over

    def slot(self, location: Location, draft: int) -> Region:
        try:
            return self.listener.region(location, draft)
        except ClosedError as error:
            raise PeerLostError(f"{self._url}: the producer closed the link") from error

    def send(self, message: Abort) -> None:
        self.listener.handle(self, message)

    def end(self, error: PeerLostError) -> None:
        self._over = True
        self.inbox.end(error)

    def close(self) -> None:
        self._over = True
        self.inbox.end(closed_here(self._url))
        self.listener.detach(self)


class InprocConsumer(SessionConsumer):
    """The reading end."""

    def __init__(self, name: str):
        super().__init__(f"inproc://{name}")
        self._name = name

    def _interrupt(self) -> None:
        with _changed:
            _changed.notify_all()

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        deadline = time.monotonic() + (0.0 if no_wait else timeout)
        with _changed:
            while self._name not in _names:
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        f"nobody serves {self._url} after {timeout:g} s",
                        waited=timeout,
                        phase="connecting",
                    )
                _changed.wait(left)
            return InprocSession(self._url, _names[self._name])


def _serve(name: str, options: Options) -> PooledProducer:
    refuse_keys(f"inproc://{name}", options)
    return PooledProducer(name, options, Mapping.anonymous, partial(InprocListener, name))


def _connect(name: str, options: Options, timeout: float) -> InprocConsumer:
    refuse_keys(f"inproc://{name}", options)
    consumer = InprocConsumer(name)
    consumer.connect(timeout)
    return consumer


BACKEND = Backend(serve=_serve, connect=_connect)
