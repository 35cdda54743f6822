"""Producers and consumers that share no memory: real payloads, fetched by the real session."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from omni_kvlink import KVCacheTransferData, KVLinkError, PeerLostError, TransferFailed
from omni_kvlink.connectors.control.receive_pool import SessionResources
from omni_kvlink.connectors.control.remote_get import RemoteGet
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.direct_source import DirectSource
from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
from omni_kvlink.connectors.protocol.get_table import GetRequest
from omni_kvlink.connectors.protocol.messages import (
    NOTHING,
    Abort,
    Chunk,
    FetchRange,
    Location,
    Message,
    Offer,
    OpenLane,
)
from omni_kvlink.connectors.protocol.path import LinkPath
from omni_kvlink.memory.block import OUTSIDE
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.memory.region import CallAtEnd, Region
from omni_kvlink.payload.layout_cache import LayoutCache
from omni_kvlink.payload.manifest import Manifest
from support.simulation.growing_payloads import chunk_payload, end_payload, head_plan
from support.simulation.kept import Question, outcome_of
from support.simulation.lanes import SimLanes
from support.simulation.parties import LAYERS, OpenGet, Producer, SimConsumer
from support.simulation.world import Clock, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.control.kept_bytes import KeptBytes
    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.connectors.protocol.transfer import Transfer
    from omni_kvlink.system.waits import Answer

ROW = 600
BLOCK = 1 << 14
ROUND_TRIP = 0.4
"""Seconds that a message and its answer take at most on two `Wire`s."""


def plan_of(key: str) -> Manifest:
    about = {"kv_lens": [1], "ropes": [1], "num_layers": LAYERS, "layout": "ND"}
    blank = KVCacheTransferData.blank(key, row=(ROW,), dtype=torch.uint8, metadata=about)
    return blank.plan(digests=False)


PLANS = {key: plan_of(key) for key in "abcde"}


def tensor_of(key: str, epoch: int, layer: int) -> bytes:
    """The bytes of this layer of this payload; those of every other layer differ."""
    return f"{key}/{epoch}/{layer};".encode().ljust(ROW, b"%d" % (epoch % 10))


class FarProducer(Producer):
    """One run of a producer, which sends the ranges that are fetched."""

    inline_nbytes = max(plan.nbytes for plan in PLANS.values())

    def __init__(self, clock: Clock):
        self.bytes: dict[int, bytearray] = {}
        self._nbytes: dict[int, int] = {}  # of the heads and chunks of append streams, by epoch
        super().__init__(clock)

    def stream(self, key: str, readers: int | None, ttl: float) -> None:
        transfer = self.reserve(key)
        if transfer is None:
            return
        header = PLANS[key].encode()
        self._write_draft(transfer, header)
        self.transfers.layers.begin(transfer, self.location(transfer), len(header), readers)
        stop = self.clock.chance.randrange(LAYERS) if self.clock.chance.random() < 0.2 else -1
        self.clock.soon(partial(self._write_layer, transfer, 0, stop, ttl))

    def direct(self, key: str, readers: int | None, ttl: float) -> None:
        """Send from the caller's tensors, which are overwritten as soon as they may be modified."""
        transfer = self.reserve(key)
        if transfer is None:
            return
        plan = PLANS[key]
        header, owned = plan.encode(), Tensors(key, transfer.epoch)
        head = owned.head(header)
        tensors = [
            (plan.header_nbytes + spec.start, owned.tensor(n))
            for n, spec in enumerate(plan.tensors)
        ]
        direct = DirectSource(head, len(header), tensors, plan.nbytes)
        self.transfers.layers.begin(transfer, self.location(transfer), len(header), readers, direct)
        until = self.clock.now + ttl
        self.clock.soon(partial(self._announce, transfer, 0, owned, until))

    def _announce(self, transfer: Transfer, layer: int, owned: Tensors, until: float) -> None:
        """Announce layer by layer; then wait until all were sent, or the deadline."""
        if not self.alive:
            return
        try:
            if layer < LAYERS:
                self.transfers.layers.announce(transfer, layer, (b"",))
                layer += 1
            elif transfer.is_sent:
                self.transfers.commit(
                    [(transfer, self.location(transfer))], 0, self.clock.now + 1.0
                )
                owned.overwrite()
                return
            elif self.clock.now > until:
                raise TransferFailed("too late", key=transfer.key, reason="")
        except TransferFailed:
            self.transfers.abort(transfer)
            owned.overwrite()
            return
        self.clock.soon(partial(self._announce, transfer, layer, owned, until))

    def _send_from_tensors(
        self, peer: FarConnection, transfer: Transfer, fetch: FetchRange, piece: Region
    ) -> None:
        """Send a range of the caller's tensors; runs later than the request."""
        if peer in self.connections:
            peer.send_range(fetch, bytes(piece.view()))
        transfer.on_sent((peer, fetch.get_id), fetch.start, fetch.stop)

    def serve(self, peer: FarConnection, fetch: FetchRange) -> None:
        transfer = self.transfers.find_leased(peer, fetch.get_id, fetch.epoch)
        if transfer is not None and self.alive and peer in self.connections:
            if transfer.direct is not None:
                found = transfer.direct.find(fetch.start, fetch.stop)
                peer.send_next(partial(self._send_from_tensors, peer, transfer, fetch, found), 0.05)
            else:
                piece = self._piece(transfer, fetch.start, fetch.stop)
                peer.send_next(partial(peer.send_range, fetch, piece), 0.0)

    def begin_growing(self, head: Transfer) -> int:
        plan = head_plan(head.key)
        self._nbytes[head.epoch] = plan.nbytes
        return self._write_draft(head, plan.encode())

    def write_chunk(self, chunk: Transfer, head: Transfer, number: int) -> None:
        content = self.chunk_payload(head, number)
        self._nbytes[chunk.epoch] = len(content)
        self._memory(chunk)[: len(content)] = content

    def chunk_payload(self, head: Transfer, number: int) -> bytes:
        return chunk_payload(head.key, head.epoch, number)

    def end_growing(self, head: Transfer, count: int) -> None:
        content = end_payload(head.key, head.epoch, count)
        self._memory(head)[: len(content)] = content

    def _send(self, peer: Any, message: Message) -> None:
        """Send beside an offer what is needed first, as over ZMQ, if its reader takes it."""
        if not isinstance(message, Offer):
            super()._send(peer, message)
            return
        transfer = self.transfers.find_leased(peer, message.get_id, message.epoch)
        assert transfer is not None
        assert message.inline == transfer.inline
        alone = msgspec.structs.replace(message, inline=NOTHING)
        beside = [self._piece(transfer, *message.first)] if peer.is_eager else []
        self.clock.record(f"  to {peer.name}:", alone)
        peer.to_reader.send(alone, *beside)

    def _piece(self, transfer: Transfer, start: int, stop: int) -> bytes:
        if transfer.direct is not None:
            return transfer.direct.find(start, stop).read()
        if transfer.inline:
            return transfer.inline[start:stop]
        piece = bytes(self._memory(transfer)[start:stop])
        assert len(piece) == stop - start, "more was requested than there is"
        return piece

    def _write_draft(self, transfer: Transfer, header: bytes) -> int:
        nbytes = self.location(transfer).nbytes
        self._memory(transfer)[nbytes : nbytes + len(header)] = header
        return len(header)

    def allocate(self, transfer: Transfer) -> None:
        super().allocate(transfer)
        assert transfer.block is not None
        self.bytes[transfer.block[1]] = bytearray(b"\xee" * BLOCK)

    def _write_tensor(self, transfer: Transfer, layer: int) -> None:
        plan = PLANS[transfer.key]
        start = plan.header_nbytes + plan.tensors[layer].start
        content = tensor_of(transfer.key, transfer.epoch, layer)
        self._memory(transfer)[start : start + ROW] = content

    def _inline_payload(self, key: str, epoch: int) -> bytes:
        plan, payload = PLANS[key], bytearray(self.inline_nbytes)
        header = plan.encode()
        payload[: len(header)] = header
        for layer, spec in enumerate(plan.tensors):
            start = plan.header_nbytes + spec.start
            payload[start : start + ROW] = tensor_of(key, epoch, layer)
        return bytes(payload)

    def _write_header(self, transfer: Transfer) -> None:
        header = PLANS[transfer.key].encode()
        self._memory(transfer)[: len(header)] = header

    def location(self, transfer: Transfer) -> Location:
        if transfer.inline:
            return super().location(transfer)
        assert transfer.block is not None
        nbytes = self._nbytes.get(transfer.epoch, PLANS[transfer.key].nbytes)
        return Location(transfer.block[1], 0, nbytes)

    def _free(self, transfer: Transfer) -> None:
        if transfer.block is not None and transfer.block[0] != OUTSIDE:
            self.bytes[transfer.block[1]][:] = b"\xdd" * BLOCK
        super()._free(transfer)

    def _memory(self, transfer: Transfer) -> bytearray:
        assert transfer.block is not None
        return self.bytes[transfer.block[1]]


