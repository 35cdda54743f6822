"""`KVConsumer`, the receiving end of a link, and what its gets return."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

from omni_kvlink.connectors.base import MAX_RETRIES, Consumer, PendingGet
from omni_kvlink.connectors.protocol.get_table import ChunkOf, GetRequest
from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.connectors.protocol.transfer import Ledger
from omni_kvlink.errors import IntegrityError, PeerLostError, SchemaError, WireError
from omni_kvlink.link.chunk_stream import ChunkStream
from omni_kvlink.link.copy_into import CopyInto, Into, Targets
from omni_kvlink.link.end import LinkEnd
from omni_kvlink.link.end_metadata import extra_of
from omni_kvlink.link.get_requests import check_ids, get_requests
from omni_kvlink.link.read_block import ReceivedPayload, scatter_delivery
from omni_kvlink.link.received_batch import PendingBatch, ReceivedBatch
from omni_kvlink.link.received_stream import ReceivedStream, open_stream
from omni_kvlink.payload.append_stream import check_chunk, open_chunk, tensors_of_chunk
from omni_kvlink.payload.bundle import PAYLOAD_KINDS, Payload, targets_of
from omni_kvlink.payload.chunk_requests import ChunkRequests
from omni_kvlink.payload.expected import ExpectedPayload
from omni_kvlink.payload.kv_checks import check_reason
from omni_kvlink.payload.layout_cache import KnownHeader
from omni_kvlink.payload.safetensors_file import write_payload
from omni_kvlink.payload.schema import check_request_id
from omni_kvlink.payload.tensor_memory import open_copy, payload_views
from omni_kvlink.settings import Choice, Flag, Integer
from omni_kvlink.system.waits import Deadline, check_timeout
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.connectors.protocol.messages import Inspected
    from omni_kvlink.copier import Copier
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.append_stream import StreamPosition
    from omni_kvlink.payload.chunk_requests import RequestSizes
    from omni_kvlink.payload.layout_cache import LayoutCache
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.tensor_data import TensorTransferData

Verify: TypeAlias = Literal["auto", "full", "off"]
_VERIFY = Choice(*get_args(Verify))
_START, _FLAG = Integer(0), Flag()


class KVConsumer(LinkEnd):
    """The receiving end of a link, from `KVLink.connect`; thread-safe; a context manager."""

    _end: Consumer

    def get(
        self,
        request_id: str,
        *,
        timeout: float,
        verify: Verify = "auto",
        into: Into | None = None,
        wait: bool = True,
    ) -> Received:
        """Wait for a payload; blocks until it is committed.

        Used as `with consumer.get(...) as data:`. The tensors are readonly views of the link's
        memory (writing to one ends the process). They are valid inside the block, and beyond it for
        as long as one of them is kept. The memory is released with the last view.

        `verify="auto"` checks every byte that crosses a network or a socket (`zmq+tcp://`,
        `zmq+ipc://`, `ucx://`) against its digest as it arrives; what is wrong is fetched once
        more. Of a payload in shared memory it checks the header and the commit word, which rule out
        torn and stale payloads, and leaves the bytes to `Received.scatter` and the adapters, which
        check what they copy. "full" checks every byte over each connector, before this returns.
        "off" checks headers and commit words only.

        `into`, as of `Received.scatter`, has the tensors copied out before this returns, each byte
        checked: of a payload that is written meanwhile, the first layers while the last are put. It
        may be a function of the `ReceivedStream`, whose `payload` has metadata and shapes, that
        returns them; it is called again if the connection broke.

        With `wait=False` the payload must be there: a get of one that is not put yet, or no more,
        raises MissingError at once. The timeout is for the answer, and for the bytes.

        Raises:
            MissingError: with `wait=False`, the producer has no such payload now.
            TransferTimeout: the text tells how far the payload had come.
            TransferFailed: the producer failed it, or it expired.
            PeerLostError: the producer died, or closed the link.
            IntegrityError: the bytes are not the ones that were committed; or "full" is asked of a
                payload that was put with `digests=False`.
            VersionError: the producer speaks another major version.
            WireError: this is not a valid payload.
            SchemaError: `into` is not what the payload is; nothing was written, another get has it.
        """
        check_verify(verify)
        if wait is not True:
            _FLAG.read(wait, "wait")
        started = time.perf_counter()
        deadline = Deadline(timeout)
        if into is not None:
            return self._get_into(request_id, into, deadline, verify, wait)
        requests = [GetRequest(check_request_id(request_id), waits=wait)]
        [pending] = begin(self, requests, timeout=deadline.seconds_left(), verify=verify)
        layout = None if pending.is_done else self._layouts.repeated(INLINE)
        expected = None if layout is None else ExpectedPayload(layout, request_id)
        pending.inline_target = expected
        delivery = self._await(requests[0], pending, deadline, verify)[1]
        parts = delivery, self._copier, self._layouts
        return Received(*parts, started=started, verify=verify, expected=expected)

    def get_many(
        self,
        request_ids: Iterable[str],
        *,
        timeout: float,
        verify: Verify = "auto",
        wait: bool = True,
    ) -> ReceivedBatch[Received]:
        """Wait for several payloads, all of which are requested at once; blocks until all are here.

        Used as `with consumer.get_many(ids, timeout=5.0) as payloads:`, in the order of the ids.
        The timeout is for all together; `verify` and `wait` are as for `get`. This side, over a
        network, and the producer need memory for all.

        Raises what `get` raises for the first payload, in this order, that cannot be had. The
        others are released unread then: another call can have them.
        """
        deadline = Deadline(timeout)
        limit = deadline.seconds_left()
        batch = self.begin_get_many(request_ids, timeout=limit, verify=verify, wait=wait)
        return batch.wait(timeout=deadline.seconds_left())

    def begin_get_many(
        self,
        request_ids: Iterable[str],
        *,
        timeout: float,
        verify: Verify = "auto",
        wait: bool = True,
    ) -> PendingBatch[Received]:
        """Request several payloads, and do not wait for them; `PendingBatch.wait` does.

        A reader that requests the next step's payloads before it reads those of this one does not
        wait for the producer's answer in between. `timeout` bounds a reconnection and nothing else.
        PeerLostError if the producer is gone and did not come back in time.
        """
        check_verify(verify)
        started = time.perf_counter()
        requests = get_requests(request_ids, wait=wait)
        pending = begin(self, requests, timeout=timeout, verify=verify)
        copier, layouts = self._copier, self._layouts
        opened = partial(Received, copier=copier, layouts=layouts, started=started, verify=verify)
        return PendingBatch(partial(self._await, verify=verify), opened, requests, pending)

    def stream_get(self, request_id: str, *, timeout: float) -> ReceivedStream:
        """Wait until a cache is announced, and return it as a stream of layers.

        `for layer in consumer.stream_get("req-1", timeout=5.0): use(layer.key, layer.value)`. A
        payload that was put as a whole comes as a stream whose layers are all there. The timeout is
        for the announcement, and again for each layer. Errors are those of `get`. Bytes are checked
        as `get` does with `verify="auto"`, before their layer is there.
        """
        started, deadline = time.perf_counter(), Deadline(timeout)
        request = GetRequest(check_request_id(request_id), streamed=True)
        [pending] = begin(self, [request], timeout=deadline.seconds_left())
        _, delivery = self._await(request, pending, deadline, "auto")
        return open_stream(self, delivery, started=started, timeout=timeout)

    def read_stream(
        self, request_id: str, *, timeout: float, start: int = 0, verify: Verify = "auto"
    ) -> ChunkStream[ReceivedChunk]:
        """Wait until an append stream is opened, and return it as an iterator over its chunks.

        `for chunk in consumer.read_stream("req-1", timeout=5.0): use(chunk.data["hidden"])`. The
        timeout (seconds) is for the stream, and again for each chunk. A reader receives all chunks
        from `start` on, also those from before it came, however many other readers there are. One
        that replaces a lost reader begins with the first chunk that this one had not released: an
        earlier `start` raises TransferFailed, whose text names the number.

        Errors and `verify` are those of `get`, for each chunk; see `ChunkStream.receive`.
        SchemaError if `start` is negative.
        """
        limit, request = check_timeout(timeout), stream_request(request_id, start, verify)
        deadline = Deadline(limit)
        [head] = begin(self, [request], timeout=deadline.seconds_left(), verify=verify)
        head, delivery = self._await(request, head, deadline, verify)
        return open_chunks(self, head, delivery, start=start, timeout=limit, verify=verify)

    def contains(self, request_ids: Iterable[str], *, timeout: float) -> list[bool]:
        """Return for each request id whether a `get` of it would have its payload at once.

        Blocks for the answer: one message for 256 ids, and one back. A kept payload that is there
        counts as used; it may be evicted all the same before it is got: see `get`, `wait=False`.

        Raises:
            TransferTimeout: the answer did not come in time.
            PeerLostError: the producer is gone, and did not come back in time.
        """
        self._check_open()
        return self._end.contains(check_ids(request_ids), timeout=check_timeout(timeout))

    @property
    def is_connected(self) -> bool:
        """Whether the producer is there, so that a request need not reconnect; never blocks."""
        return self._end.is_connected

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """Abort a transfer on both sides: every `get` of it raises TransferFailed."""
        self._check_open()
        self._end.abort(check_request_id(request_id), check_reason(reason))

    def _get_into(
        self, request_id: str, into: Into, deadline: Deadline, verify: Verify, wait: bool
    ) -> Received:
        """Copy a payload out while it is written; again from its start if the connection broke."""
        key, retries = check_request_id(request_id), 0
        request = GetRequest(key, streamed=True, waits=wait)
        while True:
            started = time.perf_counter()
            [pending] = begin(self, [request], timeout=deadline.seconds_left(), verify=verify)
            pending, delivery = self._await(request, pending, deadline, verify)
            stream = open_stream(self, delivery, started=started, timeout=0.0)
            try:
                payload = CopyInto(stream, into, verify=verify).run(deadline.seconds_left)
                return Received.of_stream(stream, payload, self._copier, self._layouts)
            except PeerLostError:
                stream.release_unread()
                retries += 1
                limit = deadline.seconds_left() if retries <= MAX_RETRIES else 0.0
                if not can_retry(self, pending, timeout=limit):
                    raise
            except BaseException:
                stream.release_unread()
                raise

    def _await(
        self, request: GetRequest, pending: PendingGet, deadline: Deadline, verify: Verify
    ) -> tuple[PendingGet, Delivery]:
        """Wait for a get; if only the connection broke, request it again and wait for that one."""
        retries = 0
        while True:
            try:
                return pending, pending.wait(timeout=deadline.seconds_left())
            except PeerLostError:
                retries += 1
                limit = deadline.seconds_left() if retries <= MAX_RETRIES else 0.0
                if not can_retry(self, pending, timeout=limit):
                    raise
            [pending] = begin(self, [request], timeout=deadline.seconds_left(), verify=verify)


def begin(
    consumer: KVConsumer,
    requests: Sequence[GetRequest],
    *,
    timeout: float,
    verify: Verify = "auto",
) -> list[PendingGet]:
    """Request payloads, whose keys are checked; `timeout` bounds a reconnection and nothing else.

    PeerLostError if the producer is gone and did not come back in time.
    """
    if consumer._closed:  # the call costs more than the test
        consumer._check_open()
    limit = check_timeout(timeout)
    return consumer._end.begin(requests, timeout=limit, verify=verify != "off")


def can_retry(consumer: KVConsumer, pending: PendingGet, *, timeout: float) -> bool:
    """Whether a get that ended with PeerLostError can be requested again.

    It can if only the connection broke: the same run of the producer answers within `timeout` s.
    """
    limit = check_timeout(timeout)
    consumer._check_process()
    return not consumer._closed and consumer._end.can_retry(pending, timeout=limit)


def inspect_page(consumer: KVConsumer, after: int, prefix: str, *, timeout: float) -> Inspected:
    """Ask for the payloads above the epoch `after`; see `Consumer.inspect`."""
    consumer._check_open()
    return consumer._end.inspect(after, prefix, timeout=timeout)


def stream_request(request_id: str, start: int, verify: Verify) -> GetRequest:
    """Return the request of an append stream, whose chunks are wanted from `start` on."""
    check_verify(verify)
    key = check_request_id(request_id)
    return GetRequest(key, streamed=True, chunk=ChunkOf(0, _START.read(start, "start")))


def open_chunks(
    consumer: KVConsumer,
    head: PendingGet,
    delivery: Delivery,
    *,
    start: int,
    timeout: float,
    verify: Verify,
) -> ChunkStream[ReceivedChunk]:
    """Open what `begin_chunks` has requested and its `wait` returned; `timeout` for each chunk."""
    copier, layouts = consumer._copier, consumer._layouts
    open_chunk = partial(ReceivedChunk, copier=copier, layouts=layouts, verify=verify)
    return ChunkStream(head, delivery, open_chunk, copier, layouts, start=start, timeout=timeout)


class Received(ReceivedPayload):
    """A payload that arrived: `with` gives its data, and releases it at the end.

    After an exception in the block it is released unread: another reader receives it, or its
    receipt says that nobody did. Without the block, it counts as read once `data` was looked at or
    `scatter` has returned, and is released with the last view.
    """

    _data: Payload
    _header: Manifest | KnownHeader
    _ledger: Ledger | None = None

    def __init__(
        self,
        delivery: Delivery,
        copier: Copier,
        layouts: LayoutCache,
        *,
        started: float,
        verify: Verify,
        expected: ExpectedPayload | None = None,
        opened: tuple[Manifest, Payload] | None = None,
    ):
        self._delivery, self._copier = delivery, copier
        arrived = time.perf_counter()
        try:
            region = delivery.open_region()
            if opened is not None:
                self._header, self._data = opened
            elif expected is not None and expected.header is not None:
                self._header, self._data = expected.header, expected.data
            else:
                self._header, self._data = self._open(region, layouts)
            self._times = started, arrived, time.perf_counter()
            if verify == "full":
                self._verify(on_arrival=delivery.is_verified, is_of_get=True)
            if observers.registered and opened is None:
                seconds = {"wait": arrived - started, "view": self._times[2] - arrived}
                seconds |= {} if self._ledger is None else self._ledger.seconds
                about = delivery.scheme, delivery.key, region.nbytes, seconds
                observers.received(*about, self._data, self._header, delivery.copies)
        except BaseException as error:
            delivery.end_after(error)
            parts = delivery.scheme, delivery.key, error, arrived - started
            observers.get_failed(*parts, vars(self).get("_header"))
            raise

    @classmethod
    def of_stream(
        cls, stream: ReceivedStream, payload: Payload, copier: Copier, layouts: LayoutCache
    ) -> Received:
        """Return what a stream has brought, when it has come to its end: `payload`, as views."""
        started, opened = time.perf_counter(), (stream.manifest, payload)
        parts = stream.delivery, copier, layouts
        received = cls(*parts, started=started, verify="auto", opened=opened)
        received._ledger = stream.ledger
        return received

    @property
    def extra(self) -> Mapping[str, Any]:
        """`ReceivedStream.extra` of a payload that was a stream; else it is empty."""
        return extra_of(self._delivery)

    @property
    def data(self) -> Payload:
        """Its tensors, readonly views of the link's memory, and its metadata."""
        self._mark_read()
        return self._data

    @property
    def ledger(self) -> Ledger:
        """Bytes, copies and seconds that it took to receive the payload; made on first access."""
        if self._ledger is None:  # a `cached_property` has a lock, which a fork may leave locked
            plan, (started, arrived, opened) = self._whole_manifest(), self._times
            self._ledger = Ledger(
                nbytes=plan.nbytes,
                copies=self._delivery.copies,
                digests="crc32c" if plan.has_digests else "off",
                seconds={"wait": arrived - started, "view": opened - arrived},
                path=self._delivery.path,
            )
        return self._ledger

    @property
    def manifest(self) -> Manifest:
        """Sizes, positions and digests of the tensors."""
        return self._whole_manifest()

    def _whole_manifest(self) -> Manifest:
        if isinstance(self._header, KnownHeader):
            self._header = self._header.manifest()
        return self._header

    def _mark_read(self) -> None:
        """Its reader has all of it: if it is dropped, it counts as read."""
        self._delivery.mark_read()

    def _open(self, region: Region, layouts: LayoutCache) -> tuple[Manifest | KnownHeader, Payload]:
        """The header, and the payload as views."""
        delivery = self._delivery
        if (head := delivery.head) is not None:
            known = open_copy(region, head, delivery.key, layouts)
            if known is not None:
                delivery.head = None
                return known[0], PAYLOAD_KINDS[known[0].layout.kind].of_header(*known)
        header = delivery.open_header(region, layouts)
        if isinstance(header, KnownHeader):
            if kind := header.layout.kind:
                return header, PAYLOAD_KINDS[kind].of_header(header, payload_views(region, header))
            header = header.manifest()
        return header, PAYLOAD_KINDS[header.kind].views_of(header, header.branches, region)

    def verify(self) -> None:
        """Check every byte against its digest, also if it was checked on arrival.

        IntegrityError if one is wrong, here and in the receipt; or if the payload has no digests.
        """
        started = time.perf_counter()
        try:
            self._verify(on_arrival=False)
        except WireError as error:
            self._delivery.reject(str(error))
            observers.copied(self._delivery, "verify", started, error)
            raise

    def _verify(self, *, on_arrival: bool, is_of_get: bool = False) -> None:
        region, manifest = self._delivery.open_region(), self._whole_manifest()
        if not manifest.is_covered:
            raise IntegrityError(
                f"payload {self._delivery.key!r} has no digests, so that its bytes cannot be "
                'checked: put it with digests=True, or get it with verify="auto"'
            )
        if not on_arrival:
            started = time.perf_counter()
            self._copier.verify(manifest, region)
            self.ledger.seconds["verify"] = time.perf_counter() - started
            if observers.registered and not is_of_get:  # else `on_get` has the phase
                observers.copied(self._delivery, "verify", started)

    def scatter(self, into: Targets) -> None:
        """Copy all tensors out, each byte checked against its digest in the same pass.

        `into` is the caller's tensors or paged tensors, in the order of `data.tensors()`; the same
        by name, as `TensorTransferData` or `layer_blocks` take them; or a payload that holds them,
        such as `PagedAdapter.export` makes of free blocks.

        Raises:
            SchemaError: a target is not what the payload is, or two of them share memory (the text
                names both); nothing was written.
            IntegrityError: the bytes are not those committed; the producer's receipt says so, and
                the targets are worthless.
        """
        targets = targets_of(self._data, into)
        copier, manifest = self._copier, self.manifest
        scatter_delivery(
            copier,
            self._delivery,
            self.ledger,
            lambda region: copier.scatter(manifest, region, targets),
        )
        self._mark_read()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the payload, header and tensors, as a .safetensors file: the bytes that arrived.

        Blocks for that. It does not count as read by it. FileError if the file cannot be written.
        """
        write_payload(path, self.encoded())

    def encoded(self) -> memoryview:
        """Return the bytes of the payload as they came, header and tensors; see `put_encoded`.

        Readonly, and valid until the payload is released.
        """
        region, nbytes = self._delivery.open_region(), self.manifest.nbytes
        on_host = region.device == "cpu"
        return region.view(0, nbytes) if on_host else memoryview(region.read(0, nbytes))

    def release(self) -> None:
        """Release the payload as read; tensors that are kept elsewhere keep its memory."""
        self._data.close()
        self._delivery.release()

    def release_unread(self) -> None:
        """Release a payload that was not used, so that another reader receives it."""
        self._data.close()
        self._delivery.release_unread()

    def drop_unread(self) -> None:
        """Do what `release_unread` does, without a lock: for finalizers."""
        self._data.close()
        self._delivery.drop_unread()

    def __getitem__(self, name: str) -> Any:
        """Return what `data[name]` is: a tensor, the layers of a part, or a cache of a bundle."""
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in `data`."""
        return iter(self.data)

    if not TYPE_CHECKING:  # a type checker knows the attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            """Name the attribute of `data` that was meant."""
            data = self.__dict__.get("_data")
            is_of_data = data is not None and hasattr(type(data), name)
            cure = f": it is `data.{name}`" if is_of_data else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{cure}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._data!r}>"

    def __enter__(self) -> Payload:
        return self._data


