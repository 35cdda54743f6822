"""Small transfers, several of them outstanding: who sends them, and who receives them.

Payload `n` of a run holds what `ChunkBytes` has for the run as a stream, and `n` modulo
`Paced.chunks`: no two runs hold the same.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink import KVConsumer, KVProducer, PendingBatch, Receipt, Received
    from omni_kvlink.bench.chunks import ChunkRecorder
    from omni_kvlink.lowlevel import PendingGet

PATIENCE = 30.0
"""Seconds that either end waits for the other one."""
TTL = 3600.0
"""Seconds that a payload may wait for its reader: longer than any run."""
TENSOR = "hidden"


def key_of(run: int, number: int) -> str:
    """The request id of a payload."""
    return f"run-{run}-{number}"


def payload_of(run: int, number: int, tensor: torch.Tensor) -> TensorTransferData:
    """Payload `number` of a run."""
    return TensorTransferData(key_of(run, number), {TENSOR: tensor})


def put_run(
    link: KVProducer, run: int, tensors: Sequence[torch.Tensor], outstanding: int, batch: int = 0
) -> None:
    """`put` one after the other, or `put_many` of `batch` at a time.

    It blocks while `outstanding` payloads have not been released.
    """
    live, step = deque[list[Any]](), batch or 1
    for start in range(0, len(tensors), step):
        if batch:
            live.append(put_batch(link, run, start, tensors[start : start + batch]))
        else:
            payload = payload_of(run, start, tensors[start])
            live.append([link.put(payload, ttl=TTL, timeout=PATIENCE)])
        if len(live) * step >= outstanding:
            _wait_for(live.popleft())
    for receipts in live:
        _wait_for(receipts)


def put_batch(
    link: KVProducer, run: int, start: int, tensors: Sequence[torch.Tensor]
) -> list[Receipt]:
    """One `put_many`, of the payloads of a run from number `start` on."""
    payloads = [payload_of(run, number, tensor) for number, tensor in enumerate(tensors, start)]
    return link.put_many(payloads, ttl=TTL, timeout=PATIENCE)


def _wait_for(receipts: Sequence[Receipt]) -> None:
    for receipt in receipts:
        receipt.wait(timeout=PATIENCE)


def get_singly(link: KVConsumer, run: int, outstanding: int, into: ChunkRecorder) -> None:
    """Receive in the order of the puts, with at most `outstanding` gets requested; blocks."""
    pending, requested, count = deque[tuple[float, "PendingGet"]](), 0, into.count
    for number in range(count):
        while requested < count and len(pending) < outstanding:
            started = time.perf_counter()
            get = begin_get(link, key_of(run, requested), timeout=PATIENCE)
            pending.append((started, get))
            requested += 1
        _open(link, *pending.popleft(), number, into)


def _open(
    link: KVConsumer, started: float, get: PendingGet, number: int, into: ChunkRecorder
) -> None:
    delivery = get.wait(timeout=PATIENCE)
    with open_delivery(link, delivery, started=started) as payload:
        _take(number, payload, into)


def get_batches(link: KVConsumer, run: int, batch: int, into: ChunkRecorder) -> None:
    """Receive batch after batch, each requested before the one before it is read; blocks."""
    count, requested = into.count, deque[tuple[range, "PendingBatch[Received]"]]()
    for start in range(0, count, batch):
        numbers = range(start, min(start + batch, count))
        keys = [key_of(run, number) for number in numbers]
        requested.append((numbers, link.begin_get_many(keys, timeout=PATIENCE)))
        if len(requested) > 1:
            _take_batch(*requested.popleft(), into)
    for numbers, pending in requested:
        _take_batch(numbers, pending, into)


def _take_batch(numbers: range, batch: PendingBatch[Received], into: ChunkRecorder) -> None:
    with batch.wait(timeout=PATIENCE) as payloads:
        for number, payload in zip(numbers, payloads, strict=True):
            _take(number, payload, into)


def _take(number: int, payload: Any, into: ChunkRecorder) -> None:
    into.take(number, payload[TENSOR].view(torch.uint8).numpy().data)  # `bytes_of` takes 1 µs more
