"""The baselines of a link: each moves as many bytes as the link, and does nothing else.

Each baseline has a sending end in the producer's process and a receiving end in the reader's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import mmap
import os
import random
import select
import socket
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import zmq

from omni_kvlink.bench.report import BenchError
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.worker import load
from omni_kvlink.errors import IntegrityError

if TYPE_CHECKING:
    from omni_kvlink.testing.peer_harness import Peer

SMALL = 64 << 10
"""Bytes of a payload up to which waking counts, not moving."""
LOOPBACK = "127.0.0.1"
TIMEOUT = 60.0
ASLEEP = 0.004
"""Seconds that a reader sleeps before it is woken."""
POLL = 0.001
"""Seconds between two looks of vLLM-Omni's reader, as its own loop waits."""
UCX_DEFAULTS = {"TLS": "tcp", "NET_DEVICES": "lo"}
"""UCX's own settings, over the same network device."""


class Baseline(NamedTuple):
    """One comparison; `name` begins its keys in a JSON document, `text` is for people.

    `limit` is how many times as long the `phase` of a latency round may take; None: no bar.
    """

    name: str
    text: str
    limit: float | None = None
    phase: str = "total"


RAW_TCP = Baseline("raw_tcp", "one raw TCP connection", 1.4)
PLAIN_UCX = Baseline("plain_ucx", "one bare ucxx tag send, as UCX sets itself up", 1.15)
BARE_UCX = Baseline("bare_ucx", "one bare ucxx tag send, set up as this link is")
ROUND_TRIP = Baseline("zmq_trip", "one bare round trip over ZMQ", 2.0, "wake")
ZMQ_IPC = Baseline("zmq_ipc", "ZMQ's own multipart over ipc", 1.0, "fresh")
ZMQ_TCP = Baseline("zmq_tcp", "ZMQ's own multipart over TCP", 1.5, "fresh")
OMNI_SHM = Baseline("vllm_omni_shm", "vLLM-Omni's SharedMemoryConnector, polled each millisecond")
BASELINES = (RAW_TCP, PLAIN_UCX, BARE_UCX, ROUND_TRIP, ZMQ_IPC, ZMQ_TCP, OMNI_SHM)
_READER_SLEEPS = (ROUND_TRIP, ZMQ_IPC, ZMQ_TCP, OMNI_SHM)
_BY_CONNECTOR = {"zmq+tcp": (RAW_TCP,), "zmq+ipc": (RAW_TCP,), "ucx": (PLAIN_UCX, BARE_UCX)}


def baselines_of(connector: str, nbytes: int) -> tuple[Baseline, ...]:
    """The baselines of a connector for payloads of a size, those that can run here."""
    baselines = _BY_CONNECTOR.get(connector, ())
    if nbytes > SMALL:
        return baselines
    if connector == "shm":
        return (ZMQ_IPC, OMNI_SHM) if has_vllm_omni() else (ZMQ_IPC,)
    if connector == "zmq+tcp":
        return ROUND_TRIP, ZMQ_TCP
    return (ROUND_TRIP,) if baselines else ()


def has_vllm_omni() -> bool:
    """Whether vLLM-Omni is installed here."""
    return importlib.util.find_spec("vllm_omni") is not None


class BufferTransfer:
    """One end of a connection that moves a buffer; both ends exchange their addresses as text."""

    address = ""

    def connect(self, address: str) -> None:
        """Connect to the other end; blocks until it does so, too."""
        raise NotImplementedError

    def send(self) -> None:
        """Send the buffer; blocks until it may be modified."""
        raise NotImplementedError

    def receive(self) -> None:
        """Post the receives; the bytes have not been requested yet."""

    def wait(self) -> None:
        """Wait until all bytes are here."""
        raise NotImplementedError

    def check(self) -> None:
        """Compare what came last, if that can be other bytes; not timed."""

    def close(self) -> None:
        """Close the connection."""
        raise NotImplementedError


