"""`ChunkStreams`: several append streams, received in one thread."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from omni_kvlink.errors import ClosedError, TransferTimeout, format_seconds
from omni_kvlink.link.chunk_stream import C, ChunkStream
from omni_kvlink.link.read_block import ReadBlock
from omni_kvlink.system.waits import LazyEvent, check_timeout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from omni_kvlink.connectors.base import PendingGet


class ChunkStreams(ReadBlock, Generic[C]):
    """Append streams, received in one thread, in the order in which their chunks come.

    For an engine that serves many requests at once: waiting costs no thread, and if all streams are
    of one link over shared memory, the thread that waits reads its socket itself. `len` is the
    number of streams in here. The end of its `with` block leaves those that have not ended to other
    readers. For one thread at a time; a stream in here is received, and released, from here alone.

    Args:
        streams: the first ones; `add` takes more at any time.

    Attributes:
        last: the stream of which `receive` returned or raised last; None before.
    """

    last: ChunkStream[C] | None = None

    def __init__(self, streams: Iterable[ChunkStream[C]] = ()):
        self._pending: dict[ChunkStream[C], PendingGet] = {}  # the get of its next chunk
        self._ready = _ReadyStreams()
        self._connections: Counter[object] = Counter()
        self._longest = 0.0  # of the streams' timeouts
        self._held: ChunkStream[C] | None = None  # its chunk is the caller's until the next call
        for stream in streams:
            self.add(stream)

    def __len__(self) -> int:
        return len(self._pending)

    def __repr__(self) -> str:
        return f"<ChunkStreams of {len(self)} streams>"

    def __contains__(self, stream: object) -> bool:
        return stream in self._pending

    def __iter__(self) -> Iterator[tuple[ChunkStream[C], C | None]]:
        """Iterate over what `receive` returns, until all have ended; wait for the longest timeout.

        Streams may be added and removed meanwhile.
        """
        while self._pending:
            yield self.receive(timeout=self._longest)

    def add(self, stream: ChunkStream[C]) -> None:
        """Receive from this stream, too. Nothing happens if it is in here already.

        Raises:
            ClosedError: the stream was released.
            PeerLostError: the producer is gone.
        """
        if stream not in self._pending:
            self._longest = max(self._longest, stream.timeout)
            self._request(stream)
            self._connections[self._pending[stream].connection] += 1

    def remove(self, stream: ChunkStream[C]) -> None:
        """Receive from this stream no more; it stays open. Nothing happens if it is not in here."""
        pending = self._pending.pop(stream, None)
        if pending is not None:
            self._connections -= Counter([pending.connection])
            self._longest = max((one.timeout for one in self._pending), default=0.0)

    def receive(self, *, timeout: float) -> tuple[ChunkStream[C], C | None]:
        """Wait for the next chunk of any stream; return the stream, and the chunk or None.

        None is the stream's end, at which it leaves; so does a stream of which this raises an
        error. The chunk that was returned before is released; tensors of it that are kept elsewhere
        keep its memory. `timeout` is in seconds.

        Raises:
            TransferTimeout: no stream had a chunk in time; call again to go on waiting.
            TransferFailed, PeerLostError, IntegrityError: as `ChunkStream.receive`, for the stream
                `last`.
            ClosedError: there is no stream in here.
        """
        limit = check_timeout(timeout)
        deadline = time.monotonic() + limit
        if self._held in self._pending:
            self._request(self._held)
        self._held = None
        while self._pending:
            stream = self._first_ready()
            if stream is not None:
                return stream, self._take(stream, deadline)
            if not self._wait(deadline):
                text = f"no chunk of {len(self)} streams came within {format_seconds(timeout)}"
                raise TransferTimeout(text, waited=limit, phase="waiting for chunks")
        raise ClosedError("there is no stream to receive from; `add` one")

    def release(self) -> None:
        """Release all streams that have not ended as read, and leave none in here."""
        for stream in list(self._pending):
            stream.release()
            self.remove(stream)

    def release_unread(self) -> None:
        """Leave all streams that have not ended to other readers, and none in here."""
        for stream in list(self._pending):
            stream.release_unread()
            self.remove(stream)

    def __enter__(self) -> ChunkStreams[C]:
        return self

    @property
    def _is_taken(self) -> bool:
        return not self._pending

    def _request(self, stream: ChunkStream[C]) -> None:
        """Release the stream's last chunk, and have its next one noted when it comes."""
        try:
            pending = stream.request_next()
        except Exception:
            self.remove(stream)
            raise
        # In this order: after an interrupt, a stream that is in here is noted when its chunk comes.
        pending.add_done_callback(partial(self._ready.note, weakref.ref(stream)))
        self._pending[stream] = pending

    def _first_ready(self) -> ChunkStream[C] | None:
        """The first stream of which `receive` need not wait for a chunk; it stays the first."""
        ready = self._ready.streams
        while ready:
            stream = ready[0]()
            if stream in self._pending and self._pending[stream].is_done:
                return stream
            ready.popleft()  # it has left, or is noted twice
        return None

    def _take(self, stream: ChunkStream[C], deadline: float) -> C | None:
        """Receive what has come of a stream; it leaves with its end or an error."""
        self._held = stream  # first: after an interrupt the next call requests what is missing
        self.last = stream
        self._ready.streams.popleft()
        try:
            # Of its end, the rest may still be on its way.
            chunk = stream.receive(timeout=max(0.0, deadline - time.monotonic()))
        except TransferTimeout:
            raise
        except Exception:
            self.remove(stream)
            raise
        if chunk is None:
            self.remove(stream)
        return chunk

    def _wait(self, deadline: float) -> bool:
        """Wait until something is noted; False if the deadline has passed."""
        event = self._ready.event
        event.clear()
        if self._ready.streams:
            return True
        if deadline <= time.monotonic():
            return False
        if len(self._connections) == 1:  # a message of another one would not wake it
            next(iter(self._pending.values())).receive_until(event, deadline)
        return event.wait(max(0.0, deadline - time.monotonic()))


class _ReadyStreams:
    """Streams whose next chunk, end or error has come, in this order; any thread may note one."""

    def __init__(self) -> None:
        self.streams: deque[weakref.ref[ChunkStream[Any]]] = deque()
        self.event = LazyEvent()

    def note(self, stream: weakref.ref[ChunkStream[Any]], _: object) -> None:
        """Add a stream, and wake the thread that waits."""
        self.streams.append(stream)
        self.event.set()