class Tensors:
    """The tensors of a direct put, which are modified after it."""

    def __init__(self, key: str, epoch: int):
        rows = [np.frombuffer(tensor_of(key, epoch, layer), np.uint8) for layer in range(LAYERS)]
        self._rows = np.stack(rows)

    def head(self, header: bytes) -> Region:
        """Memory of a header and of its draft."""
        memory = np.frombuffer(bytearray(2 * header), np.uint8)
        return Region(memory.ctypes.data, memory.nbytes, memory)

    def tensor(self, layer: int) -> Region:
        return Region(self._rows[layer].ctypes.data, ROW, self._rows)

    def overwrite(self) -> None:
        self._rows[:] = 0xBB


class SimLoop:
    """An event loop that runs on the virtual clock."""

    is_own_thread = True

    def __init__(self, clock: Clock):
        self._clock = clock

    def call(self, do: Callable[[], None]) -> None:
        self._clock.after(0.0, do)


class SimPool:
    """A consumer's memory: a freed block is overwritten and is the next to be allocated.

    A block that a lane may still write to is freed, or taken up again, after that. It is a list of
    its number, another one for each allocation, so that `is` tells them apart.
    """

    def __init__(self, loop: SimLoop) -> None:
        self._loop, self._mapping = loop, Mapping.anonymous(256 * BLOCK)
        self._free = list(range(256))
        self.blocks = 0
        self.kept: weakref.WeakValueDictionary[str, KeptBytes] = weakref.WeakValueDictionary()
        self._borrowed = Counter[int]()
        self._ended: set[int] = set()
        self._resuming: dict[Any, KeptBytes] = {}

    def allocate(self, nbytes: int, waiter: Any, kept: KeptBytes | None = None) -> None:
        assert nbytes <= BLOCK
        if kept is not None and kept.blocks:
            self._resuming[waiter] = kept
            self._resume()
        else:
            self.blocks += 1
            waiter.on_allocated([self._free.pop()])

    def _resume(self) -> None:
        for waiter, kept in list(self._resuming.items()):
            if not kept.blocks:
                del self._resuming[waiter]
                self.allocate(BLOCK, waiter)
            elif not self._borrowed[self._number(kept.blocks[0])]:
                del self._resuming[waiter]
                waiter.on_allocated(kept.take())

    def cancel(self, waiter: object) -> None:
        self._resuming.pop(waiter, None)

    def region(self, block: Any) -> Region:
        return self._mapping.region.slice(self._number(block) * BLOCK, BLOCK)

    def borrow(self, block: Any, start: int, nbytes: int) -> Region:
        piece = self.region(block).slice(start, nbytes)
        self._borrowed[self._number(block)] += 1
        on_returned = partial(self._loop.call, partial(self._return, self._number(block)))
        CallAtEnd.of(piece.span, on_returned)
        return piece

    def _return(self, number: int) -> None:
        self._borrowed[number] -= 1
        if number in self._ended and not self._borrowed[number]:
            self._ended.discard(number)
            self._recycle(number)
        self._resume()

    def post_free(self, blocks: list[Any]) -> None:
        self._loop.call(partial(self._free_all, blocks))

    def _free_all(self, blocks: list[Any]) -> None:
        while blocks:
            self.free(blocks.pop())

    def free(self, block: Any) -> None:
        number = self._number(block)
        assert number not in self._free, "freed twice"
        assert number not in self._ended, "freed twice"
        self.blocks -= 1
        if self._borrowed[number]:
            self._ended.add(number)
        else:
            self._recycle(number)

    def _recycle(self, number: int) -> None:
        self.region([number]).view()[:] = b"\xcc" * BLOCK
        self._free.append(number)

    def _number(self, block: Any) -> int:
        assert isinstance(block[0], int)
        return block[0]

    def free_share(self, owner: object) -> None:
        """No get receives in its own thread here."""


