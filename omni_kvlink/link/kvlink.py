"""`KVLink`: a KV cache in at one end, out at the other."""

from __future__ import annotations

import atexit
import os
import time
import warnings
import weakref
from typing import Any

from omni_kvlink.connectors.base import (
    Consumer,
    Delivery,
    PendingGet,
    Producer,
    Receipt,
    wrong_side,
)
from omni_kvlink.connectors.ledger import Ledger
from omni_kvlink.connectors.registry import backend
from omni_kvlink.copier import Copier
from omni_kvlink.errors import ClosedError, SchemaError
from omni_kvlink.link.allocation import Allocation
from omni_kvlink.link.direct_put import DirectPutOperation
from omni_kvlink.link.put_operation import PutOperation
from omni_kvlink.link.put_stream import PutStream
from omni_kvlink.link.received import Payload, Received, Verify, check_verify
from omni_kvlink.link.received_stream import ReceivedStream
from omni_kvlink.link.url_options import named_copier, parse
from omni_kvlink.memory.region import Lease
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.manifest import Manifest

_links: weakref.WeakSet[KVLink] = weakref.WeakSet()
FOREVER = 1e9
"""Seconds that every clock of the system still takes; a longer timeout means this one."""


class KVLink:
    """One end of a link between two stages; thread-safe; a context manager.

    Make one with `KVLink.serve` (the stage that puts) or `KVLink.connect` (the stages that get).
    """

    def __init__(self, url: str, end: Producer | Consumer, *, copier: Copier, digests: bool):
        self.url = url
        self._end = end
        self._copier, self._digests = copier, digests
        self._allocations: dict[str, Allocation] = {}
        self._closed = False
        _links.add(self)

    @classmethod
    def serve(
        cls, url: str, *, copier: str = "auto", digests: bool = True, **options: Any
    ) -> KVLink:
        """Open the producer's end.

        Args:
            url: such as `shm://bagel`; options may follow, as in `shm://bagel?mode=sealed`.
            copier: "auto" takes "pinned" where there is a CUDA device, "native" if it was built,
                else "torch" with one warning; a named one that is missing is an error.
            digests: compute a CRC-32C of each tensor while it is copied.
            options: fields of `Options`: quota, mode, prefault, directory; for links between
                machines keys, peers, insecure, ucx_tls, ucx_devices; for `auto://` tcp.

        Raises:
            BusyError: the name is served already.
            UnavailableError: the connector cannot run here.
        """
        scheme, address, chosen = parse(url, options)
        mover = named_copier(copier)
        end = backend(scheme).serve(address, chosen)
        return cls(url.replace(*end.bound_url, 1), end, copier=mover, digests=digests)

    @classmethod
    def connect(cls, url: str, *, timeout: float, copier: str = "auto", **options: Any) -> KVLink:
        """Open a consumer's end, before or after the producer starts.

        Raises:
            TransferTimeout: no producer within `timeout` seconds.
            UnavailableError, VersionError, ConnectorError
        """
        scheme, address, chosen = parse(url, options)
        mover = named_copier(copier)
        end = backend(scheme).connect(address, chosen, min(timeout, FOREVER))
        return cls(url, end, copier=mover, digests=True)

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
        """Copy a cache into the link's memory and publish it under its request id.

        Returns when it is committed: the caller's tensors are free again. Whether it arrived is
        the receipt's to say. Tensors that lie in memory which `allocate` gave for this request id
        are not copied.

        With `direct=True` no tensor is copied, and no memory taken for one: over ZMQ and UCX its
        bytes leave from where they lie. Then it returns when all readers were sent all of them.
        A reader that is lost later cannot be replaced, and the receipt ends FAILED.

        Args:
            readers: how many `get`s shall have it.
            ttl: seconds in which they must come.
            timeout: seconds to wait for room; with `direct=True` for the readers, too.
            digests: compute them or not; as the link was told if None.
            background: for allocated memory: return now, and let a thread compute the digests and
                commit. If that fails, the receipt says so.
            direct: send from these tensors: contiguous, on the host, or for `ucx://` links with
                `ucx_tls="…,cuda_copy"` and `digests=False` on a GPU.

        Raises:
            DuplicateKeyError: a live payload has this request id.
            CapacityError: no room within the timeout; asked and free bytes are its attributes.
            TransferTimeout: of a direct one: not every reader took it, and none will have it.
            SchemaError, ClosedError
        """
        producer, ledger = self._producer("put"), self._ledger(digests)
        _check_how(readers, ttl)
        with ledger.phase("plan"):
            plan, places = self._plan(data, ledger), data.tensors()
        if background and self._allocation(plan.request_id) is None:
            raise SchemaError("background=True is for memory that allocate() gave")
        if direct:
            if background or self._allocation(plan.request_id) is not None:
                raise SchemaError("direct=True is for tensors of your own, and puts them now")
            meeting = DirectPutOperation(
                producer, plan, self._copier, ledger, readers=readers, ttl=ttl
            )
            return meeting.meet(places, timeout=min(timeout, FOREVER))
        sending = PutOperation(producer, plan, self._copier, ledger, readers=readers, ttl=ttl)
        early = sending.has_waiting_reader
        draft = plan.header_nbytes if early else 0
        lease, allocation = self._lease(producer, plan, timeout, ledger, draft=draft)
        if allocation is not None:
            allocation.data.close()
        return (
            sending.later(lease, places) if background else sending.now(lease, places, early=early)
        )

    def allocate(self, plan: Payload, *, timeout: float = 10.0) -> Allocation:
        """Memory of the link for an engine that writes its K and V there; `put` copies nothing.

        Args:
            plan: sizes, such as `KVCacheTransferData.blank` makes, or a cache to be like. What is
                put later may have fewer tokens, other metadata, and branches less.
            timeout: seconds to wait for room.

        Raises:
            DuplicateKeyError, CapacityError, SchemaError, ClosedError
        """
        producer = self._producer("allocate")
        capacity = plan.plan(digests=True).with_room()
        lease = producer.reserve(
            capacity.request_id,
            capacity.nbytes,
            timeout=min(timeout, FOREVER),
            draft=capacity.header_nbytes,
        )
        try:
            return Allocation(capacity, lease, producer.lend(lease), self._allocations)
        except BaseException:
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
        """Send a cache while it is being made: `with link.stream_put(plan) as out: …`.

        Readers that use `stream_get` have each layer as soon as `out.write_layer` wrote it; others
        get the whole when the block ends. Layers that lie in memory which `allocate` gave for this
        request id are not copied.

        Args:
            plan: sizes and metadata, such as `KVCacheTransferData.blank` makes.
            readers, ttl, timeout: as for `put`; the ttl begins with the commit.

        Raises:
            DuplicateKeyError, CapacityError, SchemaError, ClosedError
        """
        producer, ledger = self._producer("stream_put"), self._ledger(None)
        _check_how(readers, ttl)
        if isinstance(plan, Manifest) and self._allocation(plan.request_id):
            raise SchemaError("for allocated memory, plan with the cache or bundle itself")
        with ledger.phase("plan"):
            layout = plan if isinstance(plan, Manifest) else self._plan(plan, ledger)
        ledger.digests = "crc32c" if layout.has_digests else "off"
        lease, allocation = self._lease(
            producer, layout, timeout, ledger, draft=layout.header_nbytes
        )
        sending = PutOperation(producer, layout, self._copier, ledger, readers=readers, ttl=ttl)
        return PutStream(sending, lease, None if allocation is None else allocation.data)

    def get(self, request_id: str, *, timeout: float, verify: Verify = "auto") -> Received:
        """Wait for a cache; woken when it is committed.

        Used as `with link.get(...) as data:`. The tensors are readonly views of the link's
        memory (writing to one ends the process); they are valid inside the block, and beyond it
        for as long as one of them is kept. The memory goes back when the last view is gone.

        Args:
            verify: "full" checks every byte against its digest first. "auto" checks the header
                and the commit word, which rule out torn and stale payloads, and leaves the bytes
                to whoever copies them. "off" is "auto".

        Raises:
            TransferTimeout: names how far the payload had come.
            TransferFailed: the producer said that it failed, or it expired.
            PeerLostError: the producer died, or closed the link.
            IntegrityError, VersionError, WireError: the payload is not what was committed.
        """
        consumer = self._consumer("get")
        check_verify(verify)
        started = time.perf_counter()
        delivery = consumer.receive(_check_id(request_id), timeout=min(timeout, FOREVER))
        return self.open_delivery(delivery, started=started, verify=verify)

    def stream_get(self, request_id: str, *, timeout: float) -> ReceivedStream:
        """Wait until a cache is begun, and take its layers as they come.

        `for layer in link.stream_get("req-1", timeout=5.0): use(layer.key, layer.value)`. What was
        put as a whole comes as a stream whose layers are all there.

        Args:
            timeout: seconds to wait for the beginning, and again for each layer.

        Raises:
            The errors of `get`.
        """
        consumer, started = self._consumer("stream_get"), time.perf_counter()
        timeout = min(timeout, FOREVER)
        delivery = consumer.receive(_check_id(request_id), timeout=timeout, streamed=True)
        return self.open_stream(delivery, started=started, timeout=timeout)

    def begin_get(self, request_id: str, *, timeout: float, streamed: bool = False) -> PendingGet:
        """Ask for a cache without waiting; for event loops, see `omni_kvlink.aio`."""
        consumer, limit = self._consumer("get"), min(timeout, FOREVER)
        return consumer.begin(_check_id(request_id), timeout=limit, streamed=streamed)

    def is_back(self, want: PendingGet, *, timeout: float) -> bool:
        """Whether a want that ended with PeerLostError can be begun again: only its connection
        broke, and its producer, the same life of it, is there; for event loops, too.
        """
        return self._consumer("get").is_back(want, timeout=timeout)

    def open_delivery(self, delivery: Delivery, *, started: float, verify: Verify) -> Received:
        """Check a delivery and make views of it; a bad one is rejected at its producer."""
        return Received.open(delivery, self._copier, started=started, verify=verify)

    def open_stream(self, delivery: Delivery, *, started: float, timeout: float) -> ReceivedStream:
        """The same for what `begin_get(…, streamed=True)` gave."""
        return ReceivedStream(delivery, self._copier, started=started, timeout=timeout)

    def fail(self, request_id: str, reason: str) -> None:
        """Tell whoever waits for `request_id`, or asks later, that it will not come."""
        self._producer("fail").fail(_check_id(request_id), reason)

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """End a transfer from either side: nobody waits for it any more."""
        self._check_open()
        _check_id(request_id)
        if isinstance(self._end, Producer):
            self._end.fail(request_id, reason, aborted=True)
        else:
            self._end.abort(request_id, reason)

    def stats(self) -> dict[str, Any]:
        """State and counters of this end, as JSON values."""
        return {"url": self.url, **self._end.health()}

    def close(self) -> None:
        """Refuse new work, wake who waits, free the memory; a second call does nothing.

        Payloads not yet fetched are lost, and their receipts say so: wait for them first.
        """
        self._closed = True
        self._end.close()
        self._allocations.clear()  # they would keep the memory for as long as the closed link

    def __enter__(self) -> KVLink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid_owns():
            self.close()
            warnings.warn(f"link {self.url} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        side = "producer" if isinstance(self._end, Producer) else "consumer"
        return f"<KVLink {self.url}, {side}{', closed' if self._closed else ''}>"

    def _ledger(self, digests: bool | None) -> Ledger:
        wanted = self._digests if digests is None else digests
        return Ledger(
            copier=self._copier.name,
            instructions=self._copier.features,
            digests="crc32c" if wanted else "off",
        )

    def _plan(self, data: Payload, ledger: Ledger) -> Manifest:
        """Where everything goes: into memory that was allocated for it, or new."""
        if isinstance(data, KVCacheBundle):
            ledger.reused_nbytes = data.reused_nbytes
        allocation = self._allocation(data.request_id)
        capacity = None if allocation is None else allocation.capacity
        return data.plan(digests=ledger.digests != "off", capacity=capacity)

    def _allocation(self, request_id: str) -> Allocation | None:
        """What was allocated for a request, and neither put nor released."""
        return self._allocations.get(request_id)

    def _lease(
        self, producer: Producer, plan: Manifest, timeout: float, ledger: Ledger, *, draft: int = 0
    ) -> tuple[Lease, Allocation | None]:
        with ledger.phase("reserve"):
            allocation = self._allocation(plan.request_id)
            if allocation is None:
                wait, key = min(timeout, FOREVER), plan.request_id
                return producer.reserve(key, plan.nbytes, timeout=wait, draft=draft), None
            lease = allocation.take()
            lease.shrink(plan.nbytes)
            return lease, allocation

    def _pid_owns(self) -> bool:
        return os.getpid() == getattr(self._end, "_pid", os.getpid())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"link {self.url} is closed")

    def _producer(self, verb: str) -> Producer:
        self._check_open()
        if not isinstance(self._end, Producer):
            raise wrong_side(verb, f"it was connected; KVLink.serve({self.url!r}) can")
        return self._end

    def _consumer(self, verb: str) -> Consumer:
        self._check_open()
        if not isinstance(self._end, Consumer):
            raise wrong_side(verb, f"it serves; KVLink.connect({self.url!r}, timeout=…) can")
        return self._end


@atexit.register
def _close_all() -> None:
    """While there are threads: at the interpreter's very end nothing may wait for one."""
    for link in list(_links):
        if not link._closed and link._pid_owns():
            link.close()  # without a word: its owner may be about to, at exit as well


def _check_how(readers: int, ttl: float) -> None:
    if readers < 1 or not ttl > 0:
        raise SchemaError(f"readers {readers}, ttl {ttl}: at least one reader, more than 0 s")


def _check_id(request_id: str) -> str:
    """Refused here, because a peer would take it for garbage and end the connection."""
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= 1024:
        raise SchemaError("request_id: a string of 1 to 1024 characters")
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"request_id: no text: {error}") from None
    return request_id
