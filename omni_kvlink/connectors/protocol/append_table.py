"""The chunks of a producer's append streams: their gets and their leases, without I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.messages import Ending, Failed, Get, Location, Offer, shorten
from omni_kvlink.connectors.protocol.transfer import Claim, Peer, Transfer, TransferState

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
    from omni_kvlink.connectors.protocol.messages import Message

MAX_CHUNK_GETS = 1 << 16
"""Gets that may wait for chunks of one stream."""


class AppendTable:
    """The gets that wait for chunks, and the chunks that readers have; see `TransferTable`.

    A chunk is a transfer with a parent, `Transfer.stream`, whose `window` keeps it. `send` takes a
    message for a peer, `add_lease` records that a get has a chunk, `end` ends one that every reader
    has released.
    """

    def __init__(
        self,
        send: Callable[[Peer, Message], None],
        add_lease: Callable[[Transfer, Claim], None],
        end: Callable[[Transfer, TransferState, str, Ending], None],
    ):
        self._send, self._add_lease, self._end = send, add_lease, end
        self._gets: dict[Peer, dict[int, ChunkWindow[Transfer]]] = {}

    @property
    def waiting(self) -> int:
        """The number of gets that wait for chunks."""
        return sum(map(len, self._gets.values()))

    def append(self, stream: Transfer, chunk: Transfer, location: Location) -> None:
        """Add the next chunk to its stream, and offer it to the readers that wait for it."""
        window = stream.window
        assert window is not None
        number = window.stop
        chunk.location, chunk.is_committed, chunk.state = location, True, TransferState.LEASED
        window.chunks.append(chunk)  # before this, `TransferTable.abort` ends it
        chunk.has_writer = False
        for claim, reader in window.take_waiting(number):
            self._forget(claim)
            self._lease(window, chunk, claim, reader, number)
        self.release_read(stream)

    def on_get(
        self,
        stream: Transfer | None,
        peer: Peer,
        get: Get,
        tombstone: tuple[float, str, Ending] | None,
        *,
        is_taken: bool,
    ) -> None:
        """A reader requests a chunk, before or after it is written.

        The `tombstone` is of a stream that has ended. The get `is_taken` if it has a payload.
        """
        window = None if stream is None else stream.window
        claim, reader = (peer, get.get_id), (peer, get.stream)
        refusal, chunk = "", None
        ending: Ending = "failed"
        if stream is None or window is None or reader not in window.readers:
            _, refusal, ending = tombstone or (0.0, "the stream has ended", ending)
        elif is_taken or get.get_id in self._gets.get(peer, ()):
            refusal = f"get {get.get_id} waits already, or has a chunk"
        elif len(window.waiting) >= MAX_CHUNK_GETS:
            refusal = f"more than {MAX_CHUNK_GETS} readers wait already"
        elif not (refusal := window.refusal(reader, get.chunk)):
            chunk = window.find(get.chunk)
            if chunk is None and stream.is_committed:
                refusal, ending = "the stream has ended", "complete"
        if refusal or window is None:
            self._send(peer, Failed(get.get_id, refusal, ending))
        elif chunk is not None:
            self._lease(window, chunk, claim, reader, get.chunk)
        else:
            window.waiting[claim] = reader, get.chunk
            self._gets.setdefault(peer, {})[get.get_id] = window

    def cancel(self, peer: Peer, get_id: int) -> bool:
        """Cancel a get that waits for a chunk; False if there is none."""
        window = self._gets.get(peer, {}).get(get_id)
        if window is None:
            return False
        window.waiting.pop((peer, get_id), None)
        self._forget((peer, get_id))
        return True

    def cancel_gets(self, peer: Peer) -> None:
        """Cancel the gets of a peer that wait for chunks."""
        for get_id, window in self._gets.pop(peer, {}).items():
            window.waiting.pop((peer, get_id), None)

    def end_lease(self, chunk: Transfer, claim: Claim, *, is_read: bool) -> None:
        """A reader has released a chunk; one that was not read may be requested again."""
        stream = chunk.stream
        assert stream is not None
        assert stream.window is not None
        stream.window.end_reading(claim, is_read=is_read)
        if not chunk.state.is_final:
            self.release_read(stream)

    def remove_reader(self, stream: Transfer, claim: Claim, *, is_lost: bool) -> None:
        """A reader of a stream is gone; if it is lost, another can take its place."""
        assert stream.window is not None
        for waiting in stream.window.remove_reader(claim, is_lost=is_lost):
            self._forget(waiting)
        self.release_read(stream)

    def release_read(self, stream: Transfer) -> None:
        """Release the chunks that every reader has released."""
        assert stream.window is not None
        for chunk in stream.window.take_released():
            self._end(chunk, TransferState.RELEASED, "", "closed")

    def fail_gets(self, window: ChunkWindow[Transfer], reason: str, ending: Ending) -> None:
        """No more chunks will come: fail the gets that wait for one."""
        for peer, get_id in list(window.waiting):
            del window.waiting[peer, get_id]
            self._forget((peer, get_id))
            self._send(peer, Failed(get_id, shorten(reason), ending))

    def _lease(
        self,
        window: ChunkWindow[Transfer],
        chunk: Transfer,
        claim: Claim,
        reader: Claim,
        number: int,
    ) -> None:
        assert chunk.location is not None
        window.begin_reading(claim, reader, number)
        self._add_lease(chunk, claim)
        peer, get_id = claim
        inline = memoryview(chunk.inline)
        self._send(peer, Offer(get_id, chunk.epoch, chunk.location, inline=inline))

    def _forget(self, claim: Claim) -> None:
        peer, get_id = claim
        gets = self._gets[peer]
        del gets[get_id]
        if not gets:
            del self._gets[peer]
