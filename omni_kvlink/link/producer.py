"""`KVProducer`, the sending end of a link, and the operations that carry a payload out."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from omni_kvlink.connectors.base import Producer
from omni_kvlink.connectors.protocol.get_table import check_timeout
from omni_kvlink.connectors.protocol.transfer import Ledger, Receipt
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.copier import Copier, CurrentStreams
from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    DuplicateKeyError,
    SchemaError,
    TransferFailed,
)
from omni_kvlink.link.allocation import AbortedAllocation, Allocation
from omni_kvlink.link.append_stream import AppendStream
from omni_kvlink.link.end import LinkEnd
from omni_kvlink.link.in_place import gather_into
from omni_kvlink.link.inline_payload import pack_inline, pack_known, record
from omni_kvlink.link.put_stream import PutStream
from omni_kvlink.memory.region import Lease, Region
from omni_kvlink.payload.bundle import PAYLOAD_TYPES, check_payload, payload_list
from omni_kvlink.payload.growing import StreamPosition, StreamSpec
from omni_kvlink.payload.kv_checks import check_reason
from omni_kvlink.payload.layouts import Layout
from omni_kvlink.payload.manifest import Manifest, TensorSpec
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.schema import check_request_id
from omni_kvlink.payload.tensor_memory import address_of
from omni_kvlink.payload.views import aliases, check_view_fits
from omni_kvlink.settings import Flag, Integer, Seconds
from omni_kvlink.system.deadline import Deadline
from omni_kvlink.system.threads import start_detached

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from omni_kvlink.copier import GatherHandle, StreamEvents
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.tensor_data import TensorTransferData
    from omni_kvlink.payload.views import TensorView

MAX_DIGITS = 80_000
"""Digits of one announcement, so that it fits into a message: the digests of 10,000 MiB."""
TURN = 8
"""Small payloads that `put_many` packs before it lets the link's thread answer readers."""
SAME_ID = "two of the payloads have the same request id"
_FLAG, _COUNT, _TTL = Flag(), Integer(1, (1 << 63) - 1), Seconds(above=0, endless=True)
STEP = 8 << 20
"""Bytes of tensors that are copied before the first announcement to a waiting remote reader."""


