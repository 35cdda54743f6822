"""The copy ledger: what a transfer cost, on each receipt and each received payload."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager


@dataclasses.dataclass
class Ledger:
    """Bytes, copies and seconds of one side of one transfer.

    Attributes:
        nbytes: the whole payload, header and padding included.
        copies: times the tensors' bytes were copied in host memory.
        reused_nbytes: bytes not sent, because a branch is a prefix of another or the same.
        copier: which one moved the bytes; "" if none did.
        instructions: the instruction set it used, where it chooses one.
        digests: "crc32c" or "off".
        seconds: of each phase, in the order they ran.
    """

    nbytes: int = 0
    copies: int = 0
    reused_nbytes: int = 0
    copier: str = ""
    instructions: str = ""
    digests: str = "off"
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in self.seconds.items())
        return (
            f"{self.nbytes / 1e6:.2f} MB, {self.copies} host copies, "
            f"{self.reused_nbytes / 1e6:.2f} MB not sent, digests {self.digests}: {phases}"
        )
