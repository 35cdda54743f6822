"""Producers with a TransferTable and consumers with a GetTable, as the connectors use them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from omni_kvlink import DuplicateKeyError, PeerLostError, TransferFailed, WireError
from omni_kvlink.connectors.protocol.get_table import GetRequest, GetTable
from omni_kvlink.connectors.protocol.messages import (
    Abort,
    Cancel,
    Contained,
    Contains,
    Get,
    Location,
    Message,
    Offer,
    Outcome,
    Reject,
    Release,
)
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.protocol.transfer_table import TransferTable
from omni_kvlink.connectors.runtime.consumer import MappedGet
from omni_kvlink.memory.arena import ArenaPool
from omni_kvlink.memory.block import OUTSIDE, Block
from support.simulation.kept import Question, found_now, outcome_of
from support.simulation.world import Clock, Memory, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.memory.mapping import Mapping
    from omni_kvlink.system.waits import Answer

# Reaches into _epoch: bytes name the epoch that the table will give them; a link's bytes do not
# know it.

T = TypeVar("T")
LAYERS = 4
INLINE_SHARES = 3
"""So many payloads, each in its offers, fill a producer's quota."""


def inline_payload(key: str, epoch: int) -> bytes:
    """The bytes of a payload that travels in its offers to parties that share memory."""
    return f"{key}/{epoch};".encode().ljust(64, b"%d" % (epoch % 10))


def _no_arena(nbytes: int, is_wanted: object) -> Mapping:
    raise AssertionError("only shares of the quota are used here")


class SimPeer(Hashable, Protocol):
    """A consumer's connection to one run of a producer, as the producer uses it."""

    name: str
    to_reader: Wire

    def break_off(self) -> None:
        """Break the connection; both sides notice it after a while."""