class KVProducer(LinkEnd):
    """The sending end of a link, from `KVLink.serve`; thread-safe; a context manager."""

    _end: Producer

    def __init__(
        self, url: str, end: Producer, copier: Copier, *, digests: bool, host_reason: str = ""
    ):
        super().__init__(url, end, copier, host_reason=host_reason)
        self._digests = digests
        self._allocations: dict[str, Allocation] = {}
        self._aborts = weakref.WeakValueDictionary[str, AbortedAllocation]()

    def put(
        self,
        data: Payload,
        *,
        readers: int = 1,
        ttl: float = 60.0,
        timeout: float = 10.0,
        digests: bool | None = None,
        background: bool = False,
        direct: bool = False,
    ) -> Receipt:
        """Copy a payload into the link's memory and publish it under its request id.

        Returns when it is committed: the caller's tensors may be modified again. The receipt tells
        whether it was delivered. Tensors that lie in memory which `allocate` returned for this
        request id are not copied.

        Tensors may change until this call, and what was cut or freed is refused by name. During the
        call nobody may cut, free or write them, no other thread and no signal handler.

        With `direct=True` no tensor is copied, and no memory is reserved for one: over ZMQ and UCX
        the bytes are sent from where they lie. `put` then blocks until every reader has received
        the payload. A reader that is lost later cannot be replaced, and the receipt ends FAILED.

        Args:
            data: the tensors and their metadata.
            readers: number of `get` calls that the payload is for.
            ttl: seconds in which they must come.
            timeout: seconds that all of it may take: to wait for memory, to map it and to copy;
                with `direct=True` also to wait for the readers, with `background=True` also what
                the thread does. With 0 it waits for no memory, and the rest has no limit.
            digests: compute CRC-32C digests or not; None for the link's default.
            background: for allocated memory only: return at once, while a thread computes the
                digests and commits. A failure there is reported by the receipt.
            direct: send from the caller's tensors. They must be contiguous and on the host, or, for
                `ucx://` links with `ucx_tls="…,cuda_copy"`, on a GPU, which computes their digests
                (copier "pinned"; with another one, put them with `digests=False`).

        Raises:
            DuplicateKeyError: a live payload has this request id.
            CapacityError: not enough memory within the timeout; `requested` and `free` are bytes.
            TransferTimeout: mapping or copying took longer than the timeout, and nothing was
                published; with `direct=True` also: not every reader received it, none will.
            SchemaError: the tensors do not fit the plan, or cannot be sent as asked.
        """
        with_digests, deadline = self._begin(digests), Deadline(check_timeout(timeout))
        _check_delivery(readers, ttl)
        if direct or background:
            _FLAG.read(direct, "direct")
            _FLAG.read(background, "background")
        started = time.perf_counter()
        if type(data) not in PAYLOAD_TYPES:  # the call costs more than the test
            check_payload(data, "put")
        found = self._layout_or_plan(data, with_digests)
        if isinstance(found, Layout) and not (direct or background):
            receipt = self._put_known(data, found, with_digests, (readers, ttl), started)
            if receipt is not None:
                return receipt
        ledger = self._describe(Ledger(), data, with_digests)
        plan, views = _plan_of(found, data), data.tensors()
        ledger.seconds["plan"] = time.perf_counter() - started
        is_allocated = plan.request_id in self._allocations
        if background and not is_allocated:
            raise SchemaError("background=True is for memory that allocate() gave")
        if direct:
            if background or is_allocated:
                raise SchemaError("direct=True is for tensors of your own, and puts them now")
            direct_put = DirectPutOperation(
                self._end, plan, self._copier, ledger, readers, ttl, deadline=deadline
            )
            return direct_put.run_direct(views)
        put = PutOperation(
            *(self._end, plan, self._copier, ledger, readers, ttl),
            is_allocated=is_allocated,
            deadline=deadline,
        )
        if plan.nbytes <= self._end.inline_limit and not is_allocated:
            receipt = put.run_inline(views)
            if receipt is not None:
                return receipt
        announced = put.has_waiting_reader
        draft = plan.header_nbytes if announced else 0
        lease, allocation = self._reserve(plan, deadline.timeout, ledger, draft=draft)
        if allocation is not None:
            allocation.data.close()
        if background:
            return put.run_in_thread(lease, views)
        return put.run(lease, views, announced=announced)

    def put_many(
        self,
        payloads: Iterable[Payload],
        *,
        readers: int = 1,
        ttl: float = 60.0,
        timeout: float = 10.0,
        digests: bool | None = None,
    ) -> list[Receipt]:
        """Copy several payloads and publish them together; return their receipts in this order.

        All of them are published, or, on an error, none. A reader that waits for several of them
        receives them at once, over shared memory in one message. The link needs memory for all.
        The arguments are those of `put`, for each payload.

        Raises:
            DuplicateKeyError: a live payload has one of the request ids, or two have the same.
            CapacityError: not enough memory within the timeout.
            TransferTimeout: mapping or copying took longer than the timeout.
            SchemaError: the tensors do not fit the plan.
            TransferFailed: one of them was aborted while it was being copied.
        """
        deadline = Deadline(check_timeout(timeout))
        _check_delivery(readers, ttl)
        payloads = payload_list(payloads, "put_many")
        receipts = self._put_inline_many(payloads, readers, ttl, digests, deadline)
        if receipts is not None:
            return receipts
        puts, with_digests = list[PutOperation](), self._begin(digests)
        for data in payloads:
            ledger, before = self._describe(Ledger(), data, with_digests), time.perf_counter()
            plan = _plan_of(self._layout_or_plan(data, with_digests), data)
            ledger.seconds["plan"] = time.perf_counter() - before
            to = self._end, plan, self._copier, ledger, readers, ttl
            puts.append(PutOperation(*to, deadline=deadline))
        views = [data.tensors() for data in payloads]
        leases: list[Lease] = []
        try:
            in_order = self._reserve_many(puts, deadline, leases)
            for put, lease, tensors in zip(puts, in_order, views, strict=True):
                put.fill(lease, tensors)
            ledgers = [put.ledger for put in puts]
            return self._end.publish_many(in_order, readers=readers, ttl=ttl, ledgers=ledgers)
        finally:
            for lease in leases:  # spent, unless there was an error
                lease.release()

    def _put_inline_many(
        self,
        payloads: Sequence[Payload],
        readers: int,
        ttl: float,
        digests: bool | None,
        deadline: Deadline,
    ) -> list[Receipt] | None:
        """Put payloads that all travel inside their offers; None if they cannot.

        What a payload needs until it is packed is freed before the next: so many objects at once
        would have the garbage collector look at all others again and again.
        """
        limit, with_digests = self._end.inline_limit, self._begin(digests)
        if not limit:
            return None
        packed, ledgers = dict[str, bytes](), list[Ledger]()
        for number, data in enumerate(payloads):
            ledger = self._describe(Ledger(), data, with_digests)
            if number % TURN == 0:
                deadline.left(data.request_id)
                self._end.give_way()
            started = time.perf_counter()
            key, payload = data.request_id, None
            if key in packed:
                raise DuplicateKeyError(SAME_ID)
            found = self._layout_or_plan(data, with_digests)
            planned = time.perf_counter()
            if isinstance(found, Layout) and found.data_nbytes < limit:
                payload = pack_known(data, found, self._copier, limit)
            if payload is None:
                plan, views = _plan_of(found, data), data.tensors()
                planned = time.perf_counter()
                is_large = plan.nbytes > limit or key in self._allocations
                if is_large or any(map(is_on_device, views)):
                    return None
                payload = pack_inline(plan, self._copier, views)
            ledger.seconds["plan"] = planned - started
            record(ledger, payload, found.data_nbytes, copy=time.perf_counter() - planned)
            packed[key] = payload
            ledgers.append(ledger)
        return self._end.publish_inline_many(
            list(packed.items()), readers=readers, ttl=ttl, ledgers=ledgers
        )

    def allocate(self, plan: Payload, *, timeout: float = 10.0) -> Allocation:
        """Reserve memory of the link that an engine writes its tensors to.

        `put` of a payload with the same request id then copies nothing that lies there. That
        payload may have fewer tokens, fewer branches and other metadata than `plan`, which is what
        `KVCacheTransferData.blank` returns, or a payload of the same sizes.

        Raises:
            DuplicateKeyError: a live payload has this request id.
            CapacityError: not enough memory within the timeout.
            TransferTimeout: mapping it took longer than the timeout.
            SchemaError: the plan is not valid, or this link's payloads lie on a device.
        """
        self._check_open()
        limit = check_timeout(timeout)
        if self._end.device:
            raise SchemaError(
                f"allocate() gives memory of the host, this link's is on {self._end.device}: "
                "put tensors of your own, or open a link without device="
            )
        check_payload(plan, "allocate")
        layout = plan.layout_or_plan(self._layouts, digests=True)
        capacity = _plan_of(layout, plan).as_capacity()
        key = capacity.request_id
        lease = self._end.reserve(key, capacity.nbytes, timeout=limit, draft=capacity.header_nbytes)
        try:
            return Allocation(capacity, lease, self._end.lend(lease), self._allocations)
        except BaseException:
            self._allocations.pop(key, None)
            lease.release()
            raise

    def stream_put(
        self,
        plan: Payload | Manifest,
        *,
        readers: int = 1,
        ttl: float = 60.0,
        timeout: float = 10.0,
    ) -> PutStream:
        """Send a cache while it is being computed: `with producer.stream_put(plan) as out: …`.

        A reader that called `stream_get` receives each layer once `out.write_layer` has written it;
        other readers receive the whole cache when the block ends. Layers that lie in memory which
        `allocate` returned for this request id are not copied. The plan gives sizes and metadata,
        as `KVCacheTransferData.blank` does. `timeout` is for memory: to wait for it and to map it.
        All else is as for `put`; `ttl` starts with the commit.

        Raises:
            DuplicateKeyError: a live payload has this request id.
            CapacityError: not enough memory within the timeout.
            TransferTimeout: mapping it took longer than the timeout.
            SchemaError: the payload has no layers, or a tensor too long for a stream.
        """
        with_digests, limit = self._begin(None), check_timeout(timeout)
        _check_delivery(readers, ttl)
        if not isinstance(plan, Manifest):
            check_payload(plan, "stream_put")
        elif plan.request_id in self._allocations:
            raise SchemaError("for allocated memory, plan with the cache or bundle itself")
        ledger = self._describe(Ledger(), plan, with_digests)
        with ledger.phase("plan"):
            layout = plan
            if not isinstance(layout, Manifest):
                layout = _plan_of(self._layout_or_plan(layout, with_digests), layout)
        ledger.digests = "crc32c" if layout.has_digests else "off"
        lease, allocation = self._reserve(layout, limit, ledger, draft=layout.header_nbytes)
        put = PutOperation(self._end, layout, self._copier, ledger, readers, ttl)
        return PutStream(put, lease, None if allocation is None else allocation.data)

    def open_stream(
        self,
        request_id: str,
        spec: Mapping[str, Any],
        *,
        dim: int = 0,
        metadata: Mapping[str, Any] | None = None,
        window: int = 64,
        readers: int = 1,
        ttl: float = 60.0,
        timeout: float = 10.0,
        digests: bool | None = None,
    ) -> AppendStream:
        """Send tensors that grow, chunk by chunk: `with producer.open_stream(…) as out: …`.

        For hidden states, tokens or audio that leave a stage while it computes, in unknown number.
        Each chunk that `out.append(tensors)` was given is offered to the readers that called
        `read_stream` when it returns, and a reader that comes later begins with the first one.

        Args:
            request_id: names the stream; no payload may have this name at the same time.
            spec: the tensors of a chunk, as `TensorTransferData` takes them. Names, dtypes and
                shapes count, but for the size of dimension `dim`: meta tensors will do.
            dim: the dimension in which the tensors grow.
            metadata: a JSON object, which the readers have before the first chunk.
            window: number of chunks that are kept for readers; `append` blocks when a reader has
                not released the oldest of them.
            readers: number of `read_stream` calls that the stream is for.
            ttl: seconds after the commit in which they must have come.
            timeout: seconds to wait for memory and to map it.
            digests: compute CRC-32C digests or not; None for the link's default.

        Raises:
            DuplicateKeyError: a live payload has this request id.
            CapacityError: not enough memory within the timeout.
            TransferTimeout: mapping it took longer than the timeout.
            SchemaError: the spec cannot be sent, or has no dimension `dim`.
        """
        with_digests, limit = self._begin(digests), check_timeout(timeout)
        _check_delivery(readers, ttl)
        _COUNT.read(window, "window")
        stream = StreamSpec(request_id, spec, Integer().read(dim, "dim"), metadata)
        head = stream.head(StreamPosition().encode())
        ledger = self._describe(Ledger(), head, with_digests)
        plan = _plan_of(head.layout_or_plan(self._layouts, digests=with_digests), head)
        put = PutOperation(self._end, plan, self._copier, ledger, readers, ttl)
        key, draft = plan.request_id, plan.header_nbytes
        lease = self._end.reserve(key, plan.nbytes, timeout=limit, draft=draft)
        return AppendStream(stream, put, lease, window=window)

    def fail(self, request_id: str, reason: str) -> None:
        """Make every `get` of `request_id`, now or later, raise TransferFailed with this reason."""
        self._check_open()
        self._end.fail(check_request_id(request_id), check_reason(reason))

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """Abort a transfer: free its memory, and make every `get` of it raise TransferFailed.

        Memory that `allocate` returned stays with the caller until its last tensor is freed; `put`
        of it raises TransferFailed.
        """
        self._check_open()
        self._end.fail(check_request_id(request_id), check_reason(reason), aborted=True)
        allocation = self._allocations.get(request_id)
        if allocation is not None:
            self._aborts[request_id] = allocation.abort(reason)

    def _close(self) -> None:
        super()._close()
        self._allocations.clear()  # they would keep the memory for as long as the closed link

    def _begin(self, digests: bool | None) -> bool:
        """Check that the link is open; return whether the call's payloads have digests."""
        if self._closed or os.getpid() != self._pid:  # the call costs more than the test
            self._check_open()
        return self._digests if digests is None else _FLAG.read(digests, "digests")

    def _describe(self, ledger: Ledger, data: Payload | Manifest, digests: bool) -> Ledger:
        """Write into a ledger what is known of a put before it begins; return the ledger."""
        ledger.copier, ledger.instructions = self._copier.name, self._copier.features
        ledger.digests = "crc32c" if digests else "off"
        ledger.reused_nbytes = 0 if isinstance(data, Manifest) else data.reused_nbytes
        return ledger

    def _layout_or_plan(self, data: Payload, digests: bool) -> Layout | Manifest:
        """Lay a payload out in the memory that was allocated for it, or in new memory.

        A layout is that of an earlier payload: this one needs no plan if it travels in its offers.
        """
        allocation = self._allocations.get(data.request_id)
        if allocation is None:
            abort = self._aborts.pop(data.request_id, None) if self._aborts else None
            if abort is not None:
                raise abort.error()
            return data.layout_or_plan(self._layouts, digests=digests)
        return data.plan(digests=digests, capacity=allocation.capacity)

    def _put_known(
        self, data: Payload, layout: Layout, digests: bool, to: tuple[int, float], started: float
    ) -> Receipt | None:
        """Put a payload inside offers to so many readers for so many seconds, or return None."""
        planned, limit, (readers, ttl) = time.perf_counter(), self._end.inline_limit, to
        is_small = layout.data_nbytes < limit
        payload = pack_known(data, layout, self._copier, limit) if is_small else None
        if payload is None:
            return None
        ledger, packed = Ledger(), time.perf_counter()
        receipt = self._end.publish_inline(
            data.request_id, payload, readers=readers, ttl=ttl, ledger=ledger
        )
        # Only now: a reader may sleep until it has the offer.
        self._describe(ledger, data, digests).seconds["plan"] = planned - started
        publish = time.perf_counter() - packed
        record(ledger, payload, layout.data_nbytes, copy=packed - planned, publish=publish)
        return receipt

    def _reserve(
        self, plan: Manifest, timeout: float, ledger: Ledger, *, draft: int
    ) -> tuple[Lease, Allocation | None]:
        with ledger.phase("reserve"):
            key, allocation = plan.request_id, self._allocations.get(plan.request_id)
            if allocation is None:
                return self._end.reserve(key, plan.nbytes, timeout=timeout, draft=draft), None
            lease = allocation.take()
            lease.shrink(plan.nbytes)
            return lease, allocation

    def _reserve_many(
        self,
        puts: Sequence[PutOperation],
        deadline: Deadline,
        into: list[Lease],
    ) -> list[Lease]:
        """Memory for each payload, what was allocated for it or new; each lease is added to `into`.

        So the caller can release it, whenever an error or an interrupt comes.
        """
        plans = [put.plan for put in puts]
        if len({plan.request_id for plan in plans}) < len(plans):
            raise DuplicateKeyError(SAME_ID)
        new = [
            (plan.request_id, plan.nbytes)
            for plan in plans
            if plan.request_id not in self._allocations
        ]
        left = deadline.left(plans[0].request_id if plans else "")
        self._end.reserve_many(new, timeout=left, into=into)
        if len(into) == len(plans):
            return into
        found = {key: lease for (key, _), lease in zip(new, into, strict=True)}
        for put, plan in zip(puts, plans, strict=True):
            if plan.request_id not in found:
                put.is_allocated = True
                allocation = self._allocations[plan.request_id]
                into.append(allocation.take())
                found[plan.request_id] = into[-1]
                into[-1].shrink(plan.nbytes)
                allocation.data.close()
        return [found[plan.request_id] for plan in plans]


