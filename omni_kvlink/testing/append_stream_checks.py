"""Checks of append streams: chunks in order and whole, several readers, windows, endings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    DuplicateKeyError,
    IntegrityError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.link import ChunkStreams
from omni_kvlink.testing.caches import Recipe, Tensors, chunk, hash_chunk, hash_tensors, identify
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import Rig, aborts, deliver, expect, request, until
from omni_kvlink.testing.tampering import TamperingCopier, do_nothing, flip_bit

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from omni_kvlink.link import AppendStream, ChunkStream, KVProducer, ReceivedChunk
    from omni_kvlink.link.consumer import Verify

LENGTHS = (3, 1, 0, 700, 2)
"""Rows of the chunks: none, and more than what travels inside an offer."""
CHUNKS = [chunk(number, rows) for number, rows in enumerate(LENGTHS)]
FIRST = 0, hash_chunk(chunk(0))
"""Result of `receive` for a stream's first chunk, `chunk(0)`."""


def numbered(chunks: Iterable[Tensors], first: int = 0) -> list[tuple[int, str]]:
    """The result of the peer's `receive_all` for the chunks from number `first` on."""
    return list(enumerate(map(hash_chunk, chunks), first))


def begin_receive(reader: RemoteLink) -> Future[Any]:
    """Begin to receive a chunk in the peer."""
    return reader.peer.submit("receive", key="g", timeout=PATIENCE)


def receive(reader: RemoteLink, timeout: float = 60) -> Any:
    """Receive a chunk in the peer."""
    reply = reader.peer.call("receive", key="g", timeout=timeout)
    return reply if reply is None else tuple(reply)


def receive_all(reader: RemoteLink) -> list[tuple[int, str]]:
    """Receive the chunks that are left in the peer."""
    return [tuple(reply) for reply in reader.peer.call("receive_all", key="g")]


def take(stream: ChunkStream[ReceivedChunk]) -> ReceivedChunk:
    """Receive a chunk in this process."""
    received = stream.receive()
    assert received is not None
    return received


def append(out: AppendStream, chunks: Iterable[Tensors]) -> None:
    """Append chunks."""
    for tensors in chunks:
        out.append(tensors, timeout=60)


def until_failed(out: AppendStream, text: str) -> None:
    """Append until that raises TransferFailed, with this text."""

    def has_failed() -> bool:
        try:
            out.append(chunk(9), timeout=60)
        except TransferFailed as error:
            if text in str(error):
                return True
            raise
        return False

    until(has_failed, "the writer knows")


def _begin(producer: KVProducer, reader: RemoteLink, **options: Any) -> AppendStream:
    """Open a stream whose first chunk a reader of the peer has received."""
    out = producer.open_stream("g", chunk(0), **options)
    reader.call("read_stream", key="g", timeout=60)
    append(out, [chunk(0)])
    assert receive(reader) == FIRST
    return out


def check_chunks_come_one_by_one(rig: Rig) -> None:
    """A reader has each chunk before the next one is appended, and learns the end."""
    producer, reader = rig.serve(), rig.connect()
    with producer.open_stream("g", chunk(0), metadata={"rate": 24_000}) as out:
        reader.call("read_stream", key="g", timeout=60)
        for number, tensors in enumerate(CHUNKS):
            waiting = begin_receive(reader)
            assert out.append(tensors, timeout=60) == number
            assert tuple(waiting.result(PATIENCE)) == (number, hash_chunk(tensors))
        expect(TransferTimeout, receive, reader, 0.0, mentions=("chunk 5", "not written yet"))
        waiting = begin_receive(reader)
    assert waiting.result(PATIENCE) is None
    assert receive(reader) is None
    out.commit().wait(timeout=60)
    expect(ClosedError, out.append, chunk(9))