class Producer:
    """One run of a producer."""

    inline_nbytes = len(inline_payload("a", 1))

    def __init__(self, clock: Clock):
        self.clock, self.memory = clock, Memory()
        self.quota = ArenaPool(_no_arena, INLINE_SHARES * self.inline_nbytes)
        self.transfers = TransferTable(lambda peer, message: self._send(peer, message), self._free)
        self.connections: set[SimPeer] = set()
        self.reserved: list[Transfer] = []
        self.numbers: dict[int, int] = {}  # of each chunk of an append stream, by its epoch
        self.counts: dict[int, int] = {}  # chunks of each stream that was committed
        # To each question of a peer what was true, once for each time that it came.
        self.answers: dict[tuple[SimPeer, int], list[tuple[bool, ...]]] = {}
        self.inline_epochs: set[int] = set()  # of the payloads that travel in their offers
        self.alive = True
        self._tick()

    def put(self, key: str, readers: int | None, ttl: float) -> None:
        """Write for a while, then commit."""
        transfer = self.reserve(key)
        if transfer is not None:
            write = partial(self._write, transfer, readers, ttl)
            self.clock.soon(write, 0.3)

    def put_inline(self, key: str, readers: int | None, ttl: float) -> None:
        """Put a payload that travels in its offers, with memory if the quota has no room."""
        if not self.alive:
            return
        payload = self._inline_payload(key, self.transfers._epoch + 1)
        try:
            if not self.publish_packed(key, payload, readers, self.clock.now + ttl):
                self.put(key, readers, ttl)
        except DuplicateKeyError:
            return

    def publish_packed(
        self,
        key: str,
        payload: bytes,
        readers: int | None,
        expires: float,
        stream: Transfer | None = None,
    ) -> Transfer | None:
        """Do what `PooledProducer` does with a packed payload; None if the quota has no room."""
        transfer = Transfer(key, inline=payload, stream=stream)
        if not self.quota.share(len(payload), transfer):
            return None
        try:
            location = Location(0, 0, len(payload))
            self.transfers.commit([(transfer, location)], readers, expires)
        except (DuplicateKeyError, TransferFailed):
            self.transfers.abort(transfer)
            raise
        self.inline_epochs.add(transfer.epoch)
        self.reserved.append(transfer)
        return transfer

    def put_many(self, keys: Sequence[str], readers: int | None, ttl: float) -> None:
        """Write several payloads for a while, then commit all of them, or none."""
        transfers = [Transfer(key) for key in keys]
        is_small = self.clock.chance.random() < 0.3
        if not self.alive or (is_small and self._put_all(keys, readers, ttl)):
            return
        try:
            self.transfers.reserve(transfers)
        except DuplicateKeyError:
            return
        for transfer in transfers:
            self.allocate(transfer)
        self.clock.soon(partial(self._write_all, transfers, readers, ttl), 0.3)

    def _put_all(self, keys: Sequence[str], readers: int | None, ttl: float) -> bool:
        """Put several that travel in their offers; False if the quota has no room for all."""
        put = [
            Transfer(key, inline=self._inline_payload(key, epoch))
            for epoch, key in enumerate(keys, self.transfers._epoch + 1)
        ]
        if not self.quota.share_all([len(transfer.inline) for transfer in put], put):
            return False
        try:
            packed = [(transfer, Location(0, 0, len(transfer.inline))) for transfer in put]
            self.transfers.commit(packed, readers, self.clock.now + ttl)
        except DuplicateKeyError:
            for transfer in put:
                self.transfers.abort(transfer)
            return True
        self.inline_epochs |= {transfer.epoch for transfer in put}
        self.reserved += put
        return True

    def _inline_payload(self, key: str, epoch: int) -> bytes:
        """A payload that travels in its offers."""
        return inline_payload(key, epoch)

    def stream(self, key: str, readers: int | None, ttl: float) -> None:
        """Write and announce layer by layer; fail amid the stream now and then."""
        transfer = self.reserve(key)
        if transfer is None:
            return
        self.transfers.layers.begin(transfer, self.location(transfer), 7, readers)
        stop = self.clock.chance.randrange(LAYERS) if self.clock.chance.random() < 0.2 else -1
        self.clock.soon(partial(self._write_layer, transfer, 0, stop, ttl))

    def direct(self, key: str, readers: int | None, ttl: float) -> None:
        """With shared memory there are no direct puts: stream instead."""
        self.stream(key, readers, ttl)

    def fail(self, key: str) -> None:
        if self.alive:
            self.transfers.fail(key, "the scenario fails it", "failed", self.clock.now)

    def die(self) -> None:
        """End the process: every connection breaks, and nothing more is written."""
        self.alive = False
        for connection in list(self.connections):
            connection.break_off()

    def handle(self, peer: SimPeer, message: Message) -> None:
        if not self.alive or peer not in self.connections:
            return
        self.clock.record(f"  from {peer.name}:", message)
        if isinstance(message, Get):
            self.transfers.on_get(peer, message, self.clock.now)
        elif isinstance(message, Cancel):
            self.transfers.on_cancel(peer, message.get_id)
        elif isinstance(message, Release):
            self.transfers.on_release(
                peer, message.get_id, message.epoch, message.outcome, "", self.clock.now
            )
        elif isinstance(message, Reject):
            self.transfers.on_reject(
                peer, message.get_id, message.epoch, message.reason, self.clock.now
            )
        elif isinstance(message, Contains):
            found = tuple([found_now(self, key) for key in message.keys])
            self.answers.setdefault((peer, message.query), []).append(found)
            answer = self.transfers.kept.contains(message.keys, self.clock.now)
            self._send(peer, Contained(message.query, answer))
        elif isinstance(message, Abort):
            self.transfers.fail(message.key, message.reason, "aborted", self.clock.now)

    def reserve(self, key: str) -> Transfer | None:
        if not self.alive:
            return None
        try:
            transfer = Transfer(key)
            self.transfers.reserve([transfer])
        except DuplicateKeyError:
            return None
        self.allocate(transfer)
        return transfer

    def allocate(self, transfer: Transfer) -> None:
        transfer.block = Block(0, self.memory.allocate(), LAYERS)
        self.clock.record(f"  block {transfer.block[1]} for {transfer.key!r}, {transfer.epoch}")
        self.reserved.append(transfer)

    def _write_all(self, transfers: Sequence[Transfer], readers: int | None, ttl: float) -> None:
        if not self.alive:
            return
        for transfer in transfers:
            self._fill(transfer)
        committed = [(transfer, self.location(transfer)) for transfer in transfers]
        try:
            self.transfers.commit(committed, readers, self.clock.now + ttl)
        except TransferFailed:
            for transfer in transfers:
                self.transfers.abort(transfer)

    def _write(self, transfer: Transfer, readers: int | None, ttl: float) -> None:
        if not self.alive:
            return
        for layer in range(LAYERS):
            self._write_tensor(transfer, layer)
        self._commit(transfer, readers, ttl)

    def _write_layer(self, transfer: Transfer, layer: int, stop: int, ttl: float) -> None:
        if not self.alive:
            return
        if layer == stop:
            self.transfers.fail(transfer.key, f"layer {layer}", "failed", self.clock.now)
            self.transfers.abort(transfer)
            return
        self._write_tensor(transfer, layer)
        try:
            self.transfers.layers.announce(transfer, layer, (b"",))
        except TransferFailed:
            self.transfers.abort(transfer)
            return
        if layer + 1 < LAYERS:
            self.clock.soon(partial(self._write_layer, transfer, layer + 1, stop, ttl))
        else:
            self._commit(transfer, 0, ttl)

    def _fill(self, transfer: Transfer) -> None:
        """Write the whole payload."""
        for layer in range(LAYERS):
            self._write_tensor(transfer, layer)
        self._write_header(transfer)

    def _write_header(self, transfer: Transfer) -> None:
        """With shared memory here, a payload has none."""

    def begin_growing(self, head: Transfer) -> int:
        """Write the draft of an append stream; return its bytes. None here is read."""
        return 7

    def write_chunk(self, chunk: Transfer, head: Transfer, number: int) -> None:
        """Write a chunk of an append stream."""
        self._fill(chunk)

    def chunk_payload(self, head: Transfer, number: int) -> bytes:
        """The next chunk of an append stream, if it travels in its offers."""
        return inline_payload(head.key, self.transfers._epoch + 1)

    def end_growing(self, head: Transfer, count: int) -> None:
        """Write the end of an append stream. None here is read."""

    def _commit(self, transfer: Transfer, readers: int | None, ttl: float) -> None:
        self._write_header(transfer)
        try:
            location = self.location(transfer)
            self.transfers.commit([(transfer, location)], readers, self.clock.now + ttl)
        except TransferFailed:
            self.transfers.abort(transfer)

    def _write_tensor(self, transfer: Transfer, layer: int) -> None:
        assert transfer.block is not None
        self.memory.blocks[transfer.block[1]][layer] = (transfer.key, transfer.epoch)

    def location(self, transfer: Transfer) -> Location:
        if transfer.inline:
            return Location(0, 0, len(transfer.inline))
        assert transfer.block is not None
        return Location(transfer.block[1], 0, LAYERS)

    def _free(self, transfer: Transfer) -> None:
        block = transfer.block
        if block is not None and block[0] == OUTSIDE:
            transfer.inline = b""
            self.quota.release(transfer)
        elif block is not None:
            transfer.block, number = None, block[1]
            self.clock.record(f"  block {number} of {transfer.key!r}, {transfer.epoch} is free")
            self.memory.free(number)

    def _send(self, peer: Any, message: Message) -> None:
        self.clock.record(f"  to {peer.name}:", message)
        peer.to_reader.send(message)

    def _tick(self) -> None:
        if self.alive:
            self.transfers.tick(self.clock.now)
            self.clock.after(0.05, self._tick)


