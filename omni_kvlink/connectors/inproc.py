"""`inproc://name`: both ends in one process; the protocol of the others, without a socket."""

from __future__ import annotations

import threading
import time
from functools import partial

from ..errors import BusyError, ClosedError, PeerLostError, TransferTimeout
from ..memory import Mapping, Region
from .base import Backend, Options, refuse_keys
from .consumer import PooledSession, Session, SessionConsumer, closed_here
from .inbox import Inbox
from .messages import Abort, Location, Message
from .producer import SLOT, PooledProducer
from .transfer import Peer

_names: dict[str, InprocProducer] = {}
_changed = threading.Condition()


class InprocProducer(PooledProducer):
    """Payloads in memory of this process; readers of the same process get views of it."""

    def __init__(self, name: str, options: Options):
        refuse_keys(f"inproc://{name}", options)
        self._sessions: set[InprocSession] = set()
        super().__init__(name, options, Mapping.anonymous)
        with _changed:
            other = _names.setdefault(name, self)
            _changed.notify_all()
        if other is not self:
            self.close()  # not under the lock: its loop takes it too
            raise BusyError(f"inproc://{name} is served already in this process")

    def attach(self, session: InprocSession) -> None:
        self._sessions.add(session)

    def hear(self, session: InprocSession, message: Message) -> None:
        """Take a reader's message to the loop; safe in finalizers."""
        self._loop.call(partial(self._on_message, session, message))

    def detach(self, session: InprocSession) -> None:
        self._loop.call(partial(self._leave, session))

    def region(self, location: Location, draft: int) -> Region:
        whole = self._pool.mapping(location.arena).region
        return Region(
            whole.address + location.offset,
            SLOT + location.nbytes + draft,
            whole.owner,
            readonly=True,
        )

    def _send(self, peer: Peer, message: Message) -> None:
        assert isinstance(peer, InprocSession)
        peer.inbox.on_message(message)

    def _leave(self, session: InprocSession) -> None:
        """What the session still reads stays its own: its views live in this very process."""
        self._sessions.discard(session)
        with self._lock:
            self._exchange.leave(session)

    def _disconnect(self) -> None:
        with _changed:
            if _names.get(self._name) is self:
                del _names[self._name]
        for session in self._sessions:
            session.end(PeerLostError(f"inproc://{self._name} was closed by its producer"))
        self._sessions.clear()


class InprocSession(PooledSession):
    """A reader's place at a producer."""

    def __init__(self, url: str, producer: InprocProducer):
        self._url, self._producer = url, producer
        self._over = False
        post = partial(producer.hear, self)
        self.inbox = Inbox(post, post)
        producer.attach(self)

    @property
    def is_over(self) -> bool:
        return self._over

    def slot(self, location: Location, draft: int) -> Region:
        try:
            return self._producer.region(location, draft)
        except ClosedError as error:
            raise PeerLostError(f"{self._url}: the producer closed the link") from error

    def send(self, message: Abort) -> None:
        self._producer.hear(self, message)

    def end(self, error: PeerLostError) -> None:
        self._over = True
        self.inbox.end(error)

    def close(self) -> None:
        self._over = True
        self.inbox.end(closed_here(self._url))
        self._producer.detach(self)


class InprocConsumer(SessionConsumer):
    """The reading end."""

    def __init__(self, name: str):
        super().__init__(f"inproc://{name}")
        self._name = name

    def _interrupt(self) -> None:
        with _changed:
            _changed.notify_all()

    def _open(self, timeout: float) -> Session:
        deadline = time.monotonic() + timeout
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


def _connect(name: str, options: Options, timeout: float) -> InprocConsumer:
    refuse_keys(f"inproc://{name}", options)
    consumer = InprocConsumer(name)
    consumer.connect(timeout)
    return consumer


BACKEND = Backend(serve=InprocProducer, connect=_connect)
