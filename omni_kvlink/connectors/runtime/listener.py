"""The contract of a producer's listeners, which accept the consumers of one transport each."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.protocol.path import MAX_PATHS, LinkPath, path_refusal

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence
    from concurrent.futures import Future

    from omni_kvlink.connectors.protocol.messages import Message

_log = logging.getLogger("omni_kvlink")


class Listener(ABC):
    """Accepts the consumers of one transport, and carries messages between them and the producer.

    Everything but `send`, `flush` and `retire_arena` is called in the producer's loop. By
    `transports` ("shm", "ucx", "zmq") a consumer that connects here can have its bytes. `bound_url`
    is the address as the URL gave it, and as it was bound, with the port assigned. `paths` are
    those that consumers may have here; `refused` counts those that were refused, by reason.
    """

    paths: tuple[LinkPath, ...] = ()
    refused: Counter[str] | None = None
    transports: tuple[str, ...] = ()
    has_queue = False
    """Whether `send` leaves messages for `flush`."""
    bound_url: tuple[str, str] = ("", "")

    def readers(self) -> Sequence[PeerHandle]:
        """Return the consumers that are connected; any thread."""
        return ()

    def refuse_path(self, reader: str, reason: str) -> None:
        """Count and log that a consumer is refused, or has left, since its path is not right."""
        if self.refused is not None:
            self.refused["path"] += 1
        _log.warning("reader %s has no path as required: %s", reader, reason)

    def refuse_inspect(self, reader: str, reason: str) -> None:
        """Count and log that a consumer which is not the owner's asked for the payloads."""
        if self.refused is not None:
            self.refused["inspect"] += 1
        _log.warning("reader %s may not inspect the link: %s", reader, reason)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is a thread of the listener's own, which `close` waits for."""
        return False

    @abstractmethod
    def open(self) -> None:
        """Begin to accept: the producer has all its listeners now."""

    @abstractmethod
    def send(self, peer: Any, message: Message) -> None:
        """Send a message to a peer of this listener; the lock is held, so it must not block."""

    def send_all(self, peer: Any, messages: Sequence[Message]) -> None:
        """Send messages to a peer together, if the transport can; the lock is held."""
        for message in messages:
            self.send(peer, message)

    def direct_refusal(self, device: str) -> str:
        """Return why payloads cannot be sent directly from tensors on `device`; "" if they can."""
        return "readers look into the link's own memory, so put without direct=True, which copies"

    def flush(self) -> None:  # noqa: B027 (most listeners have no queue)
        """Send queued messages now; in the thread that queued them, with no lock held."""

    @abstractmethod
    def close(self) -> None:
        """Send the last messages, then close every connection; called once."""

    def stats(self) -> dict[str, Any]:
        """Return state and counters, as JSON values."""
        return {}

    def tick(self, now: float) -> float:
        """Do what is due at `now`; return when to call next (`time.monotonic`)."""
        return float("inf")

    def pass_arena(self, arena: int) -> None:  # noqa: B027 (most listeners map no arenas)
        """An arena was mapped ahead: its consumers may map it, too."""

    def retire_arena(self, arena: int) -> None:  # noqa: B027 (most listeners map no arenas)
        """An arena was freed; any thread, with the pool's lock held."""


class PeerHandle:
    """A connected consumer, as the producer's `TransferTable` knows it.

    `path` is that of its bytes, and `path_names` what ledgers say of it.
    """

    name = "of this process"
    path: LinkPath | None = None
    path_names = "", ""

    def __init__(self, listener: Listener):
        self.listener = listener

    def inspect_refusal(self) -> str:
        """Return why this consumer may not list the payloads; "" if it is the owner's own."""
        return "its connection does not tell whose it is"

    def set_path(self, path: LinkPath) -> None:
        """Take this path from now on; log it, if its name is another than before."""
        is_new = path.names != self.path_names
        self.path, self.path_names = path, path.names
        if is_new:
            _log.info("reader %s is connected by %s: %s", self.name, path.name, path.why)


def open_all(listeners: Sequence[Listener], opened: Future[None]) -> None:
    """Open the listeners, in the loop; report it to the thread that makes the producer."""
    try:
        for listener in listeners:
            listener.open()
    except Exception as error:
        opened.set_exception(error)
    else:
        opened.set_result(None)


def path_refusals(listeners: Sequence[Listener], require: tuple[str, ...]) -> str:
    """Return why no reader can ever have a path as required; "" if one can."""
    paths: list[LinkPath | None] = [path for listener in listeners for path in listener.paths]
    refusals = [path_refusal(path, require) for path in paths or [None]]
    return "; ".join(filter(None, refusals)) if all(refusals) else ""


def reader_paths(listeners: Sequence[Listener]) -> list[dict[str, Any]]:
    """Return the path of each reader, of `MAX_PATHS` at most, as JSON values."""
    readers = [peer for listener in listeners for peer in listener.readers()]
    return [
        {"reader": peer.name, **peer.path.to_dict()}
        for peer in readers[:MAX_PATHS]
        if peer.path is not None
    ]
