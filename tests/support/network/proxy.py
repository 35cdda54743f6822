"""A TCP proxy that delays, cuts or falsifies the bytes of a connection, by a seed."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter

HARMLESS = "slow"
"""The bytes arrive late and in other pieces."""
ENDING = ("cut", "stall")
"""The stream ends, with the connection or without notice."""
FALSE = ("flip", "repeat", "swap", "drop")
"""The stream goes on with other bytes than were sent."""
_PIECE = 1 << 14
_LONG_FRAME = 0x02
"""The one bit of a ZMTP frame's flags that means anything under CURVE."""
_AUTHENTICATED_FROM = 64 + 2 + 6 + 2 + 72
"""Bytes before this one of a connection's direction are ZMTP's greeting and the head of CURVE's
HELLO with its padding: many of them mean nothing to the receiver (RFC 23 and 26 of ZeroMQ)."""


class Corruption:
    """What is done to one direction of one connection.

    Args:
        harm: One of the above.
        seed: Of the random numbers.
        mean: Mean number of bytes between two harms.
    """

    def __init__(self, harm: str, seed: str, mean: float):
        self.harm, self._rng, self._mean = harm, random.Random(seed), mean
        self._left = self._rng.expovariate(1 / mean)

    def size(self) -> int:
        """Return the largest length of the next piece."""
        return self._rng.randint(1, _PIECE)

    def treat(self, piece: bytes) -> bytes:
        """Return what is sent instead of a piece; b"" ends the stream."""
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
            flipped = stretch[0] ^ (_LONG_FRAME | 1 << self._rng.randrange(8))
            return before + bytes([flipped]) + stretch[1:] + after
        if self.harm == "repeat":
            return before + stretch + stretch + after
        return after + stretch + before if self.harm == "swap" else before + after


class Connection:
    """A reader's side and a producer's.

    Attributes:
        falsified: Whether bytes were falsified that CURVE authenticates.
        ended: Whether the connection ended.
    """

    def __init__(self, near: socket.socket, far: socket.socket):
        self.near, self.far = near, far
        self.falsified = self.ended = False

    def has_ended(self) -> bool:
        return self.ended

    def end(self) -> None:
        self.ended = True
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):  # it ended already
                sock.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Forwards connections; between `start_harm` and `stop_harm` it does harm to them.

    Attributes:
        counts: How often each harm was done.
    """

    def __init__(self, target: int):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._corruption: tuple[str, str, float] | None = None
        self._flips: list[int] = []
        self.connections: list[Connection] = []
        self.counts: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def start_harm(self, harm: str, seed: str, mean: float) -> None:
        self._corruption = harm, seed, mean

    def flip_at(self, *offsets: int) -> None:
        """Flip a bit of these bytes of what the producer sends from now on."""
        self._flips = sorted(offsets)

    def stop_harm(self) -> None:
        """Forward all bytes from now on; a stream that stalls is not resumed."""
        self._corruption = None

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
        corruption: Corruption | None = None
        passed = 0
        with contextlib.suppress(OSError):  # the other direction, or an end, ended it
            while piece := source.recv(corruption.size() if corruption else _PIECE):
                if self._corruption is None:
                    corruption = None
                elif corruption is None:
                    harm, seed, mean = self._corruption
                    corruption = Corruption(harm, f"{seed}/{name}", mean)
                treated = corruption.treat(piece) if corruption else piece
                if name.endswith("down"):
                    treated = self._flip(treated)
                if corruption and (treated != piece or corruption.harm == HARMLESS):
                    self.counts[corruption.harm] += 1
                    if corruption.harm in FALSE:
                        connection.falsified |= passed >= _AUTHENTICATED_FROM
                    elif corruption.harm == "stall":
                        self._swallow(source)
                if corruption and corruption.harm in ENDING and not treated:
                    break
                passed += len(piece)
                sink.sendall(treated)
        connection.end()

    def _flip(self, piece: bytes) -> bytes:
        flipped = bytearray(piece)
        for offset in [offset for offset in self._flips if offset < len(piece)]:
            flipped[offset] ^= 1
            self.counts["bit"] += 1
        self._flips = [offset - len(piece) for offset in self._flips if offset >= len(piece)]
        return bytes(flipped)

    def _swallow(self, source: socket.socket) -> None:
        while source.recv(_PIECE):
            pass