def check_a_late_reader_has_all_chunks(rig: Rig) -> None:
    """A reader that comes after the commit begins with the first chunk, or where it says."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect_here()
    with producer.open_stream("g", CHUNKS[0], readers=3, metadata={"a": [1]}) as out:
        append(out, CHUNKS)
    reader.call("read_stream", key="g", timeout=60)
    assert receive_all(reader) == numbered(CHUNKS)
    with other.read_stream("g", timeout=60, start=3, verify="full") as stream:
        assert stream.metadata == {"a": [1]}
        assert stream.position == 3
        assert list(map(identify, stream)) == numbered(CHUNKS[3:], 3)
        assert stream.count == 5
    assert not out.commit().done, "a third reader is missing"
    with other.read_stream("g", timeout=60, start=99) as stream:
        assert not list(stream)
        assert stream.count == 5
    out.commit().wait(timeout=60)


def check_readers_go_at_their_own_pace(rig: Rig) -> None:
    """Each reader has all chunks; the slowest decides when memory is freed."""
    producer, fast, slow = rig.serve(), rig.connect(), rig.connect_here()
    chunks = [chunk(number) for number in range(8)]
    with producer.open_stream("g", chunks[0], readers=2) as out:
        fast.call("read_stream", key="g", timeout=60)
        with slow.read_stream("g", timeout=60) as stream:
            append(out, chunks[:4])
            assert [receive(fast) for _ in range(4)] == numbered(chunks[:4])
            first = take(stream)
            assert identify(first) == FIRST
            append(out, chunks[4:])
            assert out.commit() is out.receipt
            assert receive_all(fast) == numbered(chunks[4:], 4)
            assert not out.commit().done
            assert list(map(identify, stream)) == numbered(chunks[1:], 1)
            expect(ClosedError, first.data.tensors)
    out.commit().wait(timeout=60)


def check_one_thread_receives_from_many_streams(rig: Rig) -> None:
    """Chunks in the order in which they come, whichever stream they are of; each ends by itself."""
    producer, consumer = rig.serve(), rig.connect_here()
    outs = {key: producer.open_stream(key, chunk(0)) for key in "abc"}
    streams = {key: consumer.read_stream(key, timeout=60) for key in "abc"}
    merged = ChunkStreams(streams.values())
    received: ReceivedChunk | None = None
    for tensors, key in zip([*CHUNKS, CHUNKS[0]], "caabcb", strict=True):
        outs[key].append(tensors, timeout=60)
        stream, received = merged.receive(timeout=60)
        assert stream is streams[key]
        assert received is not None
        assert identify(received) == (stream.position - 1, hash_chunk(tensors))
    expect(TransferTimeout, merged.receive, timeout=0.0, mentions=("3 streams",))
    assert received is not None
    expect(ClosedError, received.data.tensors)
    outs["b"].commit()
    assert merged.receive(timeout=60) == (streams["b"], None)
    assert (len(merged), streams["b"].count) == (2, 2)
    outs["a"].fail("it fell over")
    expect(TransferFailed, merged.receive, timeout=60, mentions=("it fell over", "a"))
    assert merged.last is streams["a"]
    append(outs["c"], [chunk(7), chunk(8)])
    outs["c"].commit()
    contents = [last and identify(last) for _, last in merged]
    assert contents == [*numbered([chunk(7), chunk(8)], 2), None]
    expect(ClosedError, merged.receive, timeout=60)
    for key in "bc":
        outs[key].commit().wait(timeout=60)


def check_the_window_holds_the_producer_up(rig: Rig) -> None:
    """`append` waits for the slowest reader, then raises CapacityError, and may be repeated."""
    producer, consumer = rig.serve(), rig.connect_here()
    chunks = [chunk(number) for number in range(6)]
    with producer.open_stream("g", chunks[0], window=2) as out:
        append(out, chunks[:2])
        expect(CapacityError, out.append, chunks[2], timeout=0.0, mentions=("chunk 0", "2 chunks"))
        with consumer.read_stream("g", timeout=60) as stream:
            first = take(stream)
            kept = first.data["hidden"]
            expect(CapacityError, out.append, chunks[2], timeout=0.0)
            take(stream)
            expect(CapacityError, out.append, chunks[2], timeout=0.0, mentions=("chunk 0",))
            assert torch.equal(kept, chunks[0]["hidden"]), "overwritten while it is kept"
            del kept, first
            for number in range(2, 6):
                append(out, [chunks[number]])
                assert identify(take(stream)) == (number, hash_chunk(chunks[number]))
            out.commit()
            assert stream.receive() is None
    out.commit().wait(timeout=60)


def check_a_full_quota_holds_the_producer_up(rig: Rig) -> None:
    """Without memory for a chunk `append` raises CapacityError, and nothing of it was sent."""
    producer, reader = rig.serve(quota=1 << 20), rig.connect()
    large = [{"x": torch.randn(80_000)} for _ in range(6)]
    hashes = [hash_tensors([tensors["x"]]) for tensors in large]
    with producer.open_stream("g", large[0]) as out:
        try:
            for tensors in large:
                out.append(tensors, timeout=0.0)
        except CapacityError:
            pass
        assert 0 < out.count < len(large)
        reader.call("read_stream", key="g", timeout=60)
        assert [receive(reader)[1] for _ in range(out.count)] == hashes[: out.count]
        waiting = begin_receive(reader)
        out.append(large[-1], timeout=60)
        assert waiting.result(PATIENCE)[1] == hashes[-1]
        out.commit()
        assert receive(reader) is None
    out.commit().wait(timeout=60)


def check_a_failing_writer_reaches_the_middle(rig: Rig) -> None:
    """An error in the block fails the readers at the chunk they are at, and later readers."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    out = _begin(producer, reader, readers=2)
    append(out, [chunk(1)])
    assert receive(reader) == (1, hash_chunk(chunk(1)))
    waiting = begin_receive(reader)
    out.__exit__(ValueError, ValueError("out of luck"), None)
    expect(TransferFailed, waiting.result, PATIENCE, mentions=("out of luck", "'g'", "2 chunks"))
    expect(TransferFailed, receive, reader, mentions=("out of luck",))
    expect(TransferFailed, other.call, "read_stream", key="g", timeout=60, mentions=("luck",))
    expect(ClosedError, out.append, chunk(2))