class FarSession(ControlSession):
    """The session that ZMQ and UCX have, over a wire of the simulation."""

    def __init__(self, connection: FarConnection, reader: FarConsumer):
        loop, pool, counters = reader.loop, reader.pool, reader.outcomes
        address = SimpleNamespace(url="sim://", path=lambda *, is_encrypted: LinkPath("simulated"))
        simulated: Any = SessionResources
        super().__init__(simulated(address, None, None, loop, pool, LayoutCache(), counters))
        self._connection = connection
        self._lanes = connection.lanes = SimLanes(connection, self, reader)
        # What comes beside an offer must be no longer than a request may be.
        chunk = BLOCK if connection.is_eager else 500
        self.fetch_limits = FetchLimits(chunk, 3 * chunk)

    def _transmit_in_loop(self, message: Message) -> None:
        self._connection.to_producer.send(message)

    def _close_connection_in_loop(self) -> None:
        self._connection.break_off()
        assert self._lanes is not None
        self._lanes.close()


class FarConnection:
    """A consumer's connection to one run of a producer."""

    def __init__(self, reader: FarConsumer, producer: FarProducer, *, wild: bool):
        self.clock, self.name, self.producer = reader.clock, reader.name, producer
        self.to_producer = Wire(self.clock, self._on_producer_message, wild=wild)
        self.to_reader = Wire(self.clock, self._on_message, wild=wild)
        self.bytes_to_reader = Wire(self.clock, self._on_message, wild=wild)  # as UCX beside ZMQ
        self.is_eager, self.is_wild = self.clock.chance.random() < 0.4, wild
        self.lanes: SimLanes
        self._sends_at = 0.0
        self.session = FarSession(self, reader)
        self.session.incarnation = str(id(producer))
        self.is_closed = False
        self.lanes.begin("host", ("lanes",))
        producer.connections.add(self)

    def send_next(self, send: Callable[[], None], most: float) -> None:
        """Send behind all earlier ranges: a producer keeps their order."""
        now = self.clock.now
        self._sends_at = max(self._sends_at, now + self.clock.chance.uniform(0, most))
        self.clock.after(self._sends_at - now, send)

    def send_range(self, fetch: FetchRange, piece: bytes) -> None:
        """Send a range to the reader, by the lane that it asks for."""
        if fetch.lane:
            self.lanes.send(fetch, piece)
        else:
            self.bytes_to_reader.send(Chunk(fetch.get_id, fetch.epoch, fetch.start), piece)

    def maybe_break_off(self, get_id: int) -> None:
        """Break the connection between two ranges, now and then; another payload may come then."""
        inbound = self.session.find_inbound_in_loop(get_id)
        if inbound is None or self.clock.chance.random() > 0.01:
            return
        self.break_off()
        if self.clock.chance.random() < 0.5:
            self.producer.fail(inbound.key)
            self.producer.put(inbound.key, 1, 2.0)

    def break_off(self) -> None:
        """Break the connection; each side notices it after a delay of its own."""
        if self.is_closed:
            return
        self.is_closed = True
        self.to_producer.cut()
        self.to_reader.cut()
        self.bytes_to_reader.cut()
        self.clock.soon(partial(self.session.disconnect_in_loop, PeerLostError("gone")), 0.3)
        self.clock.soon(self._on_peer_lost, 0.3)

    def _on_peer_lost(self) -> None:
        if self in self.producer.connections:
            self.producer.connections.discard(self)
            self.producer.transfers.on_peer_lost(self)

    def _on_producer_message(self, message: Message) -> None:
        if isinstance(message, FetchRange):
            self.producer.serve(self, message)
        elif isinstance(message, OpenLane):
            self.to_reader.send(self.lanes.ticket(message))
        else:
            self.producer.handle(self, message)

    def _on_message(self, message: Message, *beside: bytes) -> None:
        if self.session.is_closed:
            return
        self.clock.record(f"  {self.name} receives:", message)
        try:
            if isinstance(message, Chunk):
                self.session.on_chunk_in_loop(message, memoryview(beside[0]))
                self.maybe_break_off(message.get_id)
            else:
                self.session.on_message_in_loop(message, *beside)
        except KVLinkError as error:
            if not self.is_wild:
                raise  # nothing was repeated or overtaken
            self.session.disconnect_in_loop(error)