class TcpSend(BufferTransfer):
    """One TCP connection, with the kernel's own buffers or with larger ones."""

    def __init__(
        self,
        buffer: np.ndarray[Any, Any],
        is_sender: bool,
        socket_buffer: int = 0,
        host: str = LOOPBACK,
    ):
        self._buffer, self._socket_buffer = buffer.data, socket_buffer
        if is_sender:
            self._listener = socket.create_server((host, 0))
            self.address = f"{host}:{self._listener.getsockname()[1]}"

    def connect(self, address: str) -> None:
        """Connect to the other end."""
        if address:
            host, _, port = address.rpartition(":")
            self._socket = socket.create_connection((host, int(port)), TIMEOUT)
        else:
            with self._listener:
                self._socket, _ = self._listener.accept()
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if self._socket_buffer else ():
            self._socket.setsockopt(socket.SOL_SOCKET, option, self._socket_buffer)

    def send(self) -> None:
        """Send the buffer."""
        self._socket.sendall(self._buffer)

    def wait(self) -> None:
        """Receive all bytes, in as few calls as the kernel allows."""
        received = 0
        while received < len(self._buffer):
            received += self._socket.recv_into(self._buffer[received:])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class _ZmqEcho(BufferTransfer):
    """One message over ZMQ, which the receiver echoes; `send` waits for the echo."""

    def __init__(self, nbytes: int, is_sender: bool, host: str):
        self._message = bytes(nbytes)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if is_sender else zmq.DEALER)
        if is_sender:
            self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"

    def connect(self, address: str) -> None:
        if address:
            self._socket.connect(address)
            self._socket.send(b"here")
        else:
            self._reader, _ = self._socket.recv_multipart()

    def send(self) -> None:
        self._socket.send_multipart([self._reader, self._message])
        self._socket.recv_multipart()

    def wait(self) -> None:
        """Echo the next message."""
        self._socket.send(self._socket.recv())

    def close(self) -> None:
        self._context.destroy(0)


class _ZmqParts(BufferTransfer):
    """Two tensors and what is to be known of them, as the parts of one message over ZMQ."""

    _about: ClassVar = {"request_id": "bench", "kv_lens": [1], "ropes": [1], "num_layers": 1}

    def __init__(self, nbytes: int, is_sender: bool, host: str, *, tcp: bool):
        self._tensors = torch.ones(nbytes, dtype=torch.uint8).tensor_split(2)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH if is_sender else zmq.PULL)
        self._directory = None
        if is_sender and tcp:
            self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        elif is_sender:
            self._directory = tempfile.TemporaryDirectory(prefix="kvlink-bench-")
            self.address = f"ipc://{self._directory.name}/zmq"
            self._socket.bind(self.address)

    def connect(self, address: str) -> None:
        if address:
            self._socket.connect(address)

    def send(self) -> None:
        parts = [tensor.numpy().data for tensor in self._tensors]
        self._socket.send_multipart([json.dumps(self._about).encode(), *parts])

    def wait(self) -> None:
        """Block until the next message is here, and make its tensors."""
        about, *parts = self._socket.recv_multipart()
        tensors = [torch.from_numpy(np.frombuffer(bytearray(part), np.uint8)) for part in parts]
        self._received = json.loads(about), tensors

    def check(self) -> None:
        """Compare what came last."""
        about, tensors = self._received
        if about != self._about or not all(map(torch.equal, tensors, self._tensors)):
            raise IntegrityError("other bytes came over ZMQ")

    def close(self) -> None:
        self._context.destroy(0)
        if self._directory is not None:
            self._directory.cleanup()


class TagSend(BufferTransfer):
    """ucxx alone with UCX's own `options`, in messages of `step` bytes (0: one message).

    It sleeps while it has nothing to do: spinning, as ucxx does by itself, is slower where the
    cores are not idle.
    """

    def __init__(self, buffer: np.ndarray[Any, Any], options: dict[str, str], step: int = 0):
        self._ucxx, make = load()
        features = (self._ucxx.Feature.TAG, self._ucxx.Feature.WAKEUP)
        self._worker = self._ucxx.UCXWorker(self._ucxx.UCXContext(options, features), False, False)
        self._worker.init_blocking_progress_mode()
        step = step or len(buffer)
        self._pieces = [buffer[start : start + step] for start in range(0, len(buffer), step)]
        self._messages = [
            (make(piece), self._ucxx.UCXXTag(tag)) for tag, piece in enumerate(self._pieces)
        ]
        self._requests: list[Any] = []
        self.address = bytes(self._worker.address.tobytes()).hex()

    def connect(self, address: str) -> None:
        """Connect to the other end."""
        peer_address = self._ucxx.UCXAddress.create_from_buffer(bytes.fromhex(address))
        self._endpoint = self._worker.create_endpoint_from_worker_address(peer_address, True)

    def send(self) -> None:
        """Send the buffer; blocks until it may be modified."""
        self._requests = [self._endpoint.tag_send(*message) for message in self._messages]
        self.wait()

    def receive(self) -> None:
        """Post the receives."""
        self._requests = [self._worker.tag_recv(*message) for message in self._messages]

    def wait(self) -> None:
        """Wait until all bytes are here, or were sent."""
        while self._is_busy():
            self._sleep()
        for request in self._requests:
            request.check_error()

    def close(self) -> None:
        """Close the connection."""
        self._endpoint.close_blocking()

    def _is_busy(self) -> bool:
        self._worker.progress()
        return not all(request.completed for request in self._requests)

    def _sleep(self, *fds: int) -> None:
        if self._worker.arm():
            select.select([self._worker.epoll_file_descriptor, *fds], [], [])


