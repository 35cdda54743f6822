"""What `UcxTransport` adds to ucxx: the same bytes by both, and by one TCP connection, in turn.

`python -m omni_kvlink.bench.bare_ucx` starts the sender in a process of its own and prints, for
each transfer, milliseconds from the request to the last byte, and the ratio to a bare tag send.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_kvlink._native import host
from omni_kvlink.bench.errors import BenchError
from omni_kvlink.bench.stats import Summary
from omni_kvlink.connectors.ucx import unavailable
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxTransport
from omni_kvlink.connectors.ucx.worker import load

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = 60.0
CHUNK = 8 << 20
UCX_DEFAULTS = {"TLS": "tcp", "NET_DEVICES": "lo"}
"""UCX's own settings, over the same network device."""


class BufferTransfer(ABC):
    """One end of a connection that moves a buffer; both ends exchange their addresses as text."""

    address = ""

    @abstractmethod
    def connect(self, address: str) -> None:
        """Connect to the other end."""

    @abstractmethod
    def send(self) -> None:
        """Send the buffer; blocks until it may be modified."""

    @abstractmethod
    def receive(self) -> None:
        """Post the receives; the bytes have not been requested yet."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all bytes are here."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class TagSend(BufferTransfer):
    """ucxx alone, which sleeps while it has nothing to do.

    Spinning, as ucxx does by itself, is slower where the cores are not idle.

    Args:
        buffer: what is sent, or received to.
        options: UCX's own.
        step: bytes of each message; 0: one message has all.
    """

    def __init__(self, buffer: np.ndarray[Any, Any], options: dict[str, str], step: int = 0):
        self._ucxx, make = load()
        features = (self._ucxx.Feature.TAG, self._ucxx.Feature.WAKEUP)
        self._worker = self._ucxx.UCXWorker(self._ucxx.UCXContext(options, features), False, False)
        self._worker.init_blocking_progress_mode()
        step = step or len(buffer)
        self._pieces = [buffer[at : at + step] for at in range(0, len(buffer), step)]
        self._messages = [
            (make(piece), self._ucxx.UCXXTag(tag)) for tag, piece in enumerate(self._pieces)
        ]
        self._requests: list[Any] = []
        self.address = bytes(self._worker.address.tobytes()).hex()

    def connect(self, address: str) -> None:
        """Connect to the other end."""
        there = self._ucxx.UCXAddress.create_from_buffer(bytes.fromhex(address))
        self._endpoint = self._worker.create_endpoint_from_worker_address(there, True)

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

    def _sleep(self, *others: int) -> None:
        if self._worker.arm():
            select.select([self._worker.epoll_file_descriptor, *others], [], [])


class CopyAndTagSend(TagSend):
    """The least that a put must do, without any protocol.

    A thread copies with digests, step by step, and each step is sent while the next is copied.
    """

    def send(self) -> None:
        """Copy and send; the first call makes the tensors to copy."""
        if not hasattr(self, "_sources"):
            self._sources = [piece.copy() for piece in self._pieces]
        self._requests, self._copied = [], os.eventfd(0, os.EFD_NONBLOCK)
        thread = threading.Thread(target=self._copy)
        thread.start()
        left = iter(self._messages)
        while self._is_busy() or len(self._requests) < len(self._messages):
            with contextlib.suppress(BlockingIOError):
                for _ in range(os.eventfd_read(self._copied)):
                    self._requests.append(self._endpoint.tag_send(*next(left)))
                continue
            self._sleep(self._copied)
        thread.join()
        os.close(self._copied)

    def _copy(self) -> None:
        for source, piece in zip(self._sources, self._pieces, strict=True):
            batch = host.CopyBatch(piece.ctypes.data, piece.nbytes, threads=1, stores=host.STREAM)
            view = host.packed_flat_view(source.ctypes.data, source.nbytes)
            batch.add(0, piece.nbytes, view, digest=True)
            batch.gather()
            os.eventfd_write(self._copied, 1)


class UcxTransportSend(BufferTransfer):
    """`UcxTransport`, in messages of `step` bytes."""

    def __init__(self, buffer: np.ndarray[Any, Any], step: int):
        self._pieces = [buffer[at : at + step] for at in range(0, len(buffer), step)]
        self._transport = UcxTransport()
        self.address = self._transport.address.hex()

    def connect(self, address: str) -> None:
        """Connect to the other end."""
        self._peer = self._transport.connect(bytes.fromhex(address))

    def send(self) -> None:
        """Send the buffer; blocks until it may be modified."""
        self._begin(self._transport.send)
        self.wait()

    def receive(self) -> None:
        """Post the receives."""
        self._begin(self._transport.receive)

    def _begin(self, verb: Any) -> None:
        self._left, self._completed = len(self._pieces), threading.Event()
        self._errors: list[BaseException] = []
        for tag, piece in enumerate(self._pieces):
            verb(self._peer, piece, tag, self._done)

    def _done(self, error: BaseException | None) -> None:
        self._errors += [error] if error is not None else []
        self._left -= 1
        if not self._left:
            self._completed.set()

    def wait(self) -> None:
        """Wait until all bytes are here, or were sent."""
        if not self._completed.wait(TIMEOUT) or self._errors:
            raise BenchError(f"UcxTransport did not deliver: {self._errors}")

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


class TcpSend(BufferTransfer):
    """One TCP connection with large buffers."""

    def __init__(self, buffer: np.ndarray[Any, Any], is_sender: bool):
        self._listener: socket.socket | None
        self._buffer, self._listener = buffer.data, None
        if not is_sender:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = str(self._listener.getsockname()[1])

    def connect(self, address: str) -> None:
        """Connect to the other end."""
        if self._listener is None:
            self._connection = socket.create_connection(("127.0.0.1", int(address)))
        else:
            self._connection, _ = self._listener.accept()
            self._listener.close()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._connection.setsockopt(socket.SOL_SOCKET, option, 4 << 20)

    def send(self) -> None:
        """Send the buffer; blocks until it may be modified."""
        self._connection.sendall(self._buffer)

    def receive(self) -> None:
        """Do nothing: the kernel receives."""

    def wait(self) -> None:
        """Wait until all bytes are here, or were sent."""
        at = 0
        while at < len(self._buffer):
            at += self._connection.recv_into(self._buffer[at:])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def make_transfers(nbytes: int, *, is_sender: bool) -> dict[str, BufferTransfer]:
    """One end of every transfer, over one buffer; the others are compared with the first."""
    buffer = np.full(nbytes, int(is_sender), np.uint8)
    return {
        "bare tag send, our settings": TagSend(buffer, UcxSettings().options()),
        "bare tag send, UCX's settings": TagSend(buffer, UCX_DEFAULTS),
        f"bare, copied in steps of {CHUNK >> 20} MiB": CopyAndTagSend(
            buffer, UcxSettings().options(), CHUNK
        ),
        "UcxTransport, one message": UcxTransportSend(buffer, nbytes),
        f"UcxTransport, messages of {CHUNK >> 20} MiB": UcxTransportSend(buffer, CHUNK),
        "one TCP connection": TcpSend(buffer, is_sender),
    }


def serve(nbytes: int) -> None:
    """Run the sender: print its addresses, then send by each transfer whose number is read."""
    transfers = list(make_transfers(nbytes, is_sender=True).values())
    print(";".join(["addresses", *(one.address for one in transfers)]), flush=True)
    for one, address in zip(transfers, sys.stdin.readline().strip().split(";"), strict=True):
        one.connect(address)
    for line in sys.stdin:
        transfers[int(line)].send()
    for one in transfers:
        one.close()


@contextlib.contextmanager
def sender(nbytes: int) -> Iterator[subprocess.Popen[str]]:
    """The sender's process, within the `with` block."""
    command = [sys.executable, "-m", __spec__.name, "--sender", "--nbytes", str(nbytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def measure(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by transfer, which take turns; the first round is not counted."""
    with sender(nbytes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        transfers = make_transfers(nbytes, is_sender=False)
        print(";".join(one.address for one in transfers.values()), file=process.stdin)
        line = next(line for line in process.stdout if line.startswith("addresses;"))
        for one, address in zip(transfers.values(), line.strip().split(";")[1:], strict=True):
            one.connect(address)
        seconds: dict[str, list[float]] = {name: [] for name in transfers}
        for _ in range(rounds + 1):
            for number, (name, one) in enumerate(transfers.items()):
                one.receive()
                started = time.perf_counter()
                print(number, file=process.stdin)
                one.wait()
                seconds[name].append(time.perf_counter() - started)
        for one in transfers.values():
            one.close()
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    """Measure, and print a line for each transfer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=28 * 2 * 4096 * 4 * 128 * 2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    why_not = unavailable()
    if why_not is not None:
        raise SystemExit(why_not)
    if options.sender:
        serve(options.nbytes)
        return
    seconds = measure(options.nbytes, options.rounds)
    bare = Summary.of(next(iter(seconds.values()))).p50
    for name, values in seconds.items():
        one = Summary.of([1e3 * value for value in values])
        spread = f"{one.p50:6.1f} [{one.min:.1f}..{one.p90:.1f}] ms"
        print(f"{name:30} {spread}, {1e-3 * one.p50 / bare:.2f} x bare")


if __name__ == "__main__":
    main()
