"""The cost of `UcxTransport` over bare ucxx: the same bytes by both, and by TCP, in turn.

`python benchmarks/bare_ucx.py` starts the sender in a process of its own and prints, for
each transfer, milliseconds from the request to the last byte, and the ratio to a bare tag send.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from omni_kvlink._native import host
from omni_kvlink.bench.baselines import TIMEOUT, UCX_DEFAULTS, BufferTransfer, TagSend, TcpSend
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.stats import Summary
from omni_kvlink.connectors.ucx import unavailable
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxTransport
from omni_kvlink.testing.peer_harness import CommandSet, ProcessPeer, serve

CHUNK = 8 << 20


class _CopyAndTagSend(TagSend):
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
        messages = iter(self._messages)
        while self._is_busy() or len(self._requests) < len(self._messages):
            with contextlib.suppress(BlockingIOError):
                for _ in range(os.eventfd_read(self._copied)):
                    self._requests.append(self._endpoint.tag_send(*next(messages)))
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


class _UcxTransportSend(BufferTransfer):
    """`UcxTransport`, in messages of `step` bytes."""

    def __init__(self, buffer: np.ndarray[Any, Any], step: int):
        self._pieces = [buffer[start : start + step] for start in range(0, len(buffer), step)]
        self._transport = UcxTransport()
        self.address = self._transport.address.hex()

    def connect(self, address: str) -> None:
        self._peer = self._transport.connect(bytes.fromhex(address))

    def send(self) -> None:
        self._begin(self._transport.send)
        self.wait()

    def receive(self) -> None:
        self._begin(self._transport.receive)

    def _begin(self, verb: Any) -> None:
        self._unfinished, self._completed = len(self._pieces), threading.Event()
        self._errors: list[BaseException] = []
        for tag, piece in enumerate(self._pieces):
            verb(self._peer, piece, tag, self._done)

    def _done(self, error: BaseException | None) -> None:
        self._errors += [error] if error is not None else []
        self._unfinished -= 1
        if not self._unfinished:
            self._completed.set()

    def wait(self) -> None:
        if not self._completed.wait(TIMEOUT) or self._errors:
            raise BenchError(f"UcxTransport did not deliver: {self._errors}")

    def close(self) -> None:
        self._transport.close()


def make_transfers(nbytes: int, *, is_sender: bool) -> dict[str, BufferTransfer]:
    """One end of every transfer, over one buffer; the others are compared with the first."""
    buffer, ours = np.full(nbytes, int(is_sender), np.uint8), UcxSettings().options()
    return {
        "bare tag send, our settings": TagSend(buffer, ours),
        "bare tag send, UCX's settings": TagSend(buffer, UCX_DEFAULTS),
        f"bare, copied in steps of {CHUNK >> 20} MiB": _CopyAndTagSend(buffer, ours, CHUNK),
        "UcxTransport, one message": _UcxTransportSend(buffer, nbytes),
        f"UcxTransport, messages of {CHUNK >> 20} MiB": _UcxTransportSend(buffer, CHUNK),
        "one TCP connection": TcpSend(buffer, is_sender, 4 << 20),
    }


class _SenderCommands(CommandSet):
    """The commands of the sender's process."""

    def open(self, nbytes: int) -> list[str]:
        self._transfers = list(make_transfers(nbytes, is_sender=True).values())
        return [transfer.address for transfer in self._transfers]

    def connect(self, addresses: list[str]) -> None:
        for transfer, address in zip(self._transfers, addresses, strict=True):
            transfer.connect(address)

    def send(self, number: int) -> None:
        self._transfers[number].send()


def measure(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by transfer, which take turns; the first round is not counted."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    sender = ProcessPeer(environment, module="bare_ucx", arguments=("--sender",), concurrent=False)
    with contextlib.closing(sender) as peer:
        transfers = make_transfers(nbytes, is_sender=False)
        addresses = peer.call("open", nbytes=nbytes)
        ours = [transfer.address for transfer in transfers.values()]
        connecting = peer.submit("connect", addresses=ours)
        for transfer, address in zip(transfers.values(), addresses, strict=True):
            transfer.connect(address)
        connecting.result(TIMEOUT)
        seconds: dict[str, list[float]] = {name: [] for name in transfers}
        for _ in range(rounds + 1):
            for number, (name, transfer) in enumerate(transfers.items()):
                transfer.receive()
                started = time.perf_counter()
                sending = peer.submit("send", number=number)
                transfer.wait()
                seconds[name].append(time.perf_counter() - started)
                sending.result(TIMEOUT)
        for transfer in transfers.values():
            transfer.close()
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
        serve(_SenderCommands(), concurrent=False)
        return
    seconds = measure(options.nbytes, options.rounds)
    bare = Summary.of(next(iter(seconds.values()))).p50
    for name, values in seconds.items():
        summary = Summary.of([1e3 * value for value in values])
        spread = f"{summary.p50:6.1f} [{summary.min:.1f}..{summary.p90:.1f}] ms"
        print(f"{name:30} {spread}, {1e-3 * summary.p50 / bare:.2f} x bare")


if __name__ == "__main__":
    main()