class Connection:
    """A consumer's session with one run of a producer."""

    def __init__(self, clock: Clock, name: str, producer: Producer, *, wild: bool):
        self.clock, self.name, self.producer = clock, name, producer
        self.to_producer = Wire(clock, lambda message: producer.handle(self, message), wild=wild)
        sends = self.to_producer.send, self.to_producer.send, self.send_all
        self.get_table = GetTable(partial(MappedGet, self), *sends)
        self.to_reader = Wire(clock, self._handle, wild=wild)
        self.is_closed = self.is_ended = False
        self._is_wild = wild
        self.holds = 0
        producer.connections.add(self)

    def send_all(self, messages: Sequence[Message]) -> None:
        """Send several messages to the producer."""
        for message in messages:
            self.to_producer.send(message)

    def break_off(self) -> None:
        """Break the connection; both sides notice it later. The consumer's leases stay valid."""
        if self.is_closed:
            return
        self.is_closed = True
        self.to_producer.cut()
        self.to_reader.cut()
        self.clock.soon(self._end, 0.3)
        self.clock.soon(self._detach, 0.3)

    def receive_until(self, future: Future[Offer], deadline: float) -> None:
        """What arrives is handled by the wire alone."""

    def _end(self) -> None:
        self.is_ended = True
        self.get_table.close(PeerLostError("gone"))

    def _handle(self, message: Message) -> None:
        if self.is_ended:
            return
        try:
            self.get_table.on_message(message)
        except WireError:  # repeated, or out of order: the connection ends
            if not self._is_wild:
                raise
            self.break_off()

    def _detach(self) -> None:
        if self in self.producer.connections:
            self.producer.connections.discard(self)
            self.producer.transfers.on_disconnect(self)
            self._reap()

    def _reap(self) -> None:
        """Report the peer as lost when its process ended or it released everything."""
        if self.holds or not self.is_ended:
            self.clock.soon(self._reap, 0.3)
        else:
            self.producer.transfers.on_peer_lost(self)


