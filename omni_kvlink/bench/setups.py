"""The setup of each command, and the options that say it; neither torch nor numpy is imported."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

from omni_kvlink.cli.arguments import (
    COUNT,
    EVEN,
    PER_SECOND,
    PERCENT,
    POSITIVE,
    SECONDS,
    THREADS,
    NumberArgument,
)
from omni_kvlink.connectors.protocol.messages import DEFAULT_INLINE
from omni_kvlink.payload.dtypes import DTYPES, ITEMSIZE
from omni_kvlink.payload.format import MAX_BRANCHES

BLOCK = 16
"""Tokens of a block of paged sources."""
READERS = ("streams", "callbacks", "asyncio", "steps")
"""The ways in which the one thread of `append-stream`'s reader waits for all streams."""
PEERS = (
    "omni_kvlink",
    "omni_kvlink_into",
    "nixl",
    "mooncake",
    "ray",
    "vllm_omni",
    "torch_multiprocessing",
    "pyzmq",
    "raw_tcp",
)
"""The systems of `peers`, files of `omni_kvlink/bench/peers`."""
FEATURES = ("avx512+clmul", "avx512", "avx2", "neon", "portable")
"""The instruction sets of the native copier."""


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


class Option(NamedTuple):
    """The option of a field, as `--help` has it; its kind: a number, a choice or (None) a flag."""

    group: str
    text: str
    kind: NumberArgument | tuple[str, ...] | None


def option(
    default: Any,
    group: str,
    text: str,
    kind: NumberArgument | tuple[str, ...] | None = POSITIVE,
) -> Any:
    """A field of a setup, and its option."""
    return dataclasses.field(default=default, metadata={"option": Option(group, text, kind)})


@dataclasses.dataclass(frozen=True)
class LinkSetup:
    """The link that a command measures.

    Where there is no pipe beside the link, its reader may be `kvlink-bench serve`, at `connect`.
    """

    across: ClassVar = True

    connector: str
    url: str = ""
    copier: str = "auto"
    mode: str = "pooled"
    connect: str = ""


@dataclasses.dataclass(frozen=True)
class SmallSetup(LinkSetup):
    """A link for payloads that may travel inside their offers."""

    digests: bool = True
    inline: int = DEFAULT_INLINE

    def text(self, copier: str) -> str:
        """The link in words, with the copier that it has."""
        return (
            f"{self.connector}, mode {self.mode}, copier {copier}, digests "
            f"{'crc32c' if self.digests else 'off'}, inline up to {self.inline} bytes"
        )


_POOLS = f"it lies in pools: blocks of {BLOCK} tokens in random order, read by a block table"
_BLOCKS = f"it is read out of blocks of {BLOCK} tokens in random order, and written into such"
_BRANCHES = "send a bundle of N: one branch with bytes, the others in turn half of it and the same"
_DIGESTS = "which the reader checks: full: all; auto: of bytes from a socket (default); off: none"
_BUSY = "put others just before: the producer's code is in the processor's caches"
_TOGETHER = "the chunks of all streams are due at the same moment, as after a batched step"
_FEATURES = "the instruction set (default: the best of this processor)"
_READER = (
    "how the reader's one thread waits for all streams (default: callbacks); steps: "
    "one stream carries them, each chunk of it what is due together (append_requests)"
)


@dataclasses.dataclass(frozen=True)
class LatencySetup(SmallSetup):
    """The setup of `latency`."""

    about: ClassVar = "how long it takes from put until the reader has the views, phase by phase"
    example: ClassVar = "--preset small --rounds 100 --json latency.json"
    module: ClassVar = "latency"
    presets: ClassVar = tuple(PRESETS)

    shape: Shape = dataclasses.field(kw_only=True)
    paged: bool = option(False, "payload", _POOLS, None)
    branches: int = option(
        0, "payload", _BRANCHES, dataclasses.replace(POSITIVE, most=MAX_BRANCHES)
    )
    keys: bool = option(False, "link", "encrypt: TCP with the key of this user (zmq+tcp)", None)
    direct: bool = option(False, "link", "put(direct=True): nothing is copied (zmq, ucx)", None)
    verify: str = option("auto", "link", f"digests {_DIGESTS}", ("auto", "full", "off"))
    rounds: int = option(20, "measurement", "rounds that are counted")
    warmup: int = option(3, "measurement", "rounds before", COUNT)
    busy: bool = option(False, "measurement", _BUSY, None)
    threads: int = option(1, "measurement", "threads of torch, at both ends", THREADS)
    idle: float = option(
        0.0, "measurement", "measure the CPU of the waiting link, too, for so long", SECONDS
    )


@dataclasses.dataclass(frozen=True)
class StreamSetup(LinkSetup):
    """The setup of `stream`."""

    about: ClassVar = (
        "how long it takes until the reader has copied all out: as a whole, and layer by layer"
    )
    example: ClassVar = "--paged"
    module: ClassVar = "streaming"
    presets: ClassVar = tuple(PRESETS)

    shape: Shape = dataclasses.field(kw_only=True)
    paged: bool = option(False, "payload", _BLOCKS, None)
    rounds: int = option(20, "measurement", "rounds that are counted")
    warmup: int = option(3, "measurement", "rounds before", COUNT)


