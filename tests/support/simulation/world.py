"""The simulated environment: a virtual clock, unreliable wires, memory that is reused at once."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.protocol.messages import Message, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """A virtual clock with scheduled calls and a random generator; one seed decides everything."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.now = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self.log: deque[str] = deque(maxlen=400)

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), do))

    def soon(self, do: Callable[[], object], most: float = 0.05) -> None:
        self.after(self.chance.uniform(0, most), do)

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, do = heapq.heappop(self._due)
            do()
            del do  # what it kept is freed now, which may schedule more
        self.now = max(self.now, until)

    def record(self, *parts: Any) -> None:
        """Add a line to the log."""
        self.log.append(f"{self.now:9.4f}  " + " ".join(map(str, parts)))


class Memory:
    """A producer's blocks. A freed block holds garbage and is the next to be allocated."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, Any]] = {}
        self._free: list[int] = []

    def allocate(self) -> int:
        number = self._free.pop() if self._free else len(self.blocks)
        self.blocks[number] = {}
        return number

    def free(self, number: int) -> None:
        assert number not in self._free, f"block {number} was freed twice"
        self.blocks[number] = {-1: "garbage"}
        self._free.append(number)

    @property
    def taken(self) -> int:
        return len(self.blocks) - len(self._free)


class Wire:
    """One direction of a connection: ordered, delayed, and cut at a random moment when it breaks.

    Args:
        wild: messages may also overtake each other and arrive twice.
    """

    def __init__(self, clock: Clock, handle: Callable[..., None], *, wild: bool):
        self._clock, self._handle, self._wild = clock, handle, wild
        self._last = 0.0
        self._lost_from = float("inf")

    def send(self, message: Message, *beside: bytes) -> None:
        """Send a message and the bytes that belong to it."""
        data, now, chance = encode(message), self._clock.now, self._clock.chance
        if now >= self._lost_from:
            return
        for _ in range(2 if self._wild and chance.random() < 0.1 else 1):
            at = now + chance.choice((0.0, 0.001, 0.02, 0.2)) * chance.random()
            if not self._wild:
                at = self._last = max(at, self._last)
            self._clock.after(at - now, partial(self._arrive, at, data, *beside))

    def cut(self) -> None:
        """Deliver what arrives before a random moment, and nothing after it."""
        self._lost_from = self._clock.now + self._clock.chance.choice((0.0, 0.01, 0.1))

    def _arrive(self, at: float, data: bytes, *beside: bytes) -> None:
        if at < self._lost_from:
            self._handle(decode(data), *beside)