class SimConsumer:
    """A consumer process; it reconnects after its session broke."""

    def __init__(self, clock: Clock, name: str, *, wild: bool):
        self.clock, self.name, self.is_wild = clock, name, wild
        self.connection: Connection | None = None
        self.outcomes: Counter[str] = Counter()
        self.open = 0
        self._numbers = itertools.count()

    def connect(self, producer: Producer) -> None:
        if producer.alive and (self.connection is None or self.connection.is_closed):
            self.connection = Connection(self.clock, self.name, producer, wild=self.is_wild)

    def die(self) -> None:
        if self.connection is not None:
            self.connection.holds, self.connection.is_ended = 0, True
            self.connection.break_off()
            self.connection = None

    def break_off(self) -> None:
        if self.connection is not None:
            self.connection.break_off()

    def cut(self) -> None:
        """Cut the connection; the process lives on."""
        self.break_off()

    @property
    def taken(self) -> int:
        """Blocks of the consumer's own memory that are in use."""
        return 0

    def abort(self, key: str) -> None:
        if self.connection is not None and not self.connection.is_closed:
            self.connection.to_producer.send(Abort(key, "no longer wanted"))
            self.connection.get_table.fail(key, TransferFailed("aborted here", key=key, reason=""))

    def contains(self, key: str) -> None:
        """Ask whether a get would have a payload."""
        connection = self.connection
        if connection is not None and not connection.is_closed:
            Question(self, connection.producer, connection, connection.get_table, key)

    def get(self, key: str, timeout: float, *, streamed: bool, waits: bool = True) -> None:
        connection = self.connection
        if connection is None or connection.is_closed:
            return
        try:
            request = GetRequest(key, streamed, waits=waits)
            [get] = connection.get_table.request([request])
        except PeerLostError:
            return
        self.open += 1
        waiting = WaitingGet(self, connection, get, waits=waits)
        get.answer.add_done_callback(lambda _: waiting.answered())
        self.clock.after(timeout, waiting.expire)


class OpenGet:
    """A get of a consumer, which ends once."""

    _reader: SimConsumer
    _is_over: bool

    def _finish(self, outcome: str) -> None:
        assert not self._is_over, "a get ended twice"
        self._is_over = True
        self._reader.open -= 1
        self._reader.outcomes[outcome] += 1


