"""What a link over a network is compared with: it moves as many bytes, and does nothing else."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from omni_kvlink.bench.raw_tcp import Sender, Told

SMALL = 64 << 10
"""Bytes of a payload up to which waking counts, not moving."""


class Baseline(NamedTuple):
    """Its name in a document, its name in words, and how much longer a link may take."""

    name: str
    text: str
    limit: float | None = None
    phase: str = "total"


RAW_TCP = Baseline("raw_tcp", "one raw TCP connection", 1.4)
PLAIN_UCX = Baseline("plain_ucx", "one bare ucxx tag send, as UCX sets itself up", 1.15)
BARE_UCX = Baseline("bare_ucx", "one bare ucxx tag send, set up as this link is")
ROUND_TRIP = Baseline("zmq_trip", "one bare round trip over ZMQ", 2.0, "wake")
YARDSTICKS = (RAW_TCP, PLAIN_UCX, BARE_UCX, ROUND_TRIP)
_OF = {"zmq+tcp": (RAW_TCP,), "zmq+ipc": (RAW_TCP,), "ucx": (PLAIN_UCX, BARE_UCX)}


class Bare(Protocol):
    """The sending end of a yardstick."""

    def seconds(self) -> float: ...

    def close(self) -> None: ...


def yardsticks_of(connector: str, nbytes: int) -> tuple[Baseline, ...]:
    """Those of a connector, if it goes over a network."""
    found = _OF.get(connector, ())
    return (ROUND_TRIP,) if found and nbytes <= SMALL else found


def open_bare(yardstick: Baseline, peer: Told, nbytes: int) -> Bare:
    """Its sending end, whose other one is the reader's."""
    name = yardstick.name
    if yardstick is RAW_TCP:
        return Sender(peer, name, nbytes)
    if yardstick is ROUND_TRIP:
        from omni_kvlink.bench.raw_zmq import Sender as ZmqSender

        return ZmqSender(peer, name, nbytes)
    from omni_kvlink.bench.raw_ucx import Sender as UcxSender

    return UcxSender(peer, name, nbytes, plain=yardstick is PLAIN_UCX)
