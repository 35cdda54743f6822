"""The producer's side of each feature of a campaign."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from omni_kvlink import (
    AppendStream,
    CapacityError,
    KVCacheTransferData,
    KVLinkError,
    Receipt,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.link import put_encoded
from omni_kvlink.testing.caches import layers_of
from support.network.evidence import task_of
from support.network.features import (
    chunk_count,
    chunk_of,
    end_of,
    feature_of,
    is_kept,
    number_of,
    recipe,
    sizes_of,
)
from support.payloads.random_caches import written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink import KVProducer
    from omni_kvlink.payload.bundle import Payload
    from support.network.lookups import Lookups
    from support.network.peer_process import Incarnation, Log

T = TypeVar("T")
Way: TypeAlias = "Callable[[list[str], int], list[Receipt]]"
TTL = 5.0
TIMEOUT = 60.0
PAUSE = 0.004
"""Seconds, at most, that a model computes before the next layer or chunk."""
FAIL = 0.05
"""How often the producer's own block fails, beside each other fault."""
WINDOW = 8
"""Chunks, at most, that a stream keeps."""


class ProducerError(Exception):
    """What a producer raises in its own block."""


class Sender:
    """Puts the payloads of tasks, each with its receipt; what was not put ends as "failed"."""

    lookups: Lookups | None = None

    def __init__(self, link: KVProducer, incarnation: Incarnation, log: Log):
        self._link, self._incarnation, self._log = link, incarnation, log
        self._rng = random.Random(f"{incarnation.seed}/P/{incarnation.number}")
        self._kept = dict[str, list[Receipt]]()  # of each task

    def send(self, task: Mapping[str, int]) -> list[tuple[str, Receipt]]:
        """Put one task's payloads, each for so many readers; return the receipts of these."""
        feature = feature_of(next(iter(task))).removeprefix("aio-")
        is_growing = feature in ("stream", "requests", "streams")
        if self.lookups is not None and feature == "lookup":
            for key in task:
                self._log.write(key, "insert")
                self.lookups.insert(key)
            return []
        if feature == "kept":
            return self._keep(task)
        for key, readers in task.items():
            self._log.write(key, "put", readers, chunk_count(key) if is_growing else -1)
        if is_growing:  # all are opened before one is written: a reader reads them at once
            return self._try(self._append, list(task), task)
        call: Way = {
            "many": self._put_many,
            "allocate": self._put_allocated,
            "direct": self._put_direct,
            "encoded": self._put_encoded,
            "layers": self._put_layers,
            "into": self._put_or_write,
            "background-into": self._put_or_write,
        }.get(feature, self._put)
        sent = []
        for readers in set(task.values()):
            keys = [key for key in task if task[key] == readers]
            sent += self._try(call, keys, readers)
        return sent

    def _keep(self, task: Mapping[str, int]) -> list[tuple[str, Receipt]]:
        """Keep payloads, and put one of so many readers, which have read the others by its end."""
        kept, sent = list(filter(is_kept, task)), list[tuple[str, Receipt]]()
        for key in kept:
            self._log.write(key, "keep", task[key])
        if kept:
            receipts = self._try(self._put_kept, kept, 0)
            self._kept[task_of(kept[0])] = [receipt for _, receipt in receipts]
        for key in task:
            if key not in kept:
                self._log.write(key, "put", task[key])
                sent += self._try(self._put, [key], task[key])
        if not sent:
            self.withdraw(next(iter(task)))
        return sent

    def _put_kept(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        payloads = list(map(self._make, keys))
        return self._link.put_many(payloads, readers=None, timeout=TIMEOUT)

    def withdraw(self, key: str) -> None:
        """Withdraw what is kept for a task, if anything is."""
        for receipt in self._kept.pop(task_of(key), []):
            is_there = self._link.withdraw(receipt.key)
            is_right = receipt.done and is_there is (receipt.state == "withdrawn")
            self._log.write(receipt.key, receipt.state if is_right else "BROKE")

    def _try(
        self, call: Callable[[list[str], T], list[Receipt]], keys: list[str], readers: T
    ) -> list[tuple[str, Receipt]]:
        """Put payloads, again if there was no memory for them; nothing if that failed."""
        while True:
            try:
                return list(zip(keys, call(keys, readers), strict=True))
            except CapacityError:  # noqa: PERF203 (it is rare)
                self._log.write(keys[0], "refused")
                time.sleep(0.03)
            except (TransferFailed, TransferTimeout, ProducerError):
                for key in keys:
                    self._log.write(key, "failed")
                return []

    def _make(self, key: str) -> Payload:
        return recipe(key, self._incarnation.number).make()

    def _put(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        data = self._make(keys[0])
        return [self._link.put(data, readers=readers, ttl=TTL, timeout=TIMEOUT)]

    def _put_many(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        payloads = list(map(self._make, keys))
        return self._link.put_many(payloads, readers=readers, ttl=TTL, timeout=TIMEOUT)

    def _put_allocated(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        data = self._make(keys[0])
        allocation = self._link.allocate(data, timeout=TIMEOUT)
        assert isinstance(data, KVCacheTransferData)
        assert isinstance(allocation.data, KVCacheTransferData)
        for target, source in zip(allocation.data.tensors(), data.tensors(), strict=True):
            target.copy_(source)  # type: ignore[union-attr, arg-type]
            self._compute()
        filled = KVCacheTransferData(
            data.request_id, allocation.data.layer_blocks, data.block_ids, data.metadata
        )
        in_thread = self._rng.random() < 0.5
        return [self._link.put(filled, readers=readers, ttl=TTL, background=in_thread)]

    def _put_direct(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        data = self._make(keys[0])
        return [self._link.put(data, readers=readers, ttl=TTL, timeout=TIMEOUT, direct=True)]

    def _put_encoded(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        manifest, mapping = written(self._make(keys[0]))
        options = {"ttl": TTL, "timeout": TIMEOUT}
        payload = mapping.region.view()
        return [put_encoded(self._link, manifest, payload, readers=readers, **options)]

    def _put_layers(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        data, fails = self._make(keys[0]), self._fails()
        layers = layers_of(data)
        out = self._link.stream_put(data, readers=readers, ttl=TTL, timeout=TIMEOUT)
        with out:
            for (_, number), views in layers.items():
                self._compute()
                if fails and number == len(layers) - 1:
                    raise ProducerError
                out.write_layer(number, *views)
            return [out.finish(end_of(data))]

    def _put_or_write(self, keys: Sequence[str], readers: int) -> list[Receipt]:
        put = self._put_layers if number_of(keys[0]) % 2 else self._put
        return put(keys, readers)

    def _append(self, keys: Sequence[str], readers: Mapping[str, int]) -> list[Receipt]:
        """Open a stream for each key, and append their chunks in turn; or fail them all."""
        failing = self._rng.randrange(max(map(chunk_count, keys))) if self._fails() else -1
        outs = list[AppendStream]()
        try:
            outs += (self._open(key, readers[key]) for key in keys)
            for number in range(max(map(chunk_count, keys))):
                if number == failing:
                    raise ProducerError
                for out in outs:
                    if number < chunk_count(out.request_id):
                        self._append_chunk(out, number)
            return [out.commit() for out in outs]
        except (ProducerError, CapacityError) as error:
            for out in outs:
                out.fail("its model failed")
            raise ProducerError from error

    def _open(self, key: str, readers: int) -> AppendStream:
        incarnation = self._incarnation.number
        return self._link.open_stream(
            key,
            chunk_of(key, incarnation, 0),
            metadata={"incarnation": incarnation},
            window=self._rng.randrange(1, WINDOW),
            readers=readers,
            ttl=TTL,
            timeout=TIMEOUT,
        )

    def _append_chunk(self, out: AppendStream, number: int) -> None:
        key, deadline = out.request_id, time.monotonic() + TIMEOUT
        tensors = chunk_of(key, self._incarnation.number, number)
        self._compute()
        while True:
            try:
                if feature_of(key) == "requests":
                    out.append_requests(sizes_of(tensors), tensors)
                else:
                    out.append(tensors)
            except CapacityError as error:  # noqa: PERF203 (a reader is being restarted)
                if time.monotonic() > deadline:
                    raise KVLinkError(f"{key}: nobody makes room for chunk {number}") from error
            else:
                return

    def _compute(self) -> None:
        time.sleep(PAUSE * self._rng.random())

    def _fails(self) -> bool:
        return self._incarnation.leaves > 0 and self._rng.random() < FAIL