def _plan_of(found: Layout | Manifest, data: Payload) -> Manifest:
    return found.plan(data.request_id) if isinstance(found, Layout) else found


def _check_delivery(readers: int, ttl: float) -> None:
    if type(readers) is int and readers == 1 and type(ttl) is float and ttl > 0:
        return  # the calls below cost more than the test
    _COUNT.read(readers, "readers")
    _TTL.read(ttl, "ttl")


@dataclasses.dataclass(eq=False)
class PutOperation:
    """Copies one payload into its lease, announces its tensors and commits it."""

    producer: Producer
    plan: Manifest
    copier: Copier
    ledger: Ledger
    readers: int
    ttl: float
    stream: Lease | None = None  # of which the payload is a chunk
    is_allocated: bool = False  # whether its tensors may lie in its memory already
    deadline: Deadline = dataclasses.field(default_factory=lambda: Deadline(0.0))  # of its copies
    header: bytes = b""  # once it was written; of a small payload, if it is a chunk

    @property
    def can_announce(self) -> bool:
        """Whether the digest of each tensor fits into a message."""
        return can_announce(self.plan)

    @property
    def has_waiting_reader(self) -> bool:
        """Whether a remote reader could fetch the first tensors while the last are being copied."""
        plan = self.plan
        is_large = plan.nbytes > 2 * STEP
        return is_large and can_announce(plan) and self.producer.has_waiting_reader(plan.request_id)

    def run(self, lease: Lease, views: Sequence[TensorView], *, announced: bool) -> Receipt:
        """Copy the tensors that are not in place yet, and commit; the lease is spent then.

        With `announced`, each step of them is announced, so that remote readers fetch it meanwhile.
        """
        with lease:
            if fault_points.enabled:
                fault_points.point("put.reserved")
            with self.ledger.phase("copy"):
                if announced:
                    digests, copied = self._gather_in_steps(lease, views)
                else:
                    digests, copied = self._gather(lease, views)
                self.ledger.copies = int(copied)
            if fault_points.enabled:
                fault_points.point("put.copied")
            return self.publish(lease, digests)

    def fill(self, lease: Lease, views: Sequence[TensorView]) -> None:
        """Copy the tensors and write the header; `Producer.publish_many` then commits."""
        plan, ledger, region = self.plan, self.ledger, lease.region
        if fault_points.enabled:
            fault_points.point("put.reserved")
        started = time.perf_counter()
        digests, copied = self._gather(lease, views)
        ledger.copies = int(copied)
        ledger.seconds["copy"] = time.perf_counter() - started
        if fault_points.enabled:
            fault_points.point("put.copied")
        region.write(0, plan.encode(digests))
        ledger.nbytes = plan.nbytes

    def run_inline(self, views: Sequence[TensorView]) -> Receipt | None:
        """Send a small payload inside its offers; None if it needs memory of the link after all."""
        plan, ledger = self.plan, self.ledger
        if any(map(is_on_device, views)):
            return None
        started = time.perf_counter()
        payload = pack_inline(plan, self.copier, views)
        if self.stream is not None:  # whose running digest covers it
            self.header = payload[: plan.header_nbytes]
        packed = time.perf_counter()
        receipt = self.producer.publish_inline(
            plan.request_id,
            payload,
            readers=self.readers,
            ttl=self.ttl,
            ledger=ledger,
            stream=self.stream,
        )
        publish = time.perf_counter() - packed
        record(ledger, payload, plan.data_nbytes, copy=packed - started, publish=publish)
        return receipt

    def put_chunk(
        self, stream: Lease, chunk: TensorTransferData, deadline: Deadline
    ) -> tuple[bytes, Ledger]:
        """Put a chunk of the stream whose head this has put; return its header and its ledger."""
        producer, copier, views = self.producer, self.copier, chunk.tensors()
        ledger = Ledger(copier=copier.name, digests=self.ledger.digests)
        layout = chunk.layout_or_plan(producer.layouts, digests=ledger.digests != "off")
        plan = _plan_of(layout, chunk)
        to = producer, plan, copier, ledger, 1, float("inf"), stream
        put = PutOperation(*to, deadline=deadline)
        if plan.nbytes > producer.inline_limit or put.run_inline(views) is None:
            left = deadline.left(plan.request_id)
            reserve = partial(producer.reserve_chunk, stream, plan.nbytes, timeout=left)
            put.run(reserve(), views, announced=False)  # no interrupt comes in between
        return put.header, ledger

    def run_in_thread(self, lease: Lease, views: Sequence[TensorView]) -> Receipt:
        """Do the same in a thread; the receipt reports a failure."""
        receipt = self.producer.receipt(lease, self.ledger)
        run = partial(CurrentStreams().call, partial(self._run_or_fail, lease, views))
        try:
            start_detached(run)
        except CapacityError:
            lease.release()  # not after an interrupt: the thread may write to its memory
            raise
        return receipt

    def begin(self, lease: Lease) -> None:
        """Announce the payload before it is written."""
        self.producer.begin_stream(lease, self.plan.encode(), readers=self.readers)

    def copy_layer(
        self, lease: Lease, views: Sequence[TensorView], part: Manifest, after: StreamEvents | None
    ) -> GatherHandle | list[str]:
        """Copy a part of the payload; return the digests, or the copy that runs on a device."""
        if any(map(is_on_device, views)):
            self.ledger.copies = 1
            return self.copier.begin_gather(views, part, lease.region, after=after)
        digests, copied = gather_into(self.copier, views, part, lease)
        self.ledger.copies |= copied
        return digests

    def announce(self, lease: Lease, first: int, digests: Sequence[str]) -> None:
        """Announce that the tensors from number `first` on are written; one digest for each."""
        if sum(map(len, digests)) <= MAX_DIGITS:
            self.producer.announce(lease, first, tuple(map(bytes.fromhex, digests)))
            return
        for tensor, digest in enumerate(digests, first):
            self.producer.announce(lease, tensor, (bytes.fromhex(digest),))

    def publish(self, lease: Lease, digests: Sequence[str], *, deadline: float = 0.0) -> Receipt:
        """Write the header and commit; a direct put waits for readers until the `deadline`."""
        with self.ledger.phase("publish"):
            self.header = self.plan.encode(digests)
            lease.region.write(0, self.header)
            if fault_points.enabled:
                fault_points.point("put.encoded")
            self.ledger.nbytes = self.plan.nbytes
            return self.producer.publish(
                lease, readers=self.readers, ttl=self.ttl, ledger=self.ledger, deadline=deadline
            )

    def _gather(self, lease: Lease, views: Sequence[TensorView]) -> tuple[list[str], bool]:
        """Copy the tensors that are not in place; return digests, and whether there were any."""
        plan, until = self.plan, self.deadline.work
        with self.deadline.naming(self.plan.request_id):
            if self.is_allocated:
                return gather_into(self.copier, views, plan, lease, until)
            digests = self.copier.gather(views, plan, lease.region, deadline=until)
            return digests, plan.nbytes > plan.header_nbytes

    def _gather_in_steps(self, lease: Lease, views: Sequence[TensorView]) -> tuple[list[str], bool]:
        """Gather like `gather_into`, and announce each step to the readers."""
        self.begin(lease)
        digests, copied = list[str](), False
        for step in steps(self.plan):
            part = views[step.start : step.stop]
            with self.deadline.naming(self.plan.request_id):
                until = self.deadline.work
                new, is_copied = gather_into(self.copier, part, self.plan.part(step), lease, until)
            self.announce(lease, step.start, new)
            digests += new
            copied |= is_copied
        return digests, copied

    def _run_or_fail(self, lease: Lease, views: Sequence[TensorView]) -> None:
        """Run in the thread. Unlike `run`, fail the payload before the lease is released."""
        with lease:
            try:
                digests, copied = self._gather(lease, views)
                self.ledger.copies = int(copied)
                self.publish(lease, digests)
            except Exception as error:
                self.producer.abort(lease, f"it could not be committed: {error!r}")