class _OmniTransfer(BufferTransfer):
    """A payload of two tensors through vLLM-Omni's connector, whose reader polls."""

    def __init__(self, nbytes: int, is_sender: bool):
        with contextlib.redirect_stdout(sys.stderr):  # it prints; the reader's output has replies
            from vllm_omni.distributed.omni_connectors.connectors import shm_connector
        for name in ("vllm", "vllm_omni"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._connector = shm_connector.SharedMemoryConnector({})
        tensors = torch.ones(nbytes, dtype=torch.uint8).tensor_split(2)
        self._payload = dict(zip(("key_cache", "value_cache"), tensors, strict=True))
        self._numbers = itertools.count()
        self._prefix = self.address = f"kvlink-bench-{os.getpid()}" if is_sender else ""

    def connect(self, address: str) -> None:
        self._prefix = address or self._prefix

    def send(self) -> None:
        done, *_ = self._connector.put("0", "1", self._key(), self._payload)
        if not done:
            raise BenchError("vLLM-Omni's connector refused a payload")

    def wait(self) -> None:
        """Poll until the next payload is here."""
        key, deadline = self._key(), time.monotonic() + TIMEOUT
        while (result := self._connector.get("0", "1", key)) is None:
            if time.monotonic() > deadline:
                raise BenchError("a payload did not come through vLLM-Omni's connector")
            time.sleep(POLL)
        self._received = result[0]

    def check(self) -> None:
        """Compare what came last."""
        if not all(torch.equal(self._received[k], tensor) for k, tensor in self._payload.items()):
            raise IntegrityError("other bytes came through vLLM-Omni's connector")

    def close(self) -> None:
        self._connector.close()

    def _key(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}_0_0"


def make_end(name: str, nbytes: int, *, is_sender: bool, host: str = LOOPBACK) -> BufferTransfer:
    """One end of the baseline of a name, with a warm buffer of `nbytes` bytes.

    `host` is the address at which a sender listens for its receiver.
    """
    if name == ROUND_TRIP.name:
        return _ZmqEcho(nbytes, is_sender, host)
    if name in (ZMQ_IPC.name, ZMQ_TCP.name):
        return _ZmqParts(nbytes, is_sender, host, tcp=name == ZMQ_TCP.name)
    if name == OMNI_SHM.name:
        return _OmniTransfer(nbytes, is_sender)
    if name != RAW_TCP.name:
        options = UCX_DEFAULTS if name == PLAIN_UCX.name else UcxSettings().options()
        return TagSend(np.ones(nbytes, np.uint8), options)
    buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    buffer.fill(1)
    return TcpSend(buffer, is_sender, host=host)


class BaselineSender:
    """A connected baseline for `nbytes` bytes; `peer` is the reader, and has the other end."""

    def __init__(self, baseline: Baseline, peer: Peer, nbytes: int, host: str = LOOPBACK):
        self._peer, self._name = peer, baseline.name
        self._is_round_trip = baseline is ROUND_TRIP
        self._reader_sleeps = baseline in _READER_SLEEPS
        self._end = make_end(self._name, nbytes, is_sender=True, host=host)
        address = self._end.address
        opening = peer.submit("open_baseline", name=self._name, address=address, nbytes=nbytes)
        self._end.connect(opening.result(TIMEOUT))

    def seconds(self) -> float:
        """From the first byte's sending to the last one's arrival, or to the echo's."""
        receiving = self._peer.submit("receive_baseline", name=self._name)
        if self._reader_sleeps:
            time.sleep(random.uniform(ASLEEP, ASLEEP + POLL))  # the reader falls asleep
        started = time.monotonic_ns()
        self._end.send()
        returned = time.monotonic_ns()
        arrived = int(receiving.result(TIMEOUT))
        return 1e-9 * ((returned if self._is_round_trip else arrived) - started)

    def close(self) -> None:
        """Close the sending end."""
        self._end.close()