@dataclasses.dataclass(frozen=True)
class AppendStreamSetup(SmallSetup):
    """The setup of `append-stream`: `seconds` of each kind, in `rounds` rounds that alternate."""

    about: ClassVar = (
        "how long a chunk of an append stream is on its way, many streams at once, beside a pipe"
    )
    example: ClassVar = "--together --reader asyncio"
    module: ClassVar = "append_stream"
    across: ClassVar = False

    streams: int = option(64, "chunks", "append streams at the same time")
    rate: float = option(50.0, "chunks", "chunks a second of each stream", PER_SECOND)
    tokens: int = option(1, "chunks", "tokens of a chunk")
    hidden: int = option(2048, "chunks", "elements of a token")
    together: bool = option(False, "chunks", _TOGETHER, None)
    rounds: int = option(4, "measurement", "rounds of link and pipe, in turn")
    seconds: float = option(
        4.0,
        "measurement",
        "for the link, and for the pipe, all rounds together",
        dataclasses.replace(SECONDS, least=0.01),
    )
    reader: str = option("callbacks", "measurement", _READER, READERS)
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

    about: ClassVar = (
        "how many small payloads pass in a second, singly and in batches, beside a pipe"
    )
    example: ClassVar = "--inline 0 --batch 8"
    module: ClassVar = "many"
    across: ClassVar = False

    bytes: int = option(4096, "payloads", "bytes of a payload, an even number", EVEN)
    transfers: int = option(2000, "payloads", "payloads of a run")
    outstanding: int = option(256, "payloads", "gets requested, and payloads not yet released")
    batch: int = option(64, "payloads", "payloads of one put_many, and of one get_many")
    live: int = option(
        10000, "payloads", "payloads that nobody reads, live meanwhile; compared with 10"
    )
    rounds: int = option(6, "measurement", "rounds, each with a run of every kind")
    corrupt: int = -1


@dataclasses.dataclass(frozen=True)
class CopySetup:
    """The setup of `copy`; `threads` are torch's."""

    about: ClassVar = (
        "what this machine's memory allows: methods to copy as many bytes, timed in turn"
    )
    example: ClassVar = "--quick --features avx2"
    module: ClassVar = "membench"
    presets: ClassVar = ("small", "bagel", "bagel36")

    shape: Shape
    rounds: int = option(20, "measurement", "times that each method is timed")
    threads: int = option(1, "measurement", "threads of torch", THREADS)
    features: str = option("auto", "measurement", _FEATURES, ("auto", *FEATURES))
    quick: bool = option(False, "measurement", "copy from and to fewer places", None)


@dataclasses.dataclass(frozen=True)
class VerifySetup(LinkSetup):
    """The setup of `verify`; a bit of the case of the number `corrupt` is flipped on the way."""

    about: ClassVar = (
        "whether every payload arrives bit for bit, by digests that the library has no part in"
    )
    example: ClassVar = "--quick --connector zmq+tcp"
    module: ClassVar = "verify"

    quick: bool = option(False, "measurement", "send a sixth of the cases, small ones", None)
    corrupt: int = -1


@dataclasses.dataclass(frozen=True)
class PeersSetup:
    """The setup of `peers`; `python` are interpreters, by the name of their system."""

    about: ClassVar = "other systems on the same blocks in the same run, in turn, beside a copy"
    example: ClassVar = "--paged --peer omni_kvlink --peer pyzmq --rounds 30"
    module: ClassVar = "peer_run"
    presets: ClassVar = tuple(PRESETS)

    shape: Shape = dataclasses.field(kw_only=True)
    paged: bool = option(False, "payload", _BLOCKS, None)
    seed: int = option(0, "payload", "of the bytes, and of the order of the blocks", COUNT)
    rounds: int = option(10, "measurement", "rounds that are counted")
    warmup: int = option(2, "measurement", "rounds before", COUNT)
    peer: tuple[str, ...] = ()
    python: dict[str, str] = dataclasses.field(default_factory=dict)
    environments: str = ""


@dataclasses.dataclass(frozen=True)
class ServeSetup:
    """The setup of `serve`: where the readers' commands come from."""

    about: ClassVar = "readers for the commands that another host runs with --connect"
    example: ClassVar = "--connections 1"
    module: ClassVar = "remote"
    operands: ClassVar = {
        "url": "tcp://HOST:PORT to listen at, an address of this host; port 0: a free one"
    }
    operand_examples: ClassVar = ("tcp://192.0.2.1:7300",)

    url: str
    connections: int = option(0, "readers", "end when so many readers have ended; 0: never", COUNT)


@dataclasses.dataclass(frozen=True)
class CompareSetup:
    """The setup of `compare`: the paths of two documents."""

    about: ClassVar = "whether the rows of a document are slower than those of an earlier one"
    example: ClassVar = "--fail-over 15% --row ratio"
    module: ClassVar = "compare"
    operands: ClassVar = {
        "before": "the document of a command's --json, A",
        "after": "a later one of the same command, B",
    }
    operand_examples: ClassVar = ("before.json", "after.json")

    before: str
    after: str
    fail_over: float = option(
        15.0, "rows", "exit with 1 if a row of B is slower by more than so much", PERCENT
    )
    row: str = ""


COMMANDS: dict[str, type[Any]] = {
    "latency": LatencySetup,
    "stream": StreamSetup,
    "append-stream": AppendStreamSetup,
    "many": ManySetup,
    "copy": CopySetup,
    "verify": VerifySetup,
    "peers": PeersSetup,
    "serve": ServeSetup,
    "compare": CompareSetup,
}
"""The setup of each subcommand; its `module` has the function `measure`."""
