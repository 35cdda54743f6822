"""A writer and a reader of an append stream, as `AppendStream` and `ChunkStream` behave."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink import PeerLostError, TransferFailed
from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
from omni_kvlink.connectors.protocol.get_table import ChunkOf, GetRequest, StreamEnded
from omni_kvlink.connectors.protocol.transfer import Transfer
from support.simulation.parties import LAYERS, OpenGet, inline_payload

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.get_table import GetState
    from omni_kvlink.connectors.protocol.messages import Offer, Outcome
    from support.simulation.parties import Connection, Producer, SimConsumer

WINDOW = 3
PATIENCE = 4.0
"""Seconds after which a writer gives up; a reader waits longer for a chunk."""


class GrowingWriter:
    """Appends up to six chunks; now and then it gives one up, or fails the stream."""

    def __init__(self, producer: Producer, key: str, readers: int, ttl: float):
        self._producer, self._key, self._ttl = producer, key, ttl
        self._give_up = producer.clock.now + PATIENCE
        self._chunks = producer.clock.chance.randrange(7)
        head = producer.reserve(key)
        if head is None:
            return
        self._head, self._window = head, ChunkWindow[Transfer](readers, WINDOW)
        self._appended: list[Transfer] = []
        draft, location = producer.begin_growing(head), producer.location(head)
        producer.transfers.layers.begin(head, location, draft, readers, window=self._window)
        producer.clock.soon(self._append, 0.1)

    def _append(self) -> None:
        producer, window = self._producer, self._window
        clock, table = producer.clock, producer.transfers
        if not producer.alive:
            return
        if self._head.state.is_final or clock.now > self._give_up or clock.chance.random() < 0.02:
            table.abort(self._head, "its writer fails", clock.now)
        elif window.is_full:
            clock.soon(self._append, 0.1)
        elif window.stop == self._chunks:
            self._commit()
        elif clock.chance.random() < 0.3 and self._append_inline():
            clock.soon(self._append, 0.2)
        else:
            chunk = Transfer(self._head.key, stream=self._head)
            table.reserve([chunk])
            producer.allocate(chunk)
            clock.soon(partial(self._write, chunk))

    def _commit(self) -> None:
        table, head = self._producer.transfers, self._head
        self._producer.counts[head.epoch] = self._chunks
        self._producer.end_growing(head, self._chunks)
        expires = self._producer.clock.now + self._ttl
        table.commit([(head, self._producer.location(head))], 0, expires)

    def _append_inline(self) -> bool:
        """Append a chunk that travels in its offers, unless the quota has no room."""
        producer, number = self._producer, self._window.stop
        payload = producer.chunk_payload(self._head, number)
        chunk = producer.publish_packed(self._head.key, payload, 1, float("inf"), self._head)
        if chunk is not None:
            self._add(chunk, number)
        return chunk is not None

    def _add(self, chunk: Transfer, number: int) -> None:
        """Count an appended chunk; no more of them are kept than the window says."""
        self._producer.numbers[chunk.epoch] = number
        self._appended.append(chunk)
        kept = [one for one in self._appended if not one.is_done]
        assert len(kept) <= WINDOW, f"{len(kept)} chunks are kept"

    def _write(self, chunk: Transfer) -> None:
        producer, number = self._producer, self._window.stop
        if not producer.alive:
            return
        producer.write_chunk(chunk, self._head, number)
        if producer.clock.chance.random() < 0.1:
            producer.transfers.abort(chunk)
        else:
            try:
                producer.transfers.commit([(chunk, producer.location(chunk))], 1, float("inf"))
                self._add(chunk, number)
            except TransferFailed:
                producer.transfers.abort(chunk)
        producer.clock.soon(self._append, 0.2)


class GrowingReader(OpenGet):
    """Reads a stream chunk by chunk, and checks the order, the bytes and the count."""

    def __init__(self, reader: SimConsumer, key: str, timeout: float):
        self._reader, self._clock, self._key = reader, reader.clock, key
        connection = reader.connection
        if connection is None or connection.is_closed:
            return
        self._connection: Connection = connection
        self._is_over, self._epoch, self._number = False, 0, 0
        try:
            request = GetRequest(key, streamed=True, chunk=ChunkOf(0, 0))
            [head] = connection.get_table.request([request])
        except PeerLostError:
            return
        self._head = head
        reader.open += 1
        head.answer.add_done_callback(lambda _: self._opened())
        self._clock.after(timeout, self._expire)

    def _expire(self) -> None:
        if not self._is_over and self._connection.get_table.cancel(self._head):
            self._finish("timed out")

    def _opened(self) -> None:
        if self._head.answer.error is not None:
            self._finish("failed")
            return
        self._head.settle()
        self._connection.holds += 1
        self._clock.soon(self._request)

    def _request(self) -> None:
        if self._is_over:
            return
        chunk, table = ChunkOf(self._head.get_id, self._number), self._connection.get_table
        try:
            [get] = table.request([GetRequest(self._key, chunk=chunk)])
        except PeerLostError:
            self._leave("stream failed")
            return
        get.answer.add_done_callback(lambda _: self._clock.soon(partial(self._arrived, get)))
        self._clock.after(PATIENCE + 2.0, partial(self._expire_chunk, get))

    def _expire_chunk(self, get: GetState) -> None:
        if self._connection.get_table.cancel(get):
            self._leave("chunk timed out")

    def _arrived(self, get: GetState) -> None:
        error = get.answer.error
        if isinstance(error, StreamEnded):
            count = self._connection.producer.counts[self._head.answer.result().epoch]
            assert self._number == count, f"ended after {self._number} of {count} chunks"
            self._leave("grown")
            return
        if error is not None:
            self._leave("stream failed")
            return
        get.settle()
        if not self._connection.holds:
            self._leave("died")
            return
        self._connection.holds += 1
        offer, chance = get.answer.result(), self._clock.chance
        numbers = self._connection.producer.numbers
        assert numbers[offer.epoch] == self._number, f"not chunk {self._number}: {offer}"
        assert offer.epoch > self._epoch, "the chunks are not in their order"
        self._check(offer)
        outcome: Outcome = "unread" if chance.random() < 0.1 else "read"
        if outcome == "read":
            self._number, self._epoch = self._number + 1, offer.epoch
        self._clock.soon(partial(self._release, get, offer, outcome), 0.5)
        if chance.random() < 0.08:
            self._leave("left")
        else:
            self._clock.soon(self._request)

    def _check(self, offer: Offer) -> None:
        if offer.inline:
            assert bytes(offer.inline) == inline_payload(self._key, offer.epoch)
            return
        block = self._connection.producer.memory.blocks[offer.location.arena]
        found = [block.get(layer) for layer in range(LAYERS)]
        expected = [(self._key, offer.epoch)] * LAYERS
        assert found == expected, f"{self._reader.name} sees {found} in a chunk"

    def _release(self, get: GetState, offer: Offer, outcome: Outcome) -> None:
        if self._connection.holds:
            self._check(offer)
            self._connection.holds -= 1
            is_bad = self._clock.chance.random() < 0.03
            reported: Outcome = "rejected" if is_bad else outcome
            self._connection.get_table.release(get.get_id, offer.epoch, reported)

    def _leave(self, outcome: str) -> None:
        """Release the head, at the end or amid the stream; its chunks are released on their own."""
        if self._is_over:
            return
        if self._connection.holds:
            self._connection.holds -= 1
            reported: Outcome = "unread" if self._clock.chance.random() < 0.2 else "read"
            epoch = self._head.answer.result().epoch
            self._connection.get_table.release(self._head.get_id, epoch, reported)
        self._finish(outcome)