class FarConsumer(SimConsumer):
    """A consumer process without shared memory."""

    def __init__(self, clock: Clock, name: str, *, wild: bool):
        super().__init__(clock, name, wild=wild)
        self.far: FarConnection | None = None
        self.loop, self.processes, self.lane_counters = SimLoop(clock), 0, Counter[str]()
        self.pool = SimPool(self.loop)

    def connect(self, producer: Producer) -> None:
        assert isinstance(producer, FarProducer)
        if producer.alive and (self.far is None or self.far.session.is_closed):
            self.far = FarConnection(self, producer, wild=self.is_wild)

    def die(self) -> None:
        """End the process and its connection."""
        self.processes += 1
        self.cut()

    def cut(self) -> None:
        """Cut the connection and its lanes; the process repeats its gets."""
        if self.far is not None:
            self.far.break_off()

    def break_off(self) -> None:
        self.die()

    @property
    def taken(self) -> int:
        return self.pool.blocks

    def abort(self, key: str) -> None:
        if self.far is not None and not self.far.session.is_closed:
            self.far.session.send(Abort(key, "no longer wanted"))
            self.far.session.fail(key, TransferFailed("aborted here", key=key, reason=""))

    def contains(self, key: str) -> None:
        far = self.far
        if far is not None and not far.session.is_closed:
            Question(self, far.producer, far, far.session.get_table, key)

    def get(self, key: str, timeout: float, *, streamed: bool, waits: bool = True) -> None:
        far = self.far
        if far is None or far.session.is_closed:
            return
        self.open += 1
        request = GetRequest(key, streamed, waits=waits)
        [pending] = far.session.get_table.request([request])
        FarGet(self, request, pending, timeout)


