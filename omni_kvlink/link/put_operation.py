"""`PutOperation`: puts payloads together; each is packed, or copied into memory of the link."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.transfer import Ledger
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.copier import CurrentStreams
from omni_kvlink.copier.base import MAX_PACKED
from omni_kvlink.errors import CapacityError, TransferFailed, TransferTimeout
from omni_kvlink.link.in_place import gather_into
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.system.threads import start_detached
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink.connectors.base import Producer
    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.copier import Copier, GatherHandle, StreamEvents
    from omni_kvlink.link.allocation import Allocation
    from omni_kvlink.memory.region import Lease
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.views import TensorView
    from omni_kvlink.system.waits import Deadline

MAX_DIGITS = 80_000
"""Digits of one announcement, so that it fits into a message: the digests of 10,000 MiB."""
FIRST_STEP_NBYTES = 8 << 20
"""Bytes of tensors that are copied before the first announcement to a reader that waits."""


class PayloadPut:
    """One payload of a `PutOperation`: the `PutRequest` of its memory, and what it costs.

    This one is packed: its bytes travel inside its offers. A `CopiedPut` copies them to its lease.

    Attributes:
        header: what the payload begins with, once it is complete.
        allocation: the memory that was allocated for the payload before, if there is any.
    """

    draft = 0
    allocation: Allocation | None = None

    def __init__(
        self,
        key: str,
        nbytes: int,
        ledger: Ledger,
        stream: Lease | None = None,
        packed: bytes = b"",
        header: bytes = b"",
    ):
        self.key, self.nbytes, self.ledger, self.stream = key, nbytes, ledger, stream
        self.packed, self.header = packed, header

    def fill(self, lease: Lease) -> None:
        """Write the payload into its memory, unless it is packed."""


class CopiedPut(PayloadPut):
    """A payload whose tensors are copied into its lease, all by `fill` or layer by layer."""

    def __init__(
        self,
        operation: PutOperation,
        plan: Manifest,
        views: Sequence[TensorView],
        ledger: Ledger,
        *,
        allocation: Allocation | None = None,
        stream: Lease | None = None,
    ):
        super().__init__(plan.request_id, plan.nbytes, ledger, stream=stream)
        self.operation, self.plan, self.views = operation, plan, views
        self.allocation = allocation
        operation.has_allocations |= allocation is not None

    @property
    def can_announce(self) -> bool:
        """Whether the digest of each tensor fits into a message."""
        return all(len(spec.digest) <= MAX_DIGITS for spec in self.plan.tensors)

    def fill(self, lease: Lease) -> None:
        """Copy the tensors that are not in place yet, and write the header; small ones in one call.

        With a `draft` each step is announced, so that readers fetch it, or copy it, meanwhile.
        """
        if self.allocation is not None:
            self.allocation.data.close()
        started, plan, copier = time.perf_counter(), self.plan, self.operation.copier
        is_small = plan.nbytes <= MAX_PACKED and self.allocation is None and not self.draft
        if is_small and copier.pack_into(self.views, plan, lease.region):
            self.ledger.seconds["copy"] = time.perf_counter() - started
            self.ledger.nbytes, self.ledger.copies = plan.nbytes, int(plan.data_nbytes > 0)
            if self.stream is not None:
                self.header = lease.region.read(0, plan.header_nbytes)
            return
        gather = self._gather_in_steps if self.draft else self._gather
        try:
            digests, is_copied = gather(lease)
        except TransferTimeout as error:
            raise self.operation.deadline.passed(self.key, error.phase) from None
        self.ledger.copies = int(is_copied)
        self.ledger.seconds["copy"] = time.perf_counter() - started
        self.write_header(lease, digests)

    def begin(self, lease: Lease) -> None:
        """Announce the payload before it is written."""
        producer, readers = self.operation.producer, self.operation.readers
        producer.begin(lease, self.plan.encode(), readers=readers)

    def announce(self, lease: Lease, first: int, digests: Sequence[str]) -> None:
        """Announce that the tensors from number `first` on are written; one digest for each."""
        producer = self.operation.producer
        if sum(map(len, digests)) <= MAX_DIGITS:
            producer.announce(lease, first, tuple(map(bytes.fromhex, digests)))
            return
        for tensor, digest in enumerate(digests, first):
            producer.announce(lease, tensor, (bytes.fromhex(digest),))

    def copy_layer(
        self, lease: Lease, views: Sequence[TensorView], part: Manifest, after: StreamEvents | None
    ) -> GatherHandle | list[str]:
        """Copy a part of the payload; return the digests, or the copy that runs on a device."""
        copier = self.operation.copier
        if any(map(is_on_device, views)):
            self.ledger.copies = 1
            return copier.begin_gather(views, part, lease.region, after=after)
        digests, is_copied = gather_into(copier, views, part, lease)
        self.ledger.copies |= is_copied
        return digests

    def write_header(self, lease: Lease, digests: Sequence[str]) -> None:
        """Write the header, which has the digests of the tensors."""
        self.header = self.plan.encode(digests)
        lease.region.write(0, self.header)
        self.ledger.nbytes = self.plan.nbytes

    def publish(self, lease: Lease, digests: Sequence[str], extra: bytes = b"") -> Receipt:
        """Write the header and commit a payload whose tensors were copied one by one."""
        self.write_header(lease, digests)
        try:
            return self.operation.publish([self], [lease], extra)[0]
        except BaseException as error:
            self.report(error)
            raise

    def fail(self, lease: Lease, reason: str) -> None:
        """Fail a payload that was announced and will not be whole."""
        self.operation.producer.abort(lease, reason)
        self.report(TransferFailed(f"payload {self.key!r} failed: {reason}", key=self.key))

    def report(self, error: BaseException) -> None:
        """Tell the observers that nothing was published."""
        observers.put_failed(self.operation.producer.scheme, [self], error)

    def _gather(self, lease: Lease) -> tuple[list[str], bool]:
        """Copy the tensors that are not in place; return digests, and whether there were any."""
        copier, deadline, plan = self.operation.copier, self.operation.deadline, self.plan
        if self.allocation is not None:
            return gather_into(copier, self.views, plan, lease, deadline.work)
        digests = copier.gather(self.views, plan, lease.region, deadline=deadline.work)
        return digests, self.nbytes > plan.header_nbytes

    def _gather_in_steps(self, lease: Lease) -> tuple[list[str], bool]:
        """Gather, and announce each step to the readers."""
        copier, deadline = self.operation.copier, self.operation.deadline
        self.begin(lease)
        digests, is_copied = list[str](), False
        for step in announcement_steps(self.plan):
            views, part = self.views[step.start : step.stop], self.plan.part(step)
            new, is_step_copied = gather_into(copier, views, part, lease, deadline.work)
            self.announce(lease, step.start, new)
            digests += new
            is_copied |= is_step_copied
        return digests, is_copied


class PutOperation:
    """Puts payloads together: all are reserved, then filled, then published; on an error none.

    `deadline` is for all of it, `readers` (None: any number) and `ttl` are for each payload.
    """

    def __init__(
        self,
        producer: Producer,
        copier: Copier,
        deadline: Deadline,
        readers: int | None,
        ttl: float,
        digests: bool,
    ):
        self.producer, self.copier, self.deadline = producer, copier, deadline
        self.readers, self.ttl, self.digests = readers, ttl, digests
        self.has_allocations = False

    def prepare(self, data: Payload, *, stream: Lease | None = None) -> PayloadPut:
        """Pack a payload, or plan its copy; `stream` if it is a chunk of that append stream."""
        started, producer, key = time.perf_counter(), self.producer, data.request_id
        layout = data.find_layout(producer.layouts, digests=self.digests)
        limit, views = producer.inline_limit, data.tensors()
        trace = observers.begin(producer.scheme, key, started) if observers.registered else {}
        if trace:
            layout = layout.with_trace(trace)
        planned, packed = time.perf_counter(), None
        try:
            if layout.data_nbytes < limit:
                packed = self.copier.pack_known(views, layout, key)
            if packed is None or len(packed) > limit:
                plan = layout.plan(key)
                planned = time.perf_counter()
                if plan.nbytes > limit or any(map(is_on_device, views)):
                    return self._copied(data, plan, views, planned - started, trace, stream=stream)
                packed = self.copier.pack(views, plan)
        except BaseException as error:
            observers.put_refused(producer.scheme, key, error, trace)
            raise
        ledger = self.ledger(data, planned - started, trace)
        ledger.nbytes, ledger.copies = len(packed), int(layout.data_nbytes > 0)
        ledger.seconds["copy"] = time.perf_counter() - planned
        header = b"" if stream is None else packed[: len(packed) - layout.data_nbytes]
        return PayloadPut(key, len(packed), ledger, stream, packed, header)

    def prepare_allocated(self, data: Payload, allocation: Allocation) -> CopiedPut:
        """Plan the copy of what does not lie in the allocated memory yet."""
        started = time.perf_counter()
        plan, views = data.plan(digests=self.digests, capacity=allocation.capacity), data.tensors()
        plan, trace = self.begin(plan, started, grows=False)
        seconds = time.perf_counter() - started
        return self._copied(data, plan, views, seconds, trace, allocation=allocation)

    def begin(
        self, plan: Manifest, started: float, *, grows: bool = True
    ) -> tuple[Manifest, dict[str, str]]:
        """Tell the observers that a put has begun; return its plan, with their trace context.

        The header has it if it may grow, or has room for it.
        """
        if not observers.registered:
            return plan, {}
        trace = observers.begin(self.producer.scheme, plan.request_id, started)
        return plan.with_trace(trace, grows=grows), trace

    def prepare_stream(
        self, data: Payload | Manifest, allocation: Allocation | None = None
    ) -> CopiedPut:
        """Plan a payload that is announced before it is written."""
        started = time.perf_counter()
        if isinstance(data, Manifest):
            plan = data
        elif allocation is None:
            plan = data.cached_plan(self.producer.layouts, digests=self.digests)
        else:
            plan = data.plan(digests=self.digests, capacity=allocation.capacity)
        plan, trace = self.begin(plan, started, grows=allocation is None)
        ledger = self.ledger(data, time.perf_counter() - started, trace)
        ledger.digests = "crc32c" if plan.has_digests else "off"
        put = CopiedPut(self, plan, (), ledger, allocation=allocation)
        put.draft = plan.header_nbytes
        return put

    def _copied(
        self,
        data: Payload,
        plan: Manifest,
        views: Sequence[TensorView],
        plan_seconds: float,
        trace: dict[str, str],
        *,
        allocation: Allocation | None = None,
        stream: Lease | None = None,
    ) -> CopiedPut:
        """Return the put of a payload; announced before it is written if that saves time.

        A reader that waits can fetch, or copy, the first tensors while the last are being copied.
        """
        ledger, producer = self.ledger(data, plan_seconds, trace), self.producer
        put = CopiedPut(self, plan, views, ledger, allocation=allocation, stream=stream)
        is_long = plan.nbytes > 2 * FIRST_STEP_NBYTES and put.can_announce
        if is_long and producer.has_waiting_reader(put.key):
            put.draft = plan.header_nbytes
        return put

    def run(self, puts: Sequence[PayloadPut]) -> list[Receipt]:
        """Reserve, fill and publish the payloads; blocks while there is no memory for them."""
        leases: list[Lease] = []
        try:
            self.reserve(puts, leases)
            fault_points.point("put.reserved")
            for put, lease in zip(puts, leases, strict=True):
                put.fill(lease)
            fault_points.point("put.copied")
            return self.publish(puts, leases)
        except BaseException as error:
            for lease in leases:
                lease.release()
            observers.put_failed(self.producer.scheme, puts, error)
            raise

    def run_in_thread(self, put: CopiedPut) -> Receipt:
        """Do the same in a thread; the receipt reports a failure."""
        lease = self.reserve_alone(put)
        receipt = self.producer.receipt(lease, put.ledger)
        run = partial(CurrentStreams().call, partial(self._run_or_fail, put, lease))
        try:
            start_detached(run)
        except CapacityError as error:
            lease.release()  # not after an interrupt: the thread may write to its memory
            observers.put_failed(self.producer.scheme, [put], error)
            raise
        return receipt

    def reserve_alone(self, put: PayloadPut) -> Lease:
        """Return the lease of one payload that is not written at once."""
        leases: list[Lease] = []
        try:
            self.reserve([put], leases)
        except BaseException as error:
            for lease in leases:
                lease.release()
            observers.put_failed(self.producer.scheme, [put], error)
            raise
        return leases[0]

    def reserve(self, puts: Sequence[PayloadPut], leases: list[Lease]) -> None:
        """Append the lease of each payload; after an error the caller releases them."""
        started = time.perf_counter()
        unallocated = puts
        if self.has_allocations:
            unallocated = [put for put in puts if put.allocation is None]
        self.producer.reserve(unallocated, deadline=self.deadline, leases=leases)
        if self.has_allocations:
            for number, put in enumerate(puts):
                if put.allocation is not None:
                    leases.insert(number, put.allocation.take())
                    leases[number].shrink(put.nbytes)
        seconds = time.perf_counter() - started
        for put in puts:
            put.ledger.seconds["reserve"] = seconds

    def publish(
        self, puts: Sequence[PayloadPut], leases: Sequence[Lease], extra: bytes = b""
    ) -> list[Receipt]:
        """Commit the payloads, which are complete; blocks only for readers of direct ones."""
        fault_points.point("put.encoded")
        started, ledgers = time.perf_counter(), [put.ledger for put in puts]
        receipts = self.producer.publish(
            leases,
            readers=self.readers,
            ttl=self.ttl,
            ledgers=ledgers,
            deadline=self.deadline.at,
            extra=extra,
        )
        seconds = time.perf_counter() - started
        for ledger in ledgers:
            ledger.seconds["publish"] = seconds
        if observers.registered:
            observers.committed(self.producer.scheme, receipts)
        return receipts

    def _run_or_fail(self, put: CopiedPut, lease: Lease) -> None:
        """Run in the thread; a payload that cannot be committed is failed, then its lease ends."""
        with lease:
            try:
                put.fill(lease)
                self.publish([put], [lease])
            except Exception as error:
                self.producer.abort(lease, f"it could not be committed: {error!r}")
                observers.put_failed(self.producer.scheme, [put], error)

    def ledger(
        self, data: Payload | Manifest, plan_seconds: float, trace: dict[str, str]
    ) -> Ledger:
        """Return a new ledger with what is known of a put before it begins."""
        copier, digests = self.copier, "crc32c" if self.digests else "off"
        reused_nbytes = 0 if isinstance(data, Manifest) else data.reused_nbytes
        seconds = {"plan": plan_seconds, "reserve": 0.0}
        about = copier.name, copier.features, digests, seconds
        return Ledger(0, 0, reused_nbytes, *about, trace=trace)


def announcement_steps(plan: Manifest) -> Iterator[range]:
    """Divide the tensors into steps for announcements; a short one first, a message has a cost.

    The reader's copy ends one step behind this one.
    """
    step_nbytes, first, nbytes = FIRST_STEP_NBYTES, 0, 0
    for number, spec in enumerate(plan.tensors):
        nbytes += spec.nbytes
        if nbytes >= step_nbytes:
            yield range(first, number + 1)
            step_nbytes, first, nbytes = 2 * FIRST_STEP_NBYTES, number + 1, 0
    if first < len(plan.tensors):
        yield range(first, len(plan.tensors))


def is_on_device(view: TensorView) -> bool:
    """Whether a copy of this tensor runs by itself, on its device."""
    memory = view.pool if isinstance(view, PagedTensor) else view
    return not memory.is_cpu
