"""`KVConsumer`, the receiving end of a link, and what its gets return."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeVar

from omni_kvlink.connectors.base import MAX_RETRIES, Consumer, PendingGet
from omni_kvlink.connectors.protocol.get_table import check_timeout
from omni_kvlink.connectors.protocol.transfer import Ledger
from omni_kvlink.errors import (
    ClosedError,
    IntegrityError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
    WireError,
)
from omni_kvlink.link.chunk_stream import ChunkStream
from omni_kvlink.link.end import LinkEnd
from omni_kvlink.link.received_batch import ReceivedBatch
from omni_kvlink.memory.region import LOST, Region
from omni_kvlink.payload.bundle import PAYLOAD_KINDS, Payload, open_payload
from omni_kvlink.payload.chunk_requests import ChunkRequests
from omni_kvlink.payload.growing import check_chunk, open_chunk
from omni_kvlink.payload.manifest import Manifest, header_bytes
from omni_kvlink.payload.schema import check_request_id
from omni_kvlink.payload.views import TensorView, tensor_views

if TYPE_CHECKING:
    import torch

    from omni_kvlink.connectors.protocol.get_table import Delivery
    from omni_kvlink.connectors.protocol.progress import Progress
    from omni_kvlink.copier import Copier, StreamEvents
    from omni_kvlink.payload.chunk_requests import RequestSizes
    from omni_kvlink.payload.growing import StreamPosition
    from omni_kvlink.payload.tensor_data import TensorTransferData

Verify: TypeAlias = Literal["auto", "full", "off"]
T = TypeVar("T")
LayerKey: TypeAlias = tuple[str, int]
"""A layer's branch and index."""