class DirectPutOperation(PutOperation):
    """Sends a payload from the caller's tensors; only the header lies in the link's memory."""

    def run_direct(self, views: Sequence[TensorView]) -> Receipt:
        """Announce each tensor once its digest is known; block until all readers received all."""
        plan, tensors = self.plan, self._regions(views)
        with self.ledger.phase("reserve"):
            header = plan.header_nbytes
            left = self.deadline.left(self.plan.request_id)
            lease = self.producer.reserve(plan.request_id, header, timeout=left, draft=header)
        with lease:
            starts = [header + spec.start for spec in plan.tensors]
            parts = list(zip(starts, tensors, strict=True))
            self.producer.begin_direct(
                lease, plan.encode(), parts, nbytes=plan.nbytes, readers=self.readers
            )
            try:
                with self.ledger.phase("digest"):
                    digests = list[str]()
                    for step in steps(plan):
                        new = [self._digest(plan.tensors[n], tensors[n]) for n in step]
                        self.announce(lease, step.start, new)
                        digests += new
                return self.publish(lease, digests, deadline=self.deadline.at)
            except ClosedError as error:  # as while it waits for its readers
                key = plan.request_id
                raise TransferFailed(
                    f"payload {key!r} was not delivered: {error}", key=key
                ) from error

    def _digest(self, spec: TensorSpec, tensor: Region) -> str:
        if not spec.digest:
            return ""
        alone = self.plan.only([msgspec.structs.replace(spec, start=0, stop=spec.nbytes)])
        whole = msgspec.structs.replace(alone, header_nbytes=0, nbytes=spec.nbytes)
        with self.deadline.naming(self.plan.request_id):
            return self.copier.digest(whole, tensor, deadline=self.deadline.work)[0]

    def _regions(self, views: Sequence[TensorView]) -> list[Region]:
        """The memory of the tensors, once all work queued on their devices is done."""
        if not can_announce(self.plan):
            raise SchemaError("direct=True: a tensor is too long to be announced; leave it out")
        regions = list[Region]()
        for view, spec in zip(aliases(views), self.plan.tensors, strict=True):
            device = device_of(view)
            problem = self._problem(view, spec) or self.producer.direct_refusal(device)
            if problem:
                raise SchemaError(f"direct=True, {spec.where()}: {problem}")
            assert isinstance(view, torch.Tensor)
            check_view_fits(view, spec)
            address = address_of(view, spec.where)
            regions.append(Region(address, spec.nbytes, view, device=device))
        for gpu in {view.device for view in views if view.device.type == "cuda"}:
            torch.cuda.current_stream(gpu).synchronize()
        return regions

    def _problem(self, view: TensorView, spec: TensorSpec) -> str:
        """Why a tensor cannot be sent as it lies, with the cure; "" if it can."""
        if not isinstance(view, torch.Tensor) or not view.is_contiguous() or view.is_neg():
            return "it does not lie in one piece; without direct=True it is copied into one"
        device = device_of(view)
        if spec.digest and device != "cpu" and not self.copier.uses_device_memory:
            cure = "use copier='pinned', or put it with digests=False"
            return f"copier {self.copier.name!r} computes no digests on {device}; {cure}"
        return ""


def device_of(view: TensorView) -> str:
    """The device as connectors name it, such as "cpu" or "cuda:0"."""
    return str(view.device)


def can_announce(plan: Manifest) -> bool:
    """Whether the digest of each tensor fits into a message."""
    return all(len(spec.digest) <= MAX_DIGITS for spec in plan.tensors)


def steps(plan: Manifest) -> Iterator[range]:
    """Divide the tensors into steps for announcements, each twice as long: a message has a cost."""
    step, first, nbytes = STEP, 0, 0
    for number, spec in enumerate(plan.tensors):
        nbytes += spec.nbytes
        if nbytes >= step:
            yield range(first, number + 1)
            step, first, nbytes = 2 * step, number + 1, 0
    if first < len(plan.tensors):
        yield range(first, len(plan.tensors))


def is_on_device(view: TensorView) -> bool:
    """Whether a copy of this tensor runs by itself, on its device."""
    memory = view.pool if isinstance(view, PagedTensor) else view
    return not memory.is_cpu
