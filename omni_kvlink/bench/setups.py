"""The setup of each command, as its options say it; neither torch nor numpy is imported here."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from omni_kvlink.connectors.protocol.messages import DEFAULT_INLINE
from omni_kvlink.payload.dtypes import DTYPES, ITEMSIZE

BLOCK = 16
"""Tokens of a block of paged sources."""
READERS = ("streams", "callbacks", "asyncio", "steps")
"""The ways in which the one thread of `growing`'s reader waits for all streams."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dimensions of a cache; `heads` 0 means one latent a layer (MLA) instead of K and V."""

    layers: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def layout(self) -> str:
        """The metadata's layout."""
        return "NHD" if self.heads else "ND"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a layer's tensors."""
        return ("key_cache", "value_cache") if self.heads else ("latent_cache",)

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one token in one tensor."""
        return (self.heads, self.head_dim) if self.heads else (self.head_dim,)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token in one tensor."""
        return math.prod(self.row) * ITEMSIZE[DTYPES[self.dtype]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return self.layers * len(self.parts) * self.tokens * self.row_nbytes

    @property
    def text(self) -> str:
        """The dimensions and the megabytes, for people."""
        return f"{self} = {self.nbytes / 1e6:.3f} MB"

    def __str__(self) -> str:
        parts = "{K, V}" if self.heads else "latent"
        return f"{self.layers} × {parts} × {[self.tokens, *self.row]} {self.dtype}"


PRESETS = {
    "tiny": Shape(1, 1, 1, 1024),
    "small": Shape(28, 64, 4, 128),
    "bagel": Shape(28, 4096, 4, 128),
    "bagel36": Shape(36, 4096, 4, 128),
}


class Paced(NamedTuple):
    """A round: `streams` × `chunks` chunks, each `[tokens, hidden]` bfloat16."""

    streams: int
    chunks: int
    tokens: int
    hidden: int

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk."""
        return 2 * self.tokens * self.hidden

    def position(self, stream: int, number: int) -> int:
        """The index of a chunk in the results, which are in the order of the streams."""
        return stream * self.chunks + number


@dataclasses.dataclass(frozen=True)
class LinkSetup:
    """The link that a command measures."""

    connector: str
    url: str = ""
    copier: str = "auto"


@dataclasses.dataclass(frozen=True)
class SmallSetup(LinkSetup):
    """A link for payloads that may travel inside their offers."""

    mode: str = "pooled"
    digests: bool = True
    inline: int = DEFAULT_INLINE


@dataclasses.dataclass(frozen=True)
class LatencySetup(SmallSetup):
    """The setup of `latency`."""

    shape: Shape = dataclasses.field(kw_only=True)
    paged: bool = False
    branches: int = 0
    rounds: int = 20
    warmup: int = 3
    verify: str = "auto"
    threads: int = 1
    idle: float = 0.0
    direct: bool = False
    busy: bool = False


@dataclasses.dataclass(frozen=True)
class StreamSetup(LinkSetup):
    """The setup of `stream`."""

    shape: Shape = dataclasses.field(kw_only=True)
    paged: bool = False
    rounds: int = 20
    warmup: int = 3


@dataclasses.dataclass(frozen=True)
class GrowingSetup(SmallSetup):
    """The setup of `growing`: `seconds` of each kind, in `rounds` rounds that alternate."""

    streams: int = 64
    rate: float = 50.0
    seconds: float = 4.0
    rounds: int = 4
    tokens: int = 1
    hidden: int = 2048
    together: bool = False
    reader: str = "callbacks"
    corrupt: int = -1

    @property
    def steps(self) -> bool:
        """Whether one stream carries all."""
        return self.reader == "steps"

    @property
    def is_together(self) -> bool:
        """Whether the chunks of all streams are due at the same moment."""
        return self.together or self.steps

    @property
    def paced(self) -> Paced:
        """One round."""
        chunks = max(1, int(self.rate * self.seconds / self.rounds))
        return Paced(self.streams, chunks, self.tokens, self.hidden)


@dataclasses.dataclass(frozen=True)
class ManySetup(SmallSetup):
    """The setup of `many`: `rounds`, each with a run of `transfers` payloads of each kind."""

    bytes: int = 4096
    transfers: int = 2000
    outstanding: int = 256
    batch: int = 64
    live: int = 10000
    rounds: int = 6
    corrupt: int = -1


@dataclasses.dataclass(frozen=True)
class FirstSetup(LinkSetup):
    """The setup of `first`: `rounds` links of each kind, in turn."""

    shape: Shape = dataclasses.field(kw_only=True)
    rounds: int = 5
    wait: float = 2.0


@dataclasses.dataclass(frozen=True)
class CopySetup:
    """The setup of `copy`; `threads` are torch's."""

    shape: Shape
    rounds: int = 20
    threads: int = 1


@dataclasses.dataclass(frozen=True)
class VerifySetup(LinkSetup):
    """The setup of `verify`; a bit of the case of the number `corrupt` is flipped on the way."""

    mode: str = "pooled"
    quick: bool = False
    corrupt: int = -1
