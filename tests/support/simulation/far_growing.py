"""A reader of append streams without shared memory: the real `ChunkStream` and session."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink import IntegrityError, KVLinkError, TransferTimeout
from omni_kvlink.connectors.control.remote_get import RemoteGet
from omni_kvlink.connectors.protocol.get_table import ChunkOf, GetRequest, StreamEnded
from omni_kvlink.copier import TorchCopier
from omni_kvlink.link.chunk_stream import ChunkStream
from omni_kvlink.link.consumer import ReceivedChunk
from omni_kvlink.payload.layout_cache import LayoutCache
from support.simulation.far import FarConsumer
from support.simulation.growing_parties import PATIENCE
from support.simulation.growing_payloads import rows_of
from support.simulation.parties import OpenGet

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Any

    from support.simulation.parties import SimConsumer

_copier = TorchCopier()
_BEGINS = re.compile(r"\(start=(\d+)\)")


class FarGrowingReader(OpenGet):
    """Reads a stream chunk by chunk, and checks the order, the bytes and the count.

    If a lost reader had the first chunks, it opens the stream again, and begins after them.
    """

    def __init__(self, reader: SimConsumer, key: str, timeout: float, start: int = 0):
        assert isinstance(reader, FarConsumer)
        self._reader, self._clock, self._key, self._start = reader, reader.clock, key, start
        if reader.far is None or reader.far.session.is_closed:
            return
        self._is_over, self._turn, self._producer = False, 0, reader.far.producer
        request = GetRequest(key, streamed=True, chunk=ChunkOf(0, start))
        [head] = reader.far.session.get_table.request([request])
        assert isinstance(head, RemoteGet)
        self._head = head
        reader.open += 1
        head.future.add_done_callback(lambda _: self._opened())
        self._clock.after(timeout, self._expire)

    def _expire(self) -> None:
        """Stop waiting for the stream at the deadline, unless it was opened."""
        if not self._head.future.done():
            self._head.cancel()
            self._finish("timed out")

    def _opened(self) -> None:
        if self._is_over:
            return
        if self._head.future.exception() is not None:
            self._finish("failed")
            return
        delivery = self._head.wait(timeout=0.0)
        self._epoch = self._head.answer.result().epoch
        layouts = LayoutCache()
        opener = partial(ReceivedChunk, copier=_copier, layouts=layouts, verify="auto")
        self._stream: ChunkStream[ReceivedChunk] = ChunkStream(
            self._head, delivery, opener, _copier, layouts, start=self._start, timeout=0.0
        )
        self._number = self._start
        self._clock.soon(self._request)

    def _request(self) -> None:
        """Release the chunk before, and wait for the next one."""
        if self._is_over:
            return
        try:
            following = self._stream.when_next()
        except KVLinkError as error:
            self._fail(error)
        else:
            self._wait(following)

    def _wait(self, future: Future[Any]) -> None:
        self._turn += 1
        turn = self._turn
        receive = partial(self._receive, turn, future)
        future.add_done_callback(lambda _: self._clock.soon(receive))
        if self._clock.chance.random() < 0.1:
            self._clock.soon(receive, 0.1)  # before it is there, maybe, and then again
        self._clock.after(PATIENCE + 2.0, lambda: self._expire_chunk(turn))

    def _expire_chunk(self, turn: int) -> None:
        if turn == self._turn and not self._is_over:
            self._stream.release_unread()
            self._finish("chunk timed out")

    def _receive(self, turn: int, future: Future[Any]) -> None:
        """Take the next chunk or the end, unless that was done; request it again if it is late."""
        if self._is_over or turn != self._turn:
            return
        whole = self._stream.when_whole()
        has_ended = future.done() and isinstance(future.exception(), StreamEnded)
        if has_ended and not whole.done():
            self._wait(whole)
            return
        if future is whole and not whole.done():
            return
        self._turn += 1
        try:
            chunk = self._stream.receive(timeout=0.0)
        except TransferTimeout:
            self._reader.outcomes["late"] += 1
            self._clock.soon(self._request)
            return
        except KVLinkError as error:
            self._fail(error)
            return
        if chunk is None:
            self._check_end()
        else:
            self._check(chunk)
            self._go_on(chunk)

    def _check(self, chunk: ReceivedChunk) -> None:
        assert chunk.number == self._number, f"chunk {chunk.number} came, not {self._number}"
        assert chunk.data.metadata == {"number": self._number}
        self._number += 1
        self._check_rows(chunk.data["rows"], chunk.number)

    def _check_rows(self, rows: torch.Tensor, number: int) -> None:
        """Check what was appended; it never changes."""
        expected = rows_of(self._key, self._epoch, number)
        assert torch.equal(rows, expected), f"{self._reader.name} sees other rows in chunk {number}"

    def _go_on(self, chunk: ReceivedChunk) -> None:
        chance = self._clock.chance.random()
        if chance < 0.05:
            self._stream.release()
            self._finish("left")
        elif chance < 0.12:
            self._stream.release_unread()
            self._finish("left")
            self._open_again(0)
        else:
            kept = 1.0 if chance < 0.2 else 0.3  # longer than the chunk itself, sometimes
            self._clock.soon(partial(self._check_rows, chunk.data["rows"], chunk.number), kept)
            self._clock.soon(self._request, 0.3)

    def _check_end(self) -> None:
        count = self._producer.counts[self._epoch]
        assert self._stream.count == count, f"ended after {self._stream.count} of {count} chunks"
        assert self._number == max(count, self._start), f"has {self._number} of {count} chunks"
        self._finish("grown")

    def _fail(self, error: KVLinkError) -> None:
        """Nothing but the end of the stream or of the connection may come between."""
        assert not isinstance(error, IntegrityError), error
        self._stream.release_unread()
        begins = _BEGINS.search(str(error))
        self._finish("begins later" if begins else "stream failed")
        if begins:
            self._open_again(int(begins.group(1)))

    def _open_again(self, start: int) -> None:
        self._clock.soon(partial(FarGrowingReader, self._reader, self._key, 1.0, start))
