"""What a producer needs of each way by which readers come to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from omni_kvlink.connectors.protocol.messages import Message


class Listener(ABC):
    """One way to a producer: hands it what readers say, and carries what it says to them.

    Everything but `send` and `forget` is called in the producer's loop.

    Attributes:
        ways: by which a reader that comes here can have its bytes: "shm", "ucx", "zmq".
        became: what the URL said, and what it became: the system chose the port.
    """

    transports: tuple[str, ...] = ()
    bound_url: tuple[str, str] = ("", "")

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is a thread of the door's own, that `shut` waits for."""
        return False

    @abstractmethod
    def open(self) -> None:
        """Begin to hear who comes: the producer knows all its doors now."""

    @abstractmethod
    def send(self, reader: Any, message: Message) -> None:
        """Carry a message to a reader of this door; the lock is held, so it must not block."""

    def refuses(self, device: str) -> str:
        """Why no payload can be sent from a caller's own memory on this device; "" if it can."""
        return "readers look into the link's own memory here"

    def flush(self) -> None:  # noqa: B027 (most have said it by then)
        """Let what was said leave now; in the thread that said it, with no lock held."""

    @abstractmethod
    def shut(self) -> None:
        """Last words, then the end; called once."""

    def health(self) -> dict[str, Any]:
        """State and counters, as JSON values."""
        return {}

    def tick(self, now: float) -> float:
        """Do what is due; when to be called next."""
        return float("inf")

    def forget(self, arena: int) -> None:  # noqa: B027 (most doors passed nobody any)
        """An arena was dropped; the pool's lock is held."""


class PeerHandle:
    """A reader, as its producer knows it: a peer of the exchange."""

    def __init__(self, listener: Listener):
        self.listener = listener
