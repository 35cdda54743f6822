"""Small transfers, several of them outstanding: who sends them, and who receives and compares them.

Payload `n` of a run holds what `ChunkBytes` has for the run as a stream, and `n` modulo
`Paced.chunks`: no two runs hold the same.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.bench.chunks import ChunkBytes, open_fifo, read_records
from omni_kvlink.bench.payloads import bytes_of
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.setups import Paced
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from omni_kvlink import KVConsumer, KVProducer, PendingBatch, Receipt, Received
    from omni_kvlink.lowlevel import PendingGet

PATIENCE = 30.0
"""Seconds that either end waits for the other one."""
TTL = 3600.0
"""Seconds that a payload may wait for its reader: longer than any run."""
TENSOR = "hidden"


class SentRun(NamedTuple):
    """When the first call of a run began, and the CPU of all; nanoseconds."""

    began: int
    cpu: int


def key_of(run: int, number: int) -> str:
    """The request id of a payload."""
    return f"run-{run}-{number}"


def payload_of(run: int, number: int, tensor: torch.Tensor) -> TensorTransferData:
    """Payload `number` of a run."""
    return TensorTransferData(key_of(run, number), {TENSOR: tensor})


def put_singly(
    link: KVProducer, run: int, tensors: Sequence[torch.Tensor], outstanding: int
) -> None:
    """`put` one after the other; blocks while `outstanding` of them have not been released."""
    receipts = deque[Any]()
    for number, tensor in enumerate(tensors):
        payload = payload_of(run, number, tensor)
        receipts.append(link.put(payload, ttl=TTL, timeout=PATIENCE))
        if len(receipts) >= outstanding:
            receipts.popleft().wait(timeout=PATIENCE)
    for receipt in receipts:
        receipt.wait(timeout=PATIENCE)


def put_batches(
    link: KVProducer, run: int, tensors: Sequence[torch.Tensor], outstanding: int, batch: int
) -> None:
    """`put_many` of `batch` at a time; blocks while `outstanding` have not been released."""
    batches = deque[list[Any]]()
    for start in range(0, len(tensors), batch):
        batches.append(put_batch(link, run, start, tensors[start : start + batch]))
        if len(batches) * batch >= outstanding:
            _wait_for(batches.popleft())
    for receipts in batches:
        _wait_for(receipts)


def put_batch(
    link: KVProducer, run: int, start: int, tensors: Sequence[torch.Tensor]
) -> list[Receipt]:
    """One `put_many`, of the payloads of a run from number `start` on."""
    payloads = [payload_of(run, number, tensor) for number, tensor in enumerate(tensors, start)]
    return link.put_many(payloads, ttl=TTL, timeout=PATIENCE)


def _wait_for(receipts: list[Receipt]) -> None:
    for receipt in receipts:
        receipt.wait(timeout=PATIENCE)


class RunRecorder:
    """Compares the payloads of a run; the CPU is that of this process since it was made."""

    def __init__(self, data: ChunkBytes, run: int, count: int, chunks: int):
        self._expected = [data.raw(run, number % chunks) for number in range(count)]
        self.count, self._wrong, self._cpu = count, 0, time.process_time_ns()

    def take(self, number: int, data: Any) -> None:
        """Compare one payload; `data` has the buffer protocol."""
        self._wrong += bytes(data) != self._expected[number]

    def take_payload(self, number: int, payload: Any) -> None:
        """Compare one payload that came over a link."""
        self.take(number, bytes_of(payload[TENSOR]).data)

    def result(self) -> dict[str, int]:
        """The number of wrong payloads, the CPU, and the moment; nanoseconds."""
        ended, cpu = time.monotonic_ns(), time.process_time_ns() - self._cpu
        return {"wrong": self._wrong, "cpu": cpu, "ended": ended}


def get_singly(link: KVConsumer, run: int, outstanding: int, into: RunRecorder) -> None:
    """Receive in the order of the puts, with at most `outstanding` gets requested; blocks."""
    pending = deque[tuple[float, "PendingGet"]]()
    requested = 0
    for number in range(into.count):
        while requested < into.count and len(pending) < outstanding:
            started = time.perf_counter()
            get = begin_get(link, key_of(run, requested), timeout=PATIENCE)
            pending.append((started, get))
            requested += 1
        _open(link, *pending.popleft(), number, into)


def _open(
    link: KVConsumer, started: float, get: PendingGet, number: int, into: RunRecorder
) -> None:
    delivery = get.wait(timeout=PATIENCE)
    with open_delivery(link, delivery, started=started) as payload:
        into.take_payload(number, payload)


def get_batches(link: KVConsumer, run: int, batch: int, into: RunRecorder) -> None:
    """Receive batch after batch, each requested before the one before it is read; blocks."""
    previous: tuple[range, PendingBatch[Received]] | None = None
    for start in range(0, into.count, batch):
        numbers = range(start, min(start + batch, into.count))
        keys = [key_of(run, number) for number in numbers]
        requested = numbers, link.begin_get_many(keys, timeout=PATIENCE)
        if previous is not None:
            _take_batch(*previous, into)
        previous = requested
    if previous is not None:
        _take_batch(*previous, into)


def _take_batch(numbers: range, batch: PendingBatch[Received], into: RunRecorder) -> None:
    with batch.wait(timeout=PATIENCE) as payloads:
        for number, payload in zip(numbers, payloads, strict=True):
            into.take_payload(number, payload)


class ReceiptPipe:
    """One end of a bare pipe, and of a second one back, in which each item is one byte: read.

    Both are FIFOs; `path` and `path + "-back"` exist. The sender is made first, then the other
    end, then the sender calls `connect`.
    """

    def __init__(self, path: str, *, is_sender: bool):
        self._path = path
        self._data = -1 if is_sender else open_fifo(path, os.O_RDONLY)
        self._replies = open_fifo(path + "-back", os.O_RDONLY if is_sender else os.O_WRONLY)

    def connect(self) -> None:
        """Open the sender's end."""
        self._data = open_fifo(self._path, os.O_WRONLY)

    def wait_until_ready(self) -> None:
        """Wait until the other end receives."""
        self._read_replies(1)

    def send(self, items: Sequence[bytes], outstanding: int) -> None:
        """Write all items; blocks while `outstanding` of them have not been read and compared."""
        unread = 0
        for item in items:
            written = os.write(self._data, item)
            while written < len(item):
                written += os.write(self._data, item[written:])
            unread += 1
            if unread >= outstanding:
                unread -= self._read_replies(outstanding)
        while unread:
            unread -= self._read_replies(outstanding)

    def receive(self, nbytes: int, into: RunRecorder) -> None:
        """Read all items of `nbytes` bytes each; blocks."""
        batches, number = read_records(self._data, nbytes, into.count), 0  # with its buffer made
        os.write(self._replies, b"\0")
        for records in batches:
            for record in records:
                into.take(number, record)
                number += 1
            os.write(self._replies, bytes(len(records)))

    def _read_replies(self, limit: int) -> int:
        count = len(os.read(self._replies, limit))
        if not count:
            raise BenchError("the reader closed its pipe")
        return count

    def close(self) -> None:
        """Close this end."""
        for fd in (self._data, self._replies):
            if fd >= 0:
                os.close(fd)


class RunReader:
    """The reading end of all runs, over a link and over a pipe."""

    def __init__(self, link: KVConsumer, path: str, **paced: int):
        self._link, self._paced = link, Paced(**paced)
        self._data = ChunkBytes(self._paced)
        self._pipe = ReceiptPipe(path, is_sender=False)

    def receive(
        self, kind: str, run: int, count: int, outstanding: int, batch: int
    ) -> dict[str, int]:
        """Receive the `count` payloads of a run; see `RunRecorder.result`."""
        into = RunRecorder(self._data, run, count, self._paced.chunks)
        if kind == "pipe":
            self._pipe.receive(self._paced.nbytes, into)
        elif kind == "batched":
            get_batches(self._link, run, batch, into)
        else:
            get_singly(self._link, run, outstanding, into)
        return into.result()

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()