class KVConsumer(LinkEnd):
    """The receiving end of a link, from `KVLink.connect`; thread-safe; a context manager."""

    _end: Consumer

    def get(self, request_id: str, *, timeout: float, verify: Verify = "auto") -> Received:
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

        Raises:
            TransferTimeout: the text tells how far the payload had come.
            TransferFailed: the producer failed it, or it expired.
            PeerLostError: the producer died, or closed the link.
            IntegrityError: the bytes are not the ones that were committed; or "full" is asked of a
                payload that was put with `digests=False`.
            VersionError: the producer speaks another major version.
            WireError: this is not a valid payload.
        """
        check_verify(verify)
        started = time.perf_counter()
        limit = check_timeout(timeout)
        delivery = self._receive(request_id, limit, streamed=False, verify=verify)
        return Received(delivery, self._copier, started=started, verify=verify)

    def get_many(
        self, request_ids: Sequence[str], *, timeout: float, verify: Verify = "auto"
    ) -> ReceivedBatch[Received]:
        """Wait for several payloads, all of which are requested at once; blocks until all are here.

        Used as `with consumer.get_many(ids, timeout=5.0) as payloads:`, in the order of the ids.
        The timeout is for all together; `verify` is as for `get`. This side, over a network, and
        the producer need memory for all.

        Raises what `get` raises for the first payload, in this order, that cannot be had. The
        others are released unread then: another call can have them.
        """
        check_verify(verify)
        started, attempts = time.perf_counter(), GetAttempts(check_timeout(timeout))
        pending = begin_gets(self, request_ids, timeout=attempts.seconds_left(), verify=verify)
        received: list[Received] = []
        try:
            for request_id, get in zip(request_ids, pending, strict=True):
                begin = partial(begin_get, self, request_id, verify=verify)
                delivery = self._await(get, begin, attempts.again())
                received.append(Received(delivery, self._copier, started=started, verify=verify))
            return ReceivedBatch(received)
        except BaseException as error:
            for one in received:
                one.release_unread()
            if isinstance(error, Exception):
                for get in pending[len(received) + 1 :]:
                    get.cancel()
            pending.clear()  # after an interrupt their finalizers cancel them, without a lock
            raise

    def stream_get(self, request_id: str, *, timeout: float) -> ReceivedStream:
        """Wait until a cache is announced, and return it as a stream of layers.

        `for layer in consumer.stream_get("req-1", timeout=5.0): use(layer.key, layer.value)`. A
        payload that was put as a whole comes as a stream whose layers are all there. The timeout is
        for the announcement, and again for each layer. Errors are those of `get`. Bytes are checked
        as `get` does with `verify="auto"`, before their layer is there.
        """
        started, timeout = time.perf_counter(), check_timeout(timeout)
        delivery = self._receive(request_id, timeout, streamed=True, verify="auto")
        return ReceivedStream(delivery, self._copier, timeout=timeout, started=started)

    def read_stream(
        self, request_id: str, *, timeout: float, start: int = 0, verify: Verify = "auto"
    ) -> ChunkStream[ReceivedChunk]:
        """Wait until a stream that grows is opened, and return it as an iterator over its chunks.

        `for chunk in consumer.read_stream("req-1", timeout=5.0): use(chunk.data["hidden"])`. The
        timeout (seconds) is for the stream, and again for each chunk. A reader receives all chunks
        from `start` on, also those from before it came, however many other readers there are. One
        that replaces a lost reader begins with the first chunk that this one had not released: an
        earlier `start` raises TransferFailed, whose text names the number.

        Errors and `verify` are those of `get`, for each chunk; see `ChunkStream.receive`.
        SchemaError if `start` is negative.
        """
        limit = check_timeout(timeout)
        deadline = time.monotonic() + limit
        head = begin_chunks(self, request_id, timeout=limit, start=start, verify=verify)
        delivery = head.wait(timeout=max(0.0, deadline - time.monotonic()))
        return open_chunks(self, head, delivery, start=start, timeout=limit, verify=verify)

    @property
    def is_connected(self) -> bool:
        """Whether the producer is there, so that a request need not reconnect; never blocks."""
        return self._end.is_connected

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """Abort a transfer on both sides: every `get` of it raises TransferFailed."""
        self._check_open()
        self._end.abort(check_request_id(request_id), reason)

    def _receive(
        self, request_id: str, timeout: float, *, streamed: bool, verify: Verify
    ) -> Delivery:
        attempts = GetAttempts(timeout)
        begin = partial(begin_get, self, request_id, streamed=streamed, verify=verify)
        return self._await(begin(timeout=attempts.seconds_left()), begin, attempts)

    def _await(
        self, pending: PendingGet, begin: Callable[..., PendingGet], attempts: GetAttempts
    ) -> Delivery:
        """Wait for a get; if only the connection broke, `begin` it again."""
        while True:
            try:
                return pending.wait(timeout=attempts.seconds_left())
            except PeerLostError:
                left = attempts.seconds_left()
                if not attempts.may_retry() or not can_retry(self, pending, timeout=left):
                    raise
            pending = begin(timeout=attempts.seconds_left())


class GetAttempts:
    """Allows `MAX_RETRIES` more requests of one get until its deadline; without I/O."""

    def __init__(self, timeout: float):
        self.deadline = time.monotonic() + timeout
        self._retries = 0

    def again(self) -> GetAttempts:
        """The attempts of another get with the same deadline."""
        other = GetAttempts(0.0)
        other.deadline = self.deadline
        return other

    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def may_retry(self) -> bool:
        """Count a broken connection; whether another request is allowed."""
        self._retries += 1
        return self._retries <= MAX_RETRIES


def begin_get(
    consumer: KVConsumer,
    request_id: str,
    *,
    timeout: float,
    streamed: bool = False,
    verify: Verify = "auto",
) -> PendingGet:
    """Request a payload without waiting for it; `timeout` bounds a reconnection and nothing else.

    With `streamed`, it is delivered while it is being written: open it with `open_stream`. Bytes
    that cross a network are checked on arrival, except with `verify="off"`; see `KVConsumer.get`.
    PeerLostError if the producer is gone and did not come back in time.
    """
    if consumer._closed or os.getpid() != consumer._pid:  # the call costs more than the test
        consumer._check_open()
    key, limit = check_request_id(request_id), check_timeout(timeout)
    check = verify != "off"
    return consumer._end.begin_get(key, timeout=limit, streamed=streamed, verify=check)


def begin_gets(
    consumer: KVConsumer, request_ids: Sequence[str], *, timeout: float, verify: Verify = "auto"
) -> list[PendingGet]:
    """Request several payloads at once, without waiting for one; else as `begin_get`."""
    consumer._check_open()
    if isinstance(request_ids, str):
        raise SchemaError(f"request_ids={request_ids!r}: a list of request ids")
    keys, limit = list(map(check_request_id, request_ids)), check_timeout(timeout)
    return consumer._end.begin_gets(keys, timeout=limit, verify=verify != "off")


def can_retry(consumer: KVConsumer, pending: PendingGet, *, timeout: float) -> bool:
    """Whether a get that ended with PeerLostError can be requested again.

    It can if only the connection broke: the same run of the producer answers within `timeout` s.
    """
    limit = check_timeout(timeout)
    consumer._check_process()
    return not consumer._closed and consumer._end.can_retry(pending, timeout=limit)


def open_delivery(
    consumer: KVConsumer, delivery: Delivery, *, started: float, verify: Verify = "auto"
) -> Received:
    """Check what `PendingGet.wait` returned and make views of it; `verify` as for `KVConsumer.get`.

    `started` is when the get began, on the clock of `time.perf_counter`; for the ledger. A payload
    that raises IntegrityError, VersionError or WireError is rejected at its producer.
    """
    check_verify(verify)
    return Received(delivery, consumer._copier, started=started, verify=verify)


def verify_first(received: Received) -> None:
    """Do what `verify="full"` of a `get` does, before anybody has a view of the payload.

    What was checked on arrival is not checked again. A bad payload is rejected at once.
    """
    try:
        received._verify(on_arrival=received._delivery.is_verified)
    except WireError as error:
        received._delivery.reject(str(error), at_once=True)
        raise


def open_stream(
    consumer: KVConsumer, delivery: Delivery, *, started: float, timeout: float
) -> ReceivedStream:
    """`open_delivery` for `begin_get(…, streamed=True)`; `timeout` seconds for each layer."""
    return ReceivedStream(delivery, consumer._copier, timeout=timeout, started=started)


def begin_chunks(
    consumer: KVConsumer, request_id: str, *, timeout: float, start: int = 0, verify: Verify
) -> PendingGet:
    """Request a stream that grows, as `begin_get` does a payload; open it with `open_chunks`."""
    check_verify(verify)
    key, limit = check_request_id(request_id), check_timeout(timeout)
    if start < 0:
        raise SchemaError(f"start={start}: the number of a chunk, from 0 on")
    consumer._check_open()
    return consumer._end.begin_chunks(key, timeout=limit, start=start, verify=verify != "off")


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
    copier = consumer._copier
    open_chunk = partial(ReceivedChunk, copier=copier, verify=verify)
    return ChunkStream(head, delivery, open_chunk, copier, start=start, timeout=timeout)


class Received:
    """A payload that arrived: `with` gives its data, and releases it at the end.

    `data` is readonly views of the link's memory; `manifest` has sizes, positions and digests;
    `ledger` is what the receipt of it cost on this side.
    """

    data: Payload

    def __init__(self, delivery: Delivery, copier: Copier, *, started: float, verify: Verify):
        self.ledger = ledger = Ledger()
        self._delivery, self._copier = delivery, copier
        arrived = time.perf_counter()
        ledger.seconds["wait"] = arrived - started
        try:
            region = region_of(delivery)
            self.manifest = manifest = _manifest_of(delivery, region)
            self.data = self._open(manifest, region)
            ledger.seconds["view"] = time.perf_counter() - arrived
            ledger.nbytes, ledger.copies = manifest.nbytes, delivery.copies
            ledger.digests = "crc32c" if manifest.has_digests else "off"
            if verify == "full":
                self._verify(on_arrival=delivery.is_verified)
        except Exception as error:  # released without a reason, it would count as read
            delivery.reject(str(error) or repr(error), at_once=True)
            raise
        except BaseException:  # an interrupt: another get can have it
            delivery.release_unread()
            raise

    def _open(self, manifest: Manifest, region: Region) -> Payload:
        """The payload as views."""
        return PAYLOAD_KINDS[manifest.kind].views_of(manifest, manifest.branches, region)

    def verify(self) -> None:
        """Check every byte against its digest, also if it was checked on arrival.

        IntegrityError if one is wrong, here and in the receipt; or if the payload has no digests.
        """
        try:
            self._verify(on_arrival=False)
        except WireError as error:
            self._delivery.reject(str(error))
            raise

    def _verify(self, *, on_arrival: bool) -> None:
        region = region_of(self._delivery)
        if not self.manifest.is_covered:
            raise IntegrityError(
                f"payload {self._delivery.key!r} has no digests, so that its bytes cannot be "
                'checked: put it with digests=True, or get it with verify="auto"'
            )
        if not on_arrival:
            with self.ledger.phase("verify"):
                self._copier.verify(self.manifest, region)

    def scatter(self, into: Payload | Sequence[TensorView]) -> None:
        """Copy all tensors out, each byte checked against its digest in the same pass.

        `into` is the caller's tensors or paged tensors, in the order of `data.tensors()`; or a
        payload that holds them, such as `PagedAdapter.export` makes of free blocks.

        Raises:
            SchemaError: a target is not what the payload is, or two of them share memory (the text
                names both); nothing was written.
            IntegrityError: the bytes are not those committed; the producer's receipt says so, and
                the targets are worthless.
        """
        targets = into if isinstance(into, Sequence) else into.tensors()
        _scatter(
            self._copier,
            self._delivery,
            self.ledger,
            lambda region: self._copier.scatter(self.manifest, region, targets),
        )

    def release(self) -> None:
        """Release the payload; tensors that are kept elsewhere keep its memory."""
        self.data.close()
        self._delivery.release()

    def release_unread(self) -> None:
        """Release a payload that was not used, so that another reader receives it."""
        self.data.close()
        self._delivery.release_unread()

    def __enter__(self) -> Payload:
        return self.data

    def __exit__(self, *exception: object) -> None:
        self.release()


class ReceivedChunk(Received):
    """Chunk `number` of a stream, counted from 0; all else as of a payload that was got."""

    data: TensorTransferData
    _sizes: RequestSizes | None

    def __init__(
        self,
        delivery: Delivery,
        position: StreamPosition,
        accept: Callable[[ReceivedChunk, StreamPosition], None],
        *,
        copier: Copier,
        verify: Verify,
    ):
        self.number = position.number
        try:
            super().__init__(delivery, copier, started=time.perf_counter(), verify=verify)
            self.manifest, following = check_chunk(self.manifest, region_of(delivery), position)
            accept(self, following)
        except Exception as error:
            delivery.reject(str(error) or repr(error), at_once=True)
            raise
        except BaseException:  # an interrupt: it can be received again
            delivery.release_unread()
            raise

    def requests(self) -> ChunkRequests:
        """The tensors of each request in it, if the chunk was appended by `append_requests`.

        Raises:
            SchemaError: it was appended by `append`, and is of one request.
            ClosedError: the chunk was released.
        """
        if self._sizes is None:
            text = f"chunk {self.number} is of one request: append_requests sends those of many"
            raise SchemaError(text)
        return ChunkRequests(self._sizes, self.data)

    def _open(self, manifest: Manifest, region: Region) -> TensorTransferData:
        data, self._sizes = open_chunk(manifest, region)
        return data


class ReceivedLayer:
    """Layer `index` of the cache `branch` of a bundle ("kv" for a single cache) that arrived."""

    def __init__(self, stream: ReceivedStream, manifest: Manifest, branch: str, index: int):
        self.branch, self.index = branch, index
        self._stream, self._manifest = stream, manifest
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """K and V `[tokens, kv_heads, head_dim]`, or one latent: readonly views."""
        # No cached_property: before Python 3.12 all objects share its lock, and a child that was
        # forked while a thread held it would wait for ever.
        if self._tensors is None:
            region, manifest = region_of(self._stream.delivery), self._manifest
            self._tensors = tuple(tensor_views(region, manifest.tensors, manifest.header_nbytes))
        return self._tensors

    @property
    def key(self) -> torch.Tensor:
        """K; in layout "ND" the latent."""
        return self.tensors[0]

    @property
    def value(self) -> torch.Tensor:
        """V; in layout "ND" there is none, and this is an IndexError."""
        return self.tensors[1]

    def scatter(self, *targets: TensorView) -> None:
        """Copy K and V out into the caller's tensors or paged tensors; see `Received.scatter`."""
        self._stream.scatter(self._manifest, targets)

    def begin_scatter(
        self, *targets: TensorView, rows: range | None = None, after: StreamEvents | None = None
    ) -> StreamEvents:
        """Start what `scatter` does, and return before a device has written its tensors.

        Digests are checked, and tensors of the host written, on return. Those of a device are
        written behind the calling thread's current stream, or behind `after`, which
        `KVConsumer.record` returned for them. Keep the result until the end of these copies, which
        it is: `wait` for it, or let the streams that use the tensors wait (`make_streams_wait`).

        With `rows`, only these tokens are copied; the digests of all are checked.
        """
        return self._stream.begin_scatter(self._manifest, targets, rows, after)

    def __repr__(self) -> str:
        return f"<ReceivedLayer {self.index} of {self.branch!r}>"


