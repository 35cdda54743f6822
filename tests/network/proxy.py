"""A TCP proxy between a reader and its producer that treats their bytes badly, by a seed."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter

HARMLESS = "slow"
"""The stream stays what it was: cut into other pieces, which come late."""
ENDING = ("cut", "stall")
"""The stream ends: the connection too, or nobody is told."""
FALSE = ("flip", "repeat", "swap", "drop")
"""The stream goes on, and is not what was sent."""
_PIECE = 1 << 14


class Mischief:
    """What is done to one direction of one connection.

    Args:
        mean: bytes between two harms.
    """

    def __init__(self, harm: str, seed: str, mean: float):
        self.harm, self._rng, self._mean = harm, random.Random(seed), mean
        self._left = self._rng.expovariate(1 / mean)

    def size(self) -> int:
        """Of the next piece, at most."""
        return self._rng.randint(1, _PIECE)

    def treat(self, piece: bytes) -> bytes:
        """What becomes of it; nothing, if the stream ends here."""
        if self.harm == HARMLESS:
            time.sleep(self._rng.random() * 0.002)
            return piece
        self._left -= len(piece)
        if self._left > 0:
            return piece
        self._left = self._rng.expovariate(1 / self._mean)
        return b"" if self.harm in ENDING else self._falsify(piece)

    def _falsify(self, piece: bytes) -> bytes:
        start, stop = sorted(self._rng.sample(range(len(piece) + 1), 2))
        before, stretch, after = piece[:start], piece[start:stop], piece[stop:]
        if self.harm == "flip":
            return before + bytes([stretch[0] ^ 1 << self._rng.randrange(8)]) + stretch[1:] + after
        if self.harm == "repeat":
            return before + stretch + stretch + after
        return after + stretch + before if self.harm == "swap" else before + after


class Connection:
    """A reader's side and a producer's.

    Attributes:
        falsified: when the stream was first falsified, 0 if it was not.
        ended: when the connection was over.
    """

    def __init__(self, near: socket.socket, far: socket.socket):
        self.near, self.far = near, far
        self.falsified = self.ended = 0.0

    def end(self) -> None:
        self.ended = self.ended or time.monotonic()
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):  # it ended already
                sock.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens on loopback; it behaves until `misbehave`, and again after `behave`.

    Attributes:
        counts: how often each harm was done.
    """

    def __init__(self, target: int):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._mischief: tuple[str, str, float] | None = None
        self.connections: list[Connection] = []
        self.counts: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def misbehave(self, harm: str, seed: str, mean: float) -> None:
        self._mischief = harm, seed, mean

    def behave(self) -> None:
        """Streams that were falsified stay so; one that stalls goes on doing so."""
        self._mischief = None

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self.connections:
            connection.end()
        for thread in self._threads:
            thread.join()
        for connection in self.connections:
            connection.near.close()
            connection.far.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # `close`
            try:
                far = socket.create_connection(("127.0.0.1", self._target), 5)
            except ConnectionRefusedError:
                near.close()
                continue
            far.settimeout(None)
            self._join(Connection(near, far))

    def _join(self, connection: Connection) -> None:
        number = len(self.connections)
        self.connections.append(connection)
        near, far = connection.near, connection.far
        for source, sink, transport in ((near, far, "up"), (far, near, "down")):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arguments = (connection, source, sink, f"{number}/{transport}")
            self._threads.append(threading.Thread(target=self._pump, args=arguments))
            self._threads[-1].start()

    def _pump(
        self, connection: Connection, source: socket.socket, sink: socket.socket, name: str
    ) -> None:
        mischief: Mischief | None = None
        with contextlib.suppress(OSError):  # the other direction, or an end, ended it
            while piece := source.recv(mischief.size() if mischief else _PIECE):
                if self._mischief is None:
                    mischief = None
                elif mischief is None:
                    harm, seed, mean = self._mischief
                    mischief = Mischief(harm, f"{seed}/{name}", mean)
                treated = mischief.treat(piece) if mischief else piece
                if mischief and (treated != piece or mischief.harm == HARMLESS):
                    self.counts[mischief.harm] += 1
                    if mischief.harm in FALSE:
                        connection.falsified = connection.falsified or time.monotonic()
                    elif mischief.harm == "stall":
                        self._swallow(source)
                if mischief and mischief.harm in ENDING and not treated:
                    break
                sink.sendall(treated)
        connection.end()

    def _swallow(self, source: socket.socket) -> None:
        while source.recv(_PIECE):
            pass
