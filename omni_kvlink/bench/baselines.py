"""What a link over a network is compared with: it moves as many bytes, and does nothing else.

Each baseline has a sending end in the producer's process and a receiving end in the reader's.
"""

from __future__ import annotations

import mmap
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import zmq

from omni_kvlink.bench.bare_ucx import UCX_DEFAULTS, TagSend
from omni_kvlink.connectors.ucx.settings import UcxSettings

if TYPE_CHECKING:
    from omni_kvlink.testing.peer_harness import Peer

SMALL = 64 << 10
"""Bytes of a payload up to which waking counts, not moving."""
_TIMEOUT = 60.0


class Baseline(NamedTuple):
    """One comparison.

    Attributes:
        name: the key's beginning in a JSON document.
        text: what the baseline is, for people.
        limit: how many times as long the link may take; None: no bar.
        phase: of a latency round, which is compared.
    """

    name: str
    text: str
    limit: float | None = None
    phase: str = "total"


RAW_TCP = Baseline("raw_tcp", "one raw TCP connection", 1.4)
PLAIN_UCX = Baseline("plain_ucx", "one bare ucxx tag send, as UCX sets itself up", 1.15)
BARE_UCX = Baseline("bare_ucx", "one bare ucxx tag send, set up as this link is")
ROUND_TRIP = Baseline("zmq_trip", "one bare round trip over ZMQ", 2.0, "wake")
BASELINES = (RAW_TCP, PLAIN_UCX, BARE_UCX, ROUND_TRIP)
_BY_CONNECTOR = {"zmq+tcp": (RAW_TCP,), "zmq+ipc": (RAW_TCP,), "ucx": (PLAIN_UCX, BARE_UCX)}


def baselines_of(connector: str, nbytes: int) -> tuple[Baseline, ...]:
    """The baselines of a connector for payloads of a size; empty for those without a network."""
    found = _BY_CONNECTOR.get(connector, ())
    return (ROUND_TRIP,) if found and nbytes <= SMALL else found


class BaselineSender(Protocol):
    """The sending end of a baseline, in the producer's process."""

    def seconds(self) -> float:
        """Send once; the seconds that it took."""

    def close(self) -> None:
        """Close the sending end."""


class BaselineReceiver(Protocol):
    """The receiving end of a baseline, in the reader's process."""

    def receive(self) -> int:
        """Receive once; the moment of the last byte, in monotonic nanoseconds."""

    def close(self) -> None:
        """Close the receiving end."""


def open_baseline(baseline: Baseline, peer: Peer, nbytes: int) -> BaselineSender:
    """Open both ends of a baseline for `nbytes` bytes; `peer` is the reader."""
    if baseline is RAW_TCP:
        return TcpSender(peer, baseline.name, nbytes)
    if baseline is ROUND_TRIP:
        return ZmqBaselineSender(peer, baseline.name, nbytes)
    return UcxBaselineSender(peer, baseline.name, nbytes, ucx_defaults=baseline is PLAIN_UCX)


class TcpSender:
    """Sends from a warm buffer over one TCP connection."""

    def __init__(self, peer: Peer, name: str, nbytes: int):
        self._peer, self._name = peer, name
        self._source = np.ones(nbytes, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            opening = peer.submit("open_tcp_baseline", name=name, port=port, nbytes=nbytes)
            self._socket, _ = listener.accept()
        opening.result(_TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def seconds(self) -> float:
        """From the first byte's sending to the last one's arrival."""
        receiving = self._peer.submit("receive_baseline", name=self._name)
        started = time.monotonic_ns()
        self._socket.sendall(self._source.data)
        return 1e-9 * (int(receiving.result(_TIMEOUT)) - started)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class TcpReceiver:
    """Receives to a warm buffer, in as few calls as the kernel allows."""

    def __init__(self, port: int, nbytes: int):
        self._target = memoryview(mmap.mmap(-1, nbytes))
        np.frombuffer(self._target, np.uint8)[:: mmap.PAGESIZE] = 1
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT)

    def receive(self) -> int:
        """Receive all bytes; the moment of the last one, in monotonic nanoseconds."""
        at = 0
        while at < len(self._target):
            at += self._socket.recv_into(self._target[at:])
        return time.monotonic_ns()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class UcxBaselineSender:
    """Sends from a warm buffer by one bare tag send of ucxx."""

    def __init__(self, peer: Peer, name: str, nbytes: int, *, ucx_defaults: bool):
        self._peer, self._name = peer, name
        self._tag_send = TagSend(np.ones(nbytes, np.uint8), _ucx_options(ucx_defaults))
        opening = peer.submit(
            "open_ucx_baseline",
            name=name,
            address=self._tag_send.address,
            nbytes=nbytes,
            ucx_defaults=ucx_defaults,
        )
        self._tag_send.connect(opening.result(_TIMEOUT))

    def seconds(self) -> float:
        """From the sending to the last byte's arrival."""
        receiving = self._peer.submit("receive_baseline", name=self._name)
        started = time.monotonic_ns()
        self._tag_send.send()
        return 1e-9 * (int(receiving.result(_TIMEOUT)) - started)

    def close(self) -> None:
        """Close the endpoint."""
        self._tag_send.close()


class UcxReceiver:
    """Receives to a warm buffer by one tag receive of ucxx."""

    def __init__(self, address: str, nbytes: int, *, ucx_defaults: bool):
        buffer = np.zeros(nbytes, np.uint8) + np.uint8(1)
        self._tag_send = TagSend(buffer, _ucx_options(ucx_defaults))
        self._tag_send.connect(address)
        self.address = self._tag_send.address

    def receive(self) -> int:
        """Receive all bytes; the moment of the last one, in monotonic nanoseconds."""
        self._tag_send.receive()
        self._tag_send.wait()
        return time.monotonic_ns()

    def close(self) -> None:
        """Close the endpoint."""
        self._tag_send.close()


def _ucx_options(ucx_defaults: bool) -> dict[str, str]:
    return UCX_DEFAULTS if ucx_defaults else UcxSettings().options()


class ZmqBaselineSender:
    """Sends one message over ZMQ, and waits for its echo."""

    def __init__(self, peer: Peer, name: str, nbytes: int):
        self._peer, self._name, self._message = peer, name, bytes(nbytes)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        opening = peer.submit("open_zmq_baseline", name=name, port=port)
        self._reader, _ = self._socket.recv_multipart()
        opening.result(_TIMEOUT)

    def seconds(self) -> float:
        """There and back again; the reader slept before."""
        receiving = self._peer.submit("receive_baseline", name=self._name)
        time.sleep(0.003)
        started = time.monotonic_ns()
        self._socket.send_multipart([self._reader, self._message])
        self._socket.recv_multipart()
        nanoseconds = time.monotonic_ns() - started
        receiving.result(_TIMEOUT)
        return 1e-9 * nanoseconds

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(0)


class ZmqReceiver:
    """Echoes one message over ZMQ."""

    def __init__(self, port: int):
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.send(b"here")

    def receive(self) -> int:
        """Echo the next message; the moment after it, in monotonic nanoseconds."""
        self._socket.send(self._socket.recv())
        return time.monotonic_ns()

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(0)