class ReceivedStream:
    """A cache whose layers can be used as they arrive; iterate over it, or wait for one.

    A context manager; without the block, the payload is released with the last view. `manifest`
    has digests once the payload is whole; `ledger` is what the receipt of it cost on this side.
    """

    WHOLE: ClassVar[str] = "its commit"

    def __init__(self, delivery: Delivery, copier: Copier, *, timeout: float, started: float):
        self.delivery, self.ledger = delivery, Ledger()
        self._copier, self.timeout = copier, check_timeout(timeout)
        self.ledger.seconds["wait"] = time.perf_counter() - started
        try:
            self.manifest = _manifest_of(delivery, region_of(delivery))
        except Exception as error:
            delivery.reject(str(error) or repr(error), at_once=True)
            raise
        except BaseException:  # an interrupt: another get can have it
            delivery.release_unread()
            raise
        self.ledger.nbytes, self.ledger.copies = self.manifest.nbytes, delivery.copies
        self.ledger.digests = "crc32c" if self.manifest.has_digests else "off"
        layers = self.manifest.layers()
        self._layers = {(branch.name, layer): tensors for branch, layer, tensors in layers}

    def __len__(self) -> int:
        """Layers of all branches together."""
        return len(self._layers)

    def __iter__(self) -> Iterator[ReceivedLayer]:
        """The layers in the order of the wire; waits up to the stream's timeout for each."""
        for branch, layer in self._layers:
            yield self.wait_for_layer(layer, branch=branch)

    def wait_for_layer(
        self, layer: int, *, branch: str = "", timeout: float | None = None
    ) -> ReceivedLayer:
        """Wait for one layer, by its index from 0; in any order, as often as you like.

        `branch`, a cache of a bundle, may be left out of a single cache; `timeout` (seconds) is
        that of the stream if None.

        Raises:
            TransferFailed: the producer failed before the payload was whole.
            TransferTimeout: the layer was not written in time.
            PeerLostError: the producer died, or closed the link.
            WireError: what was announced is not what the plan says.
            SchemaError: there is no such layer.
        """
        key = self.find(layer, branch)
        self._wait(self.when(key), self.name(key), timeout)
        return self.open_layer(key)

    def wait(self, *, timeout: float | None = None) -> Payload:
        """Wait as `wait_for_layer` does, but for the commit; the data that `get` gives."""
        self._wait(self.whole(), self.WHOLE, timeout)
        progress = self.delivery.progress
        if progress is not None:  # all tensors must have been announced; take their digests over
            everything = range(len(self.manifest.tensors))
            self.check(progress.when(everything), self.WHOLE, 0.0)
            self.manifest = self._with_digests(self.manifest, everything)
        return open_payload(self.manifest, region_of(self.delivery))

    def release(self) -> None:
        """Release the payload; tensors that are kept elsewhere keep its memory."""
        self.delivery.release()

    def __enter__(self) -> ReceivedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    # For event loops: find a layer, wait for its future, check the future, open the layer.

    def find(self, layer: int, branch: str) -> LayerKey:
        """The key of a layer; SchemaError if there is none."""
        if not branch and self.manifest.bundle:
            raise SchemaError("which branch of the bundle? wait_for_layer(…, branch=name)")
        key = (branch or self.manifest.branches[0].name, layer)
        if key not in self._layers:
            raise SchemaError(f"payload {self.delivery.key!r} has no layer {layer} of {key[0]!r}")
        return key

    def name(self, key: LayerKey) -> str:
        """A layer's name in error texts."""
        return f"layer {key[1]} of branch {key[0]!r}"

    def names(self) -> list[LayerKey]:
        """Branch and index of every layer, in the order of the wire."""
        return list(self._layers)

    def when(self, key: LayerKey) -> Future[None]:
        """A future that ends with the layer, or with the error."""
        self.delivery.check_process()
        progress = self.delivery.progress
        return _done() if progress is None else progress.when(self._layers[key])

    def whole(self) -> Future[None]:
        """A future that ends with the commit, or with the error."""
        self.delivery.check_process()
        progress = self.delivery.progress
        return _done() if progress is None else progress.whole

    def open_layer(self, key: LayerKey) -> ReceivedLayer:
        """A layer whose future has ended well."""
        tensors = self._layers[key]
        manifest = self._with_digests(self.manifest.part(tensors), tensors)
        return ReceivedLayer(self, manifest, *key)

    def check(self, future: Future[None], what: str, waited: float) -> None:
        """Raise the error that a future ended with, or TransferTimeout if it did not end."""
        if not future.done():
            raise TransferTimeout(
                f"payload {self.delivery.key!r}: {what} did not come within {waited:g} s",
                key=self.delivery.key,
                waited=waited,
                phase=f"announced; the producer is still writing {what}",
            )
        error = future.exception()
        if isinstance(error, KVLinkError):
            raise self._copy_of(error, what)

    def cancel_wait(self, future: Future[None]) -> None:
        """Cancel a wait for this future; it may be ended already."""
        if self.delivery.progress is not None:
            self.delivery.progress.cancel(future)

    def scatter(self, manifest: Manifest, targets: Sequence[TensorView]) -> None:
        """Copy the tensors of one layer out; see `ReceivedLayer.scatter`."""
        _scatter(
            self._copier,
            self.delivery,
            self.ledger,
            lambda region: self._copier.scatter(manifest, region, targets),
        )

    def begin_scatter(
        self,
        manifest: Manifest,
        targets: Sequence[TensorView],
        rows: range | None,
        after: StreamEvents | None,
    ) -> StreamEvents:
        """Start to copy the tensors of one layer out; see `ReceivedLayer.begin_scatter`."""
        copier = self._copier

        def begin(region: Region) -> StreamEvents:
            part = manifest
            if rows is not None:
                copier.verify(manifest, region)
                part = manifest.only(spec.rows(rows) for spec in manifest.tensors)
            return copier.begin_scatter(part, region, targets, after=after)

        return _scatter(copier, self.delivery, self.ledger, begin)

    def _copy_of(self, error: KVLinkError, what: str) -> KVLinkError:
        """A new error of the same type: the future's own keeps this stream by its traceback."""
        text = f"{error}; {what} was awaited"
        if isinstance(error, WireError):
            self.delivery.reject(text)
        if isinstance(error, TransferFailed):
            return TransferFailed(text, key=self.delivery.key, reason=error.reason)
        return type(error)(text)

    def _wait(self, future: Future[None], what: str, timeout: float | None) -> None:
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        started = time.perf_counter()
        try:
            future.exception(seconds)
        except FutureTimeout:
            pass  # `check` raises
        finally:
            self.cancel_wait(future)
        self.check(future, what, seconds)
        spent = self.ledger.seconds.get("layers", 0.0)
        self.ledger.seconds["layers"] = spent + time.perf_counter() - started

    def _with_digests(self, manifest: Manifest, tensors: range) -> Manifest:
        """The announced digests, each as long as the plan says."""
        progress: Progress | None = self.delivery.progress
        if progress is None:
            return manifest
        digests = [progress.digest(tensor).hex() for tensor in tensors]
        for digest, spec in zip(digests, manifest.tensors, strict=True):
            if len(digest) != len(spec.digest):
                self.delivery.reject(f"{spec.where()}: a digest of another length")
                raise WireError(f"{spec.where()}: a digest of another length was announced")
        return manifest.with_digests(digests)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _scatter(copier: Copier, delivery: Delivery, ledger: Ledger, copy: Callable[[Region], T]) -> T:
    """Copy tensors of a delivery out; a wrong byte is reported to the producer, too."""
    started = time.perf_counter()
    try:
        result = copy(region_of(delivery))
    except WireError as error:
        delivery.reject(str(error))
        error.__context__ = (
            None  # its frames, and those of its traceback, keep the payload's memory
        )
        raise error.with_traceback(None) from None
    ledger.copies = delivery.copies + 1
    ledger.copier, ledger.instructions = copier.name, copier.features
    spent = ledger.seconds.get("scatter", 0.0)
    ledger.seconds["scatter"] = spent + time.perf_counter() - started
    return result


def region_of(delivery: Delivery) -> Region:
    """The payload's memory; ClosedError if it was released, or belongs to a parent process."""
    delivery.check_process()
    region = delivery.region
    if region is None:
        raise ClosedError(f"payload {delivery.key!r} was released; use it inside its `with` block")
    if region.is_lost:
        raise ClosedError(f"payload {delivery.key!r}: {LOST}; get it in this process")
    return region


def _manifest_of(delivery: Delivery, region: Region) -> Manifest:
    """The manifest of the payload that was requested; WireError if it is another one's."""
    key, manifest = delivery.key, delivery.manifest
    if manifest is None:
        manifest = Manifest.decode(delivery.draft or header_bytes(region), region.nbytes)
    if manifest.request_id != key:
        raise WireError(f"requested {key!r}, the payload says it is {manifest.request_id!r}")
    return manifest


def check_verify(verify: str) -> None:
    """Raise ValueError unless this is one of the values of `Verify`."""
    if verify not in ("auto", "full", "off"):
        raise ValueError(f"verify {verify!r}; wanted 'auto', 'full' or 'off'")
