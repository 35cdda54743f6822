"""`KVProducer`, the sending end of a link, and the operations that carry a payload out."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.transfer import Ledger, Receipt
from omni_kvlink.errors import (
    ClosedError,
    DuplicateKeyError,
    SchemaError,
    TransferFailed,
)
from omni_kvlink.link.allocation import AbortedAllocation, Allocation
from omni_kvlink.link.append_stream import AppendStream
from omni_kvlink.link.direct_put import DirectPut
from omni_kvlink.link.end import LinkEnd
from omni_kvlink.link.put_operation import PayloadPut, PutOperation
from omni_kvlink.link.put_stream import PutStream
from omni_kvlink.payload.append_stream import StreamPosition, StreamSpec
from omni_kvlink.payload.bundle import PAYLOAD_TYPES, check_payload, payload_list
from omni_kvlink.payload.kv_checks import check_reason
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.schema import check_request_id
from omni_kvlink.settings import Flag, Integer, Seconds
from omni_kvlink.system.waits import Deadline
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from omni_kvlink.connectors.base import Producer
    from omni_kvlink.copier import Copier
    from omni_kvlink.memory.region import Lease
    from omni_kvlink.payload.bundle import Payload

DEFAULT_TTL = 60.0
"""Seconds in which the readers of a payload must come, unless its put says otherwise."""
PAYLOADS_PER_TURN = 8
"""Payloads that `put_many` packs before it lets the link's thread answer readers."""
_FLAG, _COUNT, _TTL = Flag(), Integer(1, (1 << 63) - 1), Seconds(above=0, endless=True)


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
        self._has_allocated = False

    def put(
        self,
        data: Payload,
        *,
        readers: int | None = 1,
        ttl: float | None = None,
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
            readers: number of `get` calls that the payload is for; None to keep it for any number,
                until `withdraw`, or until a put that finds no memory evicts it: of those that no
                reader has, the one that was least recently put, got or asked for by `contains`.
            ttl: seconds in which they must come; None for 60, and for no limit if it is kept.
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
        operation = self._begin(readers, ttl, timeout, digests)
        if type(data) not in PAYLOAD_TYPES:  # the call costs more than the test
            check_payload(data, "put")
        if direct or background:
            _FLAG.read(direct, "direct")
            _FLAG.read(background, "background")
            if direct and readers is None:
                raise SchemaError("a kept payload lies in the link's memory: leave direct= out")
            if direct and (background or data.request_id in self._allocations):
                raise SchemaError("direct=True is for tensors of your own, and puts them now")
            put = self._put_direct if direct else self._put_in_background
            return put(operation, data)
        if self._has_allocated:  # the call costs more than the test
            return operation.run([self._prepare(operation, data)])[0]
        return operation.run([operation.prepare(data)])[0]

    def put_many(
        self,
        payloads: Iterable[Payload],
        *,
        readers: int | None = 1,
        ttl: float | None = None,
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
        operation, puts = self._begin(readers, ttl, timeout, digests), dict[str, PayloadPut]()
        try:
            for number, data in enumerate(payload_list(payloads, "put_many")):
                if number % PAYLOADS_PER_TURN == 0:
                    operation.deadline.check(data.request_id)
                    self._end.give_way()
                if data.request_id in puts:
                    raise DuplicateKeyError("two of the payloads have the same request id")
                puts[data.request_id] = self._prepare(operation, data)
        except BaseException as error:
            observers.put_failed(self._end.scheme, puts.values(), error)
            raise
        return operation.run([*puts.values()])

    def allocate(self, plan: Payload, *, timeout: float = 10.0) -> Allocation:
        """Reserve memory of the link that an engine writes its tensors to.

        `put` of a payload with the same request id then copies nothing that lies there. That
        payload may have fewer tokens, fewer branches and other metadata than `plan`, which is what
        `KVCacheTransferData.blank` returns, or a payload of the same sizes.

        Raises:
            DuplicateKeyError, CapacityError: as `put`.
            TransferTimeout: mapping it took longer than the timeout.
            SchemaError: the plan is not valid, or this link's payloads lie on a device.
        """
        self._check_open()
        deadline = Deadline(timeout)
        if self._end.device:
            raise SchemaError(
                f"allocate() gives memory of the host, this link's is on {self._end.device}: "
                "put tensors of your own, or open a link without device="
            )
        check_payload(plan, "allocate")
        self._has_allocated = True
        capacity = plan.cached_plan(self._layouts, digests=True).as_capacity()
        request = PayloadPut(capacity.request_id, capacity.nbytes, Ledger())
        request.draft = capacity.header_nbytes  # it may be put as a stream
        leases: list[Lease] = []
        try:
            self._end.reserve([request], deadline=deadline, leases=leases)
            lent = self._end.lend(leases[0])
            return Allocation(capacity, leases[0], lent, self._allocations)
        except BaseException:
            self._allocations.pop(request.key, None)
            for lease in leases:
                lease.release()
            raise

    def stream_put(
        self,
        plan: Payload | Manifest,
        *,
        readers: int | None = 1,
        ttl: float | None = None,
        timeout: float = 10.0,
    ) -> PutStream:
        """Send a cache while it is being computed: `with producer.stream_put(plan) as out: …`.

        A reader that called `stream_get` receives each layer once `out.write_layer` has written it;
        other readers receive the whole cache when the block ends. Layers that lie in memory which
        `allocate` returned for this request id are not copied. The plan gives sizes and metadata,
        as `KVCacheTransferData.blank` does. `timeout` is for memory: to wait for it and to map it.
        All else is as for `put`; `ttl` starts with the commit.

        Raises:
            DuplicateKeyError, CapacityError: as `put`.
            TransferTimeout: mapping it took longer than the timeout.
            SchemaError: the payload has no layers, or a tensor too long for a stream.
        """
        operation = self._begin(readers, ttl, timeout, None)
        is_planned = isinstance(plan, Manifest)
        if not is_planned:
            check_payload(plan, "stream_put")
        allocation = self._allocation(plan.request_id)
        if is_planned and allocation is not None:
            raise SchemaError("for allocated memory, plan with the cache or bundle itself")
        put = operation.prepare_stream(plan, allocation)
        return PutStream(put, operation.reserve_alone(put))

    def open_stream(
        self,
        request_id: str,
        spec: Mapping[str, Any],
        *,
        dim: int = 0,
        metadata: Mapping[str, Any] | None = None,
        window: int = 64,
        readers: int = 1,
        ttl: float | None = None,
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
            DuplicateKeyError, CapacityError: as `put`.
            TransferTimeout: mapping it took longer than the timeout.
            SchemaError: the spec cannot be sent, or has no dimension `dim`.
        """
        operation = self._begin(_COUNT.read(readers, "readers"), ttl, timeout, digests)
        _COUNT.read(window, "window")
        stream = StreamSpec(request_id, spec, Integer().read(dim, "dim"), metadata)
        head = operation.prepare_stream(stream.head(StreamPosition().encode()))
        return AppendStream(stream, head, operation.reserve_alone(head), window=window)

    def withdraw(self, request_id: str) -> bool:
        """End a payload that was put with `readers=None`; return whether there was one.

        Readers that have it go on, and its memory is free when the last view of it is gone. A `get`
        that comes later waits for another payload of this request id, or, with `wait=False`, raises
        MissingError. KVLinkError if the connector keeps no payloads.
        """
        self._check_open()
        return self._end.kept.withdraw(check_request_id(request_id))

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

    def _begin(
        self, readers: int | None, ttl: float | None, timeout: float, digests: bool | None
    ) -> PutOperation:
        """Check that the link is open, and the arguments of a put; return its operation."""
        if self._closed:  # the call costs more than the test
            self._check_open()
        deadline = Deadline(timeout)
        seconds = _check_delivery(readers, ttl)
        with_digests = self._digests if digests is None else _FLAG.read(digests, "digests")
        return PutOperation(self._end, self._copier, deadline, readers, seconds, with_digests)

    def _prepare(self, operation: PutOperation, data: Payload) -> PayloadPut:
        """Pack a payload, or plan its copy into new memory or what was allocated for it."""
        allocation = self._allocation(data.request_id) if self._has_allocated else None
        if allocation is None:
            return operation.prepare(data)
        return operation.prepare_allocated(data, allocation)

    def _put_in_background(self, operation: PutOperation, data: Payload) -> Receipt:
        allocation = self._allocation(data.request_id)
        if allocation is None:
            raise SchemaError("background=True is for memory that allocate() gave")
        return operation.run_in_thread(operation.prepare_allocated(data, allocation))

    def _put_direct(self, operation: PutOperation, data: Payload) -> Receipt:
        started, key = time.perf_counter(), data.request_id
        plan = data.cached_plan(self._layouts, digests=operation.digests)
        views = data.tensors()
        plan, trace = operation.begin(plan, started)
        ledger = operation.ledger(data, time.perf_counter() - started, trace)
        try:
            put = DirectPut(operation, plan, views, ledger)
        except BaseException as error:
            observers.put_refused(self._end.scheme, key, error, trace)
            raise
        try:
            return operation.run([put])[0]
        except ClosedError as error:  # as while it waits for its readers
            raise TransferFailed(f"payload {key!r} was not delivered: {error}", key=key) from error

    def _allocation(self, request_id: str) -> Allocation | None:
        """Return the memory that was allocated for a payload; TransferFailed if it was aborted."""
        allocation = self._allocations.get(request_id)
        if allocation is not None and allocation.is_spent:  # an interrupt ended its `take`
            del self._allocations[request_id]
            allocation = None
        if allocation is None and self._aborts:
            abort = self._aborts.pop(request_id, None)
            if abort is not None:
                raise abort.error()
        return allocation


def _check_delivery(readers: int | None, ttl: float | None) -> float:
    """Check the readers of a put; return the seconds in which they must come."""
    if readers is not None and not (type(readers) is int and readers == 1):
        _COUNT.read(readers, "readers")  # the call costs more than the test
    if ttl is None:
        return DEFAULT_TTL if readers else float("inf")
    _TTL.read(ttl, "ttl")
    return ttl