class ReceivedChunk(Received):
    """Chunk `number` of a stream, counted from 0; all else as of a payload that was got.

    To look at it is not to have read it: see `ChunkStream`.
    """

    _data: TensorTransferData
    _sizes: RequestSizes | None = None

    def __init__(
        self,
        delivery: Delivery,
        position: StreamPosition,
        accept: Callable[[ReceivedChunk, StreamPosition], None],
        expected: ExpectedPayload | None = None,
        *,
        copier: Copier,
        layouts: LayoutCache,
        verify: Verify,
    ):
        self.number, started = position.number, time.perf_counter()
        try:
            parts = delivery, copier, layouts
            super().__init__(*parts, started=started, verify=verify, expected=expected)
            plan = expected.plan if expected and expected.header else self._whole_manifest()
            following = check_chunk(plan, delivery.open_region(), position)
            accept(self, following)
        except BaseException as error:  # after an interrupt, it can be received again
            delivery.end_after(error)
            raise

    @property
    def data(self) -> TensorTransferData:
        """Its tensors, readonly views of the link's memory, and its metadata."""
        return self._data

    @property
    def manifest(self) -> Manifest:
        """Sizes, positions and digests of the tensors that were appended."""
        return tensors_of_chunk(self._whole_manifest())

    def requests(self) -> ChunkRequests:
        """The tensors of each request in it, if the chunk was appended by `append_requests`.

        Raises:
            SchemaError: it was appended by `append`, and is of one request.
            ClosedError: the chunk was released.
        """
        if self._sizes is None:
            text = f"chunk {self.number} is of one request: append_requests sends those of many"
            raise SchemaError(text)
        return ChunkRequests(self._sizes, self._data)

    def _mark_read(self) -> None:
        """It counts as read when its stream releases it."""

    def __repr__(self) -> str:
        return f"<ReceivedChunk {self.number} of {self._data!r}>"

    def _open(self, region: Region, layouts: LayoutCache) -> tuple[Manifest, TensorTransferData]:
        manifest = self._delivery.open_manifest(region, layouts)
        data, self._sizes = open_chunk(manifest, region)
        return manifest, data


def check_verify(verify: str) -> None:
    """Raise SchemaError unless this is one of the values of `Verify`."""
    if verify not in _VERIFY.values:  # the call costs more than the test
        _VERIFY.read(verify, "verify")
