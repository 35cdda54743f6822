"""`PartitionedKVSource`: receives a KV in parts from several senders and puts them together."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink, KVPayload, Received, Shard, Verify
from omni_kvlink.engine.kv.kv_partition import KVPart, KVPartition
from omni_kvlink.engine.kv.kv_source import KVSource, ReceivedKV, kv_payload
from omni_kvlink.errors import ClosedError
from omni_kvlink.lowlevel import Delivery, PendingGet, begin_get, open_delivery
from omni_kvlink.topology import blank_heads, head_targets, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig
    from omni_kvlink.engine.parallel.rank_coords import RankCoords


def connect_source(
    config: KVConfig, parallel: DiffusionParallelConfig, *, heads: int, coords: RankCoords
) -> KVSource:
    """Connect one rank of a stage to those senders of the stage before that have KV for it.

    Blocks until they serve; raises as `KVLink.connect` and `KVPartition`.
    """
    partition = KVPartition(heads, len(config.sources), parallel)
    if partition.parts() == [KVPart()]:  # each KV is one payload, under its request's id
        url, timeout = config.sources[0], config.connect_timeout
        return KVSource(KVLink.connect(url, timeout=timeout, **config.source_options))
    return PartitionedKVSource.connect_parts(config, partition, coords)


class PartitionedKVSource(KVSource):
    """The links to the senders of a partitioned KV, whose parts make the heads of `shard`."""

    def __init__(self, parts: Sequence[tuple[KVConsumer, KVPart]], shard: Shard):
        self._parts, self._shard = list(parts), shard
        self._links = list({id(link): link for link, _ in parts}.values())
        self.link = self._parts[0][0]

    @classmethod
    def connect_parts(
        cls, config: KVConfig, partition: KVPartition, coords: RankCoords
    ) -> PartitionedKVSource:
        """Connect to those senders that have a part for a rank; see `connect_source`."""
        parts, links = partition.sent_to(coords), dict[int, KVConsumer]()
        deadline = time.monotonic() + config.connect_timeout
        with contextlib.ExitStack() as on_error:
            for sender in {part.sender for part in parts}:
                timeout, url = max(0.0, deadline - time.monotonic()), config.sources[sender]
                links[sender] = KVLink.connect(url, timeout=timeout, **config.source_options)
                on_error.callback(links[sender].close)
            on_error.pop_all()
        size, heads = partition.receivers.kv_ranks, partition.heads
        shard = shard_of(coords.kv_rank(partition.receivers), size, heads=heads)
        return cls([(links[part.sender], part) for part in parts], shard)

    def timeout_hint(self, request_id: str) -> str:
        """Name the keys of the parts, which the stage before puts as its `receivers` says."""
        names = ", ".join(part.key(request_id) for _, part in self._parts)
        return f" as {names}: check kv.receivers of the stage before"

    def begin_get(self, request_id: str, *, timeout: float) -> PartitionedGet:
        """Request every part; see `KVSource.begin_get`."""
        gets: list[PendingGet] = []
        try:
            for link, part in self._parts:
                gets.append(begin_get(link, part.key(request_id), timeout=timeout))
        except BaseException as error:
            for get in gets:
                get.cancel()
            self._abort_others(request_id, error)
            raise
        return PartitionedGet(gets, partial(self._abort_others, request_id))

    def open(self, delivery: Any, *, started: float, verify: Verify) -> ReceivedKV:
        """Open all parts; see `KVSource.open`. With several parts, `to` checks the bytes."""
        received = list[Received]()
        if len(self._parts) > 1 and verify == "full":
            verify = "auto"
        try:
            for (link, _), part in zip(self._parts, delivery, strict=True):
                received.append(open_delivery(link, part, started=started, verify=verify))
        except BaseException:
            for leased in [*received, *delivery[len(received) + 1 :]]:
                leased.release_unread()
            raise
        return PartitionedKV(received, self._shard) if len(received) > 1 else ReceivedKV(*received)

    def abort(self, request_id: str, reason: str) -> None:
        """Tell every sender to keep no part for this rank; raises ClosedError once closed."""
        for link, part in self._parts:
            link.abort(part.key(request_id), reason)

    def close(self) -> None:
        """Close all links."""
        for link in self._links:
            link.close()

    def _abort_others(self, request_id: str, error: BaseException) -> None:
        if len(self._parts) > 1:
            with contextlib.suppress(ClosedError):  # a closed link keeps nothing
                self.abort(request_id, f"another part did not come: {error}")


class PartitionedGet:
    """The gets of all parts of a KV; `future` ends when all have come, or one of them failed."""

    def __init__(self, gets: list[PendingGet], fail: Callable[[BaseException], None]):
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # callers cannot cancel it
        self._gets, self._missing, self._fail = gets, len(gets), fail
        self._lock = threading.Lock()
        for get in gets:
            get.future.add_done_callback(self._on_answer)

    def wait(self, *, timeout: float) -> list[Delivery]:
        """The deliveries, in the order of the gets, each for `timeout` seconds at most.

        Raises the error of one part, after the others were returned to their producers.
        """
        gets, self._gets = self._gets, []
        order = sorted(range(len(gets)), key=lambda part: _rank_of(gets[part]))
        deliveries: dict[int, Delivery] = {}
        try:
            for part in order:
                deliveries[part] = gets[part].wait(timeout=timeout)
        except BaseException as error:
            for delivery in deliveries.values():
                delivery.release_unread()
            for part in order[len(deliveries) + 1 :]:  # the one that raised has ended
                gets[part].cancel()
            self._fail(error)
            raise
        return [deliveries[part] for part in range(len(gets))]

    def cancel(self) -> None:
        """Cancel all gets; idempotent."""
        gets, self._gets = self._gets, []
        for get in gets:
            get.cancel()

    def _on_answer(self, answer: Future[Any]) -> None:
        """Runs in a thread of a connector, which must not block."""
        with self._lock:
            self._missing -= 1
            is_over = not self.future.done() and (not self._missing or bool(answer.exception()))
        if is_over:
            self.future.set_result(None)


def _rank_of(get: PendingGet) -> int:
    """Sorts failed gets first: one of their errors is raised."""
    if not get.future.done():
        return 2
    return 0 if get.future.exception() is not None else 1


class PartitionedKV(ReceivedKV):
    """All parts of a KV, in the order of the heads of `shard`, each in its link's memory."""

    def __init__(self, parts: list[Received], shard: Shard):
        self._parts, self._shard = parts, shard
        self.nbytes = sum(part.manifest.nbytes for part in parts)

    def to(self, device: torch.device) -> KVPayload:
        """One cache on a device, every byte verified while it is copied; SchemaError: not one."""
        payloads = [kv_payload(part) for part in self._parts]
        target = blank_heads(payloads[0], self._shard, device=device)
        for part, view in zip(self._parts, head_targets(payloads, into=target), strict=True):
            part.scatter(view)
        self.release()
        return target

    def release(self) -> None:
        """Release the memory of every part; idempotent."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.release()