class FarGet(OpenGet):
    """One get, and the checks of what it receives, layer by layer if it streams."""

    def __init__(
        self, reader: FarConsumer, request: GetRequest, pending: PendingGet, timeout: float
    ):
        self._far_reader = self._reader = reader
        self._clock, self._key = reader.clock, request.key
        self._request, self._process = request, reader.processes
        self._delivery: Delivery | None = None
        self._is_over = False
        assert reader.far is not None
        self._producer = reader.far.producer
        self._wait(pending)
        self._clock.after(timeout, self._expire)

    def _wait(self, pending: PendingGet) -> None:
        assert isinstance(pending, RemoteGet)
        assert self._far_reader.far is not None
        self._pending, self._connection = pending, self._far_reader.far
        self._requested = self._clock.now
        pending.future.add_done_callback(lambda _: self._answered())

    def _repeat(self) -> None:
        """Request the payload again, over a new connection to the same producer."""
        reader = self._far_reader
        if self._is_over:
            return
        if self._process == reader.processes:
            reader.connect(self._producer)
        far = reader.far
        assert far is not None
        is_same = far.producer is self._producer and self._process == reader.processes
        if not is_same or far.session.is_closed:
            self._pending.drop_kept()
            self._finish("failed")
            return
        [pending] = far.session.get_table.request([self._request])
        assert isinstance(pending, RemoteGet)
        reader.outcomes["kept"] += pending.kept is not None
        self._wait(pending)

    def _expire(self) -> None:
        """Cancel the get at its deadline, unless it was answered."""
        if self._is_over:
            return
        if self._pending.future.done() and self._delivery is None:  # it is to be repeated
            self._pending.drop_kept()
            self._finish("timed out")
        elif not self._pending.future.done():
            phase = self._pending.phase
            self._reader.outcomes["was released"] += "and released" in phase
            assert not self._must_be_answered(), f"{self._key!r}: a get that does not wait"
            self._pending.cancel()
            self._finish("timed out")

    def _must_be_answered(self) -> bool:
        """Whether the producer has had the time to offer the payload, or to refuse it."""
        if self._request.waits or self._pending.offer is not None or self._connection.is_closed:
            return False
        return self._clock.now > self._requested + ROUND_TRIP

    def _answered(self) -> None:
        if self._is_over:
            return
        error = self._pending.future.exception()
        if isinstance(error, PeerLostError):
            self._clock.soon(self._repeat, 0.2)
            return
        if error is not None:
            self._pending.drop_kept()
            self._finish(outcome_of(error))
            return
        offer: Offer = self._pending.answer.result()
        self._delivery = self._pending.wait(timeout=0.0)
        self._reader.outcomes["inline"] += offer.epoch in self._producer.inline_epochs
        progress = self._delivery.progress
        if progress is None:
            self._check(offer, range(LAYERS))
            self._clock.soon(partial(self._release, offer, range(LAYERS), "read"), 0.5)
        else:
            self._clock.soon(partial(self._follow, offer, 0), 0.1)

    def _follow(self, offer: Offer, layer: int) -> None:
        """Check all layers that have arrived; repeat until the stream ends."""
        assert self._delivery is not None
        progress = self._delivery.progress
        assert progress is not None
        while layer < LAYERS and _has_succeeded(progress.when(range(layer, layer + 1))):
            layer += 1
        self._check(offer, range(layer))
        if progress.whole.is_set():
            # A layer whose announcement was overtaken by the commit fails.
            is_read = progress.whole.error is None and layer == LAYERS
            assert is_read or self._reader.is_wild or progress.whole.error is not None
            self._release(offer, range(layer), "read" if is_read else "stream failed")
        elif self._clock.chance.random() < 0.03:
            self._release(offer, range(layer), "stream failed")
        else:
            self._clock.soon(partial(self._follow, offer, layer), 0.2)

    def _check(self, offer: Offer, layers: range) -> None:
        """Check that the delivered bytes are the offered ones; they never change."""
        assert self._delivery is not None
        assert self._delivery.region is not None
        view, plan = self._delivery.region.view(), PLANS[self._key]
        for layer in layers:
            start = plan.header_nbytes + plan.tensors[layer].start
            found = bytes(view[start : start + ROW])
            expected = tensor_of(self._key, offer.epoch, layer)
            assert found == expected, (
                f"{self._reader.name}: {found[:16]!r}, offered {expected[:16]!r}"
            )
        if self._delivery.progress is None:
            assert Manifest.decode(view).request_id == self._key

    def _release(self, offer: Offer, layers: range, outcome: str) -> None:
        assert self._delivery is not None
        self._check(offer, layers)
        if self._clock.chance.random() < 0.05:
            self._delivery.reject("rejected by the scenario")
        else:
            self._delivery.release()
        self._delivery = None
        self._finish(outcome)


def _has_succeeded(answer: Answer[None]) -> bool:
    return answer.is_set() and answer.error is None