def check_a_stream_is_aborted_by_either_side(rig: Rig) -> None:
    """After an abort the writer's next chunk and the reader's next one raise."""
    producer, reader = rig.serve(), rig.connect()
    for abort in aborts(producer, reader):
        out = _begin(producer, reader)
        waiting = begin_receive(reader)
        abort("g", "no longer needed")
        expect(TransferFailed, waiting.result, PATIENCE, mentions=("no longer needed",))
        until_failed(out, "no longer needed")
        out.fail("the writer left its block")
        reader.peer.call("release", key="g")


def check_a_closing_producer_ends_a_stream(rig: Rig) -> None:
    """A reader in the middle raises PeerLostError when the producer closes its link."""
    producer, reader = rig.serve(), rig.connect()
    out = _begin(producer, reader)
    waiting = begin_receive(reader)
    producer.close()
    expect(PeerLostError, waiting.result, PATIENCE)
    expect(ClosedError, out.append, chunk(1))


def check_a_reader_may_leave(rig: Rig) -> None:
    """A reader that says that it needs no more holds nobody up, nor any memory."""
    producer, leaving, reader = rig.serve(), rig.connect_here(), rig.connect()
    chunks = [chunk(number) for number in range(9)]
    with producer.open_stream("g", chunks[0], readers=2, window=3) as out:
        reader.call("read_stream", key="g", timeout=60)
        with leaving.read_stream("g", timeout=60) as stream:
            append(out, chunks[:2])
            take(stream)
            stream.release()
        for number, tensors in enumerate(chunks):
            if number >= 2:
                append(out, [tensors])
            assert receive(reader) == (number, hash_chunk(tensors))
        expect(ClosedError, stream.receive)
    assert receive(reader) is None
    out.commit().wait(timeout=60)


def check_a_stream_nobody_reads_expires(rig: Rig) -> None:
    """A stream does not expire while it grows; its `ttl` counts from the commit."""
    producer, reader = rig.serve(), rig.connect()
    with producer.open_stream("g", chunk(0), ttl=0.2) as out:
        append(out, [chunk(0)])
    receipt = out.commit()
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("expired",))
    expect(TransferFailed, reader.call, "read_stream", key="g", timeout=60, mentions=("expired",))


def check_streams_and_payloads_are_not_mixed_up(rig: Rig) -> None:
    """`get` of a stream and `read_stream` of a payload raise and name the other method."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    waiting = request(other, producer, "g")
    with producer.open_stream("g", chunk(0)) as out:
        expect(TransferFailed, waiting.result, PATIENCE, mentions=("read_stream",))
        expect(TransferFailed, reader.call, "get", key="g", timeout=60, mentions=("read_stream",))
        expect(DuplicateKeyError, producer.open_stream, "g", chunk(0), mentions=("'g'",))
        expect(DuplicateKeyError, producer.put, Recipe("g").make(), mentions=("'g'",))
        append(out, [chunk(0)])
        reader.call("read_stream", key="g", timeout=60)
    assert receive_all(reader) == [FIRST]
    out.commit().wait(timeout=60)
    receipt = producer.put(Recipe("p").make())
    expect(TransferFailed, reader.call, "read_stream", key="p", timeout=60, mentions=("use get",))
    reader.call("get", key="p", timeout=60)
    receipt.wait(timeout=60)
    deliver(producer, reader, Recipe("g").make())


def check_a_damaged_chunk_is_found(rig: Rig) -> None:
    """A byte that changed after the copy fails the stream on both sides, with its tensor's name.

    The requests of a chunk are checked also by a reader that does not check its tensors; a chunk
    with another number, and one after other chunks, are found without digests.
    """
    copier = TamperingCopier()
    producer, consumer = rig.serve(copier=copier), rig.connect_here()
    for name, offset, digests, text in (
        ("data/more/0", 3, True, "data/more/0"),
        ("requests", 4, True, "requests"),  # "a" becomes "q"
        ("position", 0, False, "chunk 17 came instead of chunk 1"),
        ("position", 9, False, "chunks before 1"),
    ):
        copier.tamper = do_nothing
        out = producer.open_stream("g", chunk(0), digests=digests)
        append(out, [chunk(0)])
        copier.tamper = partial(flip_bit, f"tensors/{name}", offset)
        out.append_requests({"a": 3, "b": 2}, chunk(1), timeout=60)
        verify: Verify = "full" if name.startswith("data") else "auto"
        with consumer.read_stream("g", timeout=60, verify=verify) as stream:
            assert identify(take(stream)) == FIRST
            expect(IntegrityError, stream.receive, mentions=(text,))
        until_failed(out, text)