class WaitingGet(OpenGet):
    """One get, and the checks of what it receives."""

    def __init__(self, reader: SimConsumer, connection: Connection, get: MappedGet, *, waits: bool):
        self._reader, self._connection, self._get = reader, connection, get
        self._waits = waits
        self._key = get.key
        self._clock, self._is_over, self._turn = reader.clock, False, 0
        self._delivery: Delivery | None = None  # of a payload that came in its offer

    def expire(self) -> None:
        """Cancel the get at its deadline, unless it was answered."""
        if not self._is_over and self._connection.get_table.cancel(self._get):
            assert self._waits, f"{self._key!r} was awaited by a get that does not wait"
            self._reader.outcomes["was released"] += "and released" in self._get.phase
            self._finish("timed out")

    def answered(self) -> None:
        if self._get.answer.error is not None:
            self._finish(outcome_of(self._get.answer.error))
            return
        offer = self._get.answer.result()
        if offer.inline:
            self._delivery = self._get.wait(timeout=0.0)
        else:
            self._get.settle()
        self._connection.holds += 1
        is_inline = offer.epoch in self._connection.producer.inline_epochs
        assert bool(offer.inline) == is_inline
        self._reader.outcomes["inline"] += is_inline
        self._clock.record(self._reader.name, "has", self._key, offer)
        progress = self._get.progress
        assert bool(offer.draft) == (progress is not None)
        if progress is None:
            self._check(offer, range(LAYERS))
            self._clock.soon(partial(self._release, offer, range(LAYERS)), 0.5)
        else:
            self._clock.soon(partial(self._follow, offer, 0), 0.1)

    def _follow(self, offer: Offer, layer: int) -> None:
        """Take a stream's layers as they arrive, and check all earlier ones again."""
        progress = self._get.progress
        assert progress is not None
        answer = progress.when(range(layer, layer + 1)) if layer < LAYERS else progress.whole
        goes_on = partial(self._next, offer, answer, layer, self._turn)
        answer.add_done_callback(lambda _: goes_on())
        self._clock.after(2.0, goes_on)

    def _next(self, offer: Offer, answer: Answer[None], layer: int, turn: int) -> None:
        """Act on the first of: the layer, an error, the deadline."""
        if turn != self._turn:
            return
        self._turn += 1
        seen = range(min(layer + 1, LAYERS))
        if not answer.is_set():
            self._release(offer, range(layer), outcome="layer timed out")
            return
        if answer.error is not None:
            self._release(offer, range(layer), outcome="stream failed")
        elif layer == LAYERS or self._clock.chance.random() < 0.03:
            self._check(offer, seen)
            self._clock.soon(partial(self._release, offer, seen), 0.3)
        else:
            self._check(offer, seen)
            self._clock.soon(partial(self._follow, offer, layer + 1))

    def _check(self, offer: Offer, layers: range) -> None:
        """Check that the leased blocks hold what was offered; they never change."""
        if not self._connection.holds:
            return  # the consumer's process is dead, and sees nothing
        if self._delivery is not None:
            assert self._delivery.region is not None
            came, put = self._delivery.region.read(), inline_payload(self._key, offer.epoch)
            assert came == put, f"{self._reader.name} sees {came!r}, offered was {put!r}"
            return
        block = self._connection.producer.memory.blocks[offer.location.arena]
        found = [block.get(layer) for layer in layers]
        expected = [(self._key, offer.epoch)] * len(layers)
        assert found == expected, f"{self._reader.name} sees {found}, offered was {expected[:1]}"

    def _release(self, offer: Offer, layers: range, outcome: str = "read") -> None:
        if self._connection.holds and self._clock.chance.random() < 0.05:
            self._connection.get_table.reject(self._get.get_id, offer.epoch, "")
            self._clock.soon(partial(self._end_lease, offer, layers, outcome), 0.3)
        else:
            self._end_lease(offer, layers, outcome)

    def _end_lease(self, offer: Offer, layers: range, outcome: str) -> None:
        if self._connection.holds:  # the consumer's process is alive
            self._check(offer, layers)
            self._connection.holds -= 1
            reported: Outcome = "rejected" if self._clock.chance.random() < 0.05 else "read"
            if self._delivery is None:
                self._connection.get_table.release(self._get.get_id, offer.epoch, reported)
            else:
                self._release_inline(self._delivery, reported)
        elif self._delivery is not None:
            self._delivery._span.detach()  # a dead process releases nothing
        self._delivery = None
        self._finish(outcome)

    def _release_inline(self, delivery: Delivery, reported: Outcome) -> None:
        if reported == "rejected":
            delivery.reject("rejected by the scenario", at_once=True)
        elif self._clock.chance.random() < 0.1:
            delivery.release_unread()
        else:
            delivery.release()
