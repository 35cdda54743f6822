"""Checks of append streams: chunks in order and whole, several readers, windows, endings."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.aio import AsyncKVLink
from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    DuplicateKeyError,
    IntegrityError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.link import ChunkStreams
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.testing.caches import Recipe, Tensors, chunk, hash_chunk, hash_tensors, identify
from omni_kvlink.testing.memory_checks import TamperingCopier, do_nothing, flip_bit
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import Rig, deliver, expect, request, until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from omni_kvlink.aio import AsyncKVConsumer
    from omni_kvlink.link import AppendStream, ChunkStream, ReceivedChunk

LENGTHS = (3, 1, 0, 700, 2)
"""Rows of the chunks: none, and more than what travels inside an offer."""


def numbered(chunks: Iterable[Tensors], first: int = 0) -> list[tuple[int, str]]:
    """The result of the peer's `receive_all` for the chunks from number `first` on."""
    return list(enumerate(map(hash_chunk, chunks), first))


def receive(reader: RemoteLink, timeout: float = 60, key: str = "g") -> Any:
    """Receive a chunk in the peer."""
    reply = reader.peer.call("receive", key=key, timeout=timeout)
    return reply if reply is None else tuple(reply)


def receive_all(reader: RemoteLink, key: str = "g") -> list[tuple[int, str]]:
    """Receive the chunks that are left in the peer."""
    return [tuple(reply) for reply in reader.peer.call("receive_all", key=key)]


def take(stream: ChunkStream[ReceivedChunk]) -> tuple[int, str]:
    """Receive a chunk in this process, and drop it: its number and the hash of its tensors."""
    received = stream.receive()
    assert received is not None
    return identify(received)


def append(out: AppendStream, chunks: Iterable[Tensors]) -> None:
    """Append chunks."""
    for tensors in chunks:
        out.append(tensors, timeout=60)


def until_failed(out: AppendStream, text: str) -> None:
    """Append until that raises TransferFailed, with this text."""
    reasons = list[str]()

    def has_failed() -> bool:
        try:
            out.append(chunk(9), timeout=60)
        except TransferFailed as error:
            reasons.append(str(error))
        return bool(reasons)

    until(has_failed, "the writer knows")
    assert text in reasons[0], reasons


def check_chunks_come_one_by_one(rig: Rig) -> None:
    """A reader has each chunk before the next one is appended, and learns the end."""
    producer, reader = rig.serve(), rig.connect()
    with producer.open_stream("g", chunk(0), metadata={"rate": 24_000}) as out:
        reader.call("read_stream", key="g", timeout=60)
        for number, rows in enumerate(LENGTHS):
            waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
            tensors = chunk(number, rows)
            assert out.append(tensors, timeout=60) == number
            assert tuple(waiting.result(PATIENCE)) == (number, hash_chunk(tensors))
        expect(TransferTimeout, receive, reader, 0.0, mentions=("chunk 5", "not written yet"))
        waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
    assert waiting.result(PATIENCE) is None
    assert receive(reader) is None
    assert out.receipt is not None
    out.receipt.wait(timeout=60)
    expect(ClosedError, out.append, chunk(9))


def check_a_late_reader_has_all_chunks(rig: Rig) -> None:
    """A reader that comes after the commit begins with the first chunk, or where it says."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect_here()
    chunks = [chunk(number, rows) for number, rows in enumerate(LENGTHS)]
    with producer.open_stream("g", chunks[0], readers=3, metadata={"a": [1]}) as out:
        append(out, chunks)
    reader.call("read_stream", key="g", timeout=60)
    assert receive_all(reader) == numbered(chunks)
    with other.read_stream("g", timeout=60, start=3, verify="full") as stream:
        assert stream.metadata == {"a": [1]}
        assert stream.position == 3
        assert [identify(received) for received in stream] == numbered(chunks[3:], 3)
        assert stream.count == 5
    assert out.receipt is not None
    assert not out.receipt.done, "a third reader is missing"
    with other.read_stream("g", timeout=60, start=99) as stream:
        assert not list(stream)
        assert stream.count == 5
    out.receipt.wait(timeout=60)


def check_readers_go_at_their_own_pace(rig: Rig) -> None:
    """Each reader has all chunks; the slowest decides when memory is freed."""
    producer, fast, slow = rig.serve(), rig.connect(), rig.connect_here()
    chunks = [chunk(number) for number in range(8)]
    with producer.open_stream("g", chunks[0], readers=2) as out:
        fast.call("read_stream", key="g", timeout=60)
        with slow.read_stream("g", timeout=60) as stream:
            append(out, chunks[:4])
            assert [receive(fast) for _ in range(4)] == numbered(chunks[:4])
            first = stream.receive()
            assert first is not None
            assert identify(first) == (0, hash_chunk(chunks[0]))
            append(out, chunks[4:])
            assert out.commit() is out.receipt
            assert receive_all(fast) == numbered(chunks[4:], 4)
            assert not out.commit().done
            assert [identify(received) for received in stream] == numbered(chunks[1:], 1)
            expect(ClosedError, first.data.tensors)
    out.commit().wait(timeout=60)


def check_one_thread_receives_from_many_streams(rig: Rig) -> None:
    """Chunks in the order in which they come, whichever stream they are of; each ends by itself."""
    producer, consumer = rig.serve(), rig.connect_here()
    outs = {key: producer.open_stream(key, chunk(0)) for key in "abc"}
    streams = {key: consumer.read_stream(key, timeout=60) for key in "abc"}
    merged = ChunkStreams(streams.values())
    received: ReceivedChunk | None = None
    for number, key in enumerate("caabcb"):
        rows = LENGTHS[number % len(LENGTHS)]
        outs[key].append(chunk(number, rows), timeout=60)
        stream, received = merged.receive(timeout=60)
        assert stream is streams[key]
        assert received is not None
        assert hash_tensors(received.data.tensors()) == hash_chunk(chunk(number, rows))
        assert received.number == stream.position - 1
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


def check_a_chunk_carries_many_requests(rig: Rig) -> None:
    """The tensors that a step has for many requests are one chunk, which the reader takes apart."""
    producer, consumer = rig.serve(), rig.connect_here()
    steps = [{"a": 3, "b/0": 0, "ç": 1}, {"ç": 2, "a": 1, "b/0": 1}, {"a": 700}, {"a": 700}, {}]
    with producer.open_stream("g", chunk(0)) as out:
        for number, requests in enumerate(steps):
            tensors = chunk(number, sum(requests.values()))
            assert out.append_requests(requests, tensors, timeout=60) == number
        expect(SchemaError, out.append_requests, {"a": 2}, chunk(5, 3), mentions=("3 rows", "2"))
        last = {"b/0": "it fell over"}
        out.append_requests({"a": 1}, chunk(5, 1), ended=["a"], failed=last, timeout=60)
        out.append(chunk(6), timeout=60)
    with consumer.read_stream("g", timeout=60, verify="full") as stream:
        for number, requests in enumerate(steps):
            step = stream.receive()
            assert step is not None
            parts = step.requests()
            assert (parts.ended, parts.failed) == ((), {})
            tensors = chunk(number, sum(requests.values()))
            assert hashes(parts) == hashes(taken_apart(tensors, requests))
        step = stream.receive()
        assert step is not None
        parts = step.requests()
        assert (list(parts), parts.ended, parts.failed) == (["a"], ("a",), last)
        plain = stream.receive()
        assert plain is not None
        expect(SchemaError, plain.requests, mentions=("append_requests",))
        expect(ClosedError, step.requests)
        assert stream.receive() is None
    out.commit().wait(timeout=60)


def hashes(requests: Mapping[str, Tensors]) -> list[tuple[str, str]]:
    """Each request, in order, with the hash of its tensors."""
    return [(key, hash_chunk(tensors)) for key, tensors in requests.items()]


def taken_apart(tensors: Tensors, requests: Mapping[str, int]) -> dict[str, Tensors]:
    """Split the tensors of a chunk into those of each request."""
    parts, start = dict[str, Tensors](), 0
    tokens, nested = tensors["more"]
    for key, size in requests.items():
        rows = slice(start, start + size)
        nested_rows = [tokens[rows], {"scale": nested["scale"][rows]}]
        parts[key] = {"hidden": tensors["hidden"][rows], "more": nested_rows}
        start += size
    return parts


def check_the_window_holds_the_producer_up(rig: Rig) -> None:
    """`append` waits for the slowest reader, then raises CapacityError, and may be repeated."""
    producer, consumer = rig.serve(), rig.connect_here()
    chunks = [chunk(number) for number in range(6)]
    with producer.open_stream("g", chunks[0], window=2) as out:
        append(out, chunks[:2])
        expect(CapacityError, out.append, chunks[2], timeout=0.0, mentions=("chunk 0", "2 chunks"))
        with consumer.read_stream("g", timeout=60) as stream:
            first = stream.receive()
            assert first is not None
            kept = first.data["hidden"]
            expect(CapacityError, out.append, chunks[2], timeout=0.0)
            assert stream.receive() is not None
            expect(CapacityError, out.append, chunks[2], timeout=0.0, mentions=("chunk 0",))
            assert torch.equal(kept, chunks[0]["hidden"]), "overwritten while it is kept"
            del kept, first
            append(out, chunks[2:3])
            assert take(stream) == (2, hash_chunk(chunks[2]))
            for number in range(3, 6):
                append(out, [chunks[number]])
                assert take(stream) == (number, hash_chunk(chunks[number]))
            out.commit()
            assert stream.receive() is None
    out.commit().wait(timeout=60)


def check_appends_of_two_threads_keep_their_deadlines(rig: Rig) -> None:
    """One that waits for a reader does not hold another up beyond its timeout."""
    producer = rig.serve()
    out = producer.open_stream("g", chunk(0), window=1)
    append(out, [chunk(0)])
    reasons = list[str]()

    def is_held_up() -> bool:
        reasons.append(str(expect(CapacityError, out.append, chunk(1), timeout=0.0)))
        return "another append" in reasons[-1]

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(out.append, chunk(1), timeout=PATIENCE)
        until(is_held_up, "the other thread appends")
        out.fail("enough")
        expect(TransferFailed, waiting.result, PATIENCE, mentions=("enough",))


def check_a_full_quota_holds_the_producer_up(rig: Rig) -> None:
    """Without memory for a chunk `append` raises CapacityError, and nothing of it was sent."""
    producer, reader = rig.serve(quota=1 << 20), rig.connect()
    large = [{"x": torch.randn(80_000)} for _ in range(6)]
    with producer.open_stream("g", large[0]) as out:
        sent = []
        for tensors in large:
            try:
                out.append(tensors, timeout=0.0)
            except CapacityError:
                break
            sent.append(tensors)
        assert 0 < len(sent) < len(large)
        reader.call("read_stream", key="g", timeout=60)
        assert [receive(reader)[1] for _ in sent] == [hash_tensors([x["x"]]) for x in sent]
        waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
        out.append(large[-1], timeout=60)
        assert waiting.result(PATIENCE)[1] == hash_tensors([large[-1]["x"]])
        out.commit()
        assert receive(reader) is None
    out.commit().wait(timeout=60)


def check_a_failing_writer_reaches_the_middle(rig: Rig) -> None:
    """An error in the block fails the readers at the chunk they are at, and later readers."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    out = producer.open_stream("g", chunk(0), readers=2)
    reader.call("read_stream", key="g", timeout=60)
    append(out, [chunk(0), chunk(1)])
    assert receive(reader) == (0, hash_chunk(chunk(0)))
    assert receive(reader) == (1, hash_chunk(chunk(1)))
    waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
    out.__exit__(ValueError, ValueError("out of luck"), None)
    expect(TransferFailed, waiting.result, PATIENCE, mentions=("out of luck", "'g'", "2 chunks"))
    expect(TransferFailed, receive, reader, mentions=("out of luck",))
    expect(TransferFailed, other.call, "read_stream", key="g", timeout=60, mentions=("luck",))
    expect(ClosedError, out.append, chunk(2))
    reader.peer.call("release", key="g")


def check_a_stream_is_aborted_by_either_side(rig: Rig) -> None:
    """After an abort the writer's next chunk and the reader's next one raise."""
    producer, reader = rig.serve(), rig.connect()
    for side in ("producer", "reader"):
        out = producer.open_stream("g", chunk(0))
        reader.call("read_stream", key="g", timeout=60)
        append(out, [chunk(0)])
        assert receive(reader) == (0, hash_chunk(chunk(0)))
        waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
        if side == "producer":
            producer.abort("g", "no longer needed")
        else:
            reader.call("abort", key="g", reason="no longer needed")
        expect(TransferFailed, waiting.result, PATIENCE, mentions=("no longer needed",))
        until_failed(out, "no longer needed")
        out.fail("the writer left its block")
        reader.peer.call("release", key="g")


def check_a_closing_producer_ends_a_stream(rig: Rig) -> None:
    """A reader in the middle raises PeerLostError when the producer closes its link."""
    producer, reader = rig.serve(), rig.connect()
    out = producer.open_stream("g", chunk(0))
    reader.call("read_stream", key="g", timeout=60)
    append(out, [chunk(0)])
    assert receive(reader) == (0, hash_chunk(chunk(0)))
    waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
    producer.close()
    expect(PeerLostError, waiting.result, PATIENCE)
    expect(ClosedError, out.append, chunk(1))
    reader.peer.call("release", key="g")


def check_another_reader_goes_on(rig: Rig) -> None:
    """A reader that gives up lets another one go on with the first chunk it had not released."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    chunks = [chunk(number) for number in range(6)]
    with producer.open_stream("g", chunks[0]) as out:
        append(out, chunks[:3])
        stream = consumer.read_stream("g", timeout=60)
        for number in range(2):
            received = stream.receive()
            assert received is not None
            assert received.number == number
            if number == 1:
                received.release()  # this one was used, too
        stream.release_unread()
        append(out, chunks[3:])
    reader.call("read_stream", key="g", timeout=60)
    mentions = ("chunk 0 was released before", "start=2")
    expect(TransferFailed, receive, reader, mentions=mentions)
    reader.peer.call("release_unread", key="g")
    reader.call("read_stream", key="g", timeout=60, start=2)
    assert receive_all(reader) == numbered(chunks[2:], 2)
    out.commit().wait(timeout=60)


def check_a_reader_may_leave(rig: Rig) -> None:
    """A reader that says that it needs no more holds nobody up, nor any memory."""
    producer, leaving, reader = rig.serve(), rig.connect_here(), rig.connect()
    chunks = [chunk(number) for number in range(9)]
    with producer.open_stream("g", chunks[0], readers=2, window=3) as out:
        reader.call("read_stream", key="g", timeout=60)
        with leaving.read_stream("g", timeout=60) as stream:
            append(out, chunks[:2])
            assert stream.receive() is not None
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
        assert receive(reader) == (0, hash_chunk(chunk(0)))
        out.commit()
        assert receive(reader) is None
    out.commit().wait(timeout=60)
    receipt = producer.put(Recipe("p").make())
    expect(TransferFailed, reader.call, "read_stream", key="p", timeout=60, mentions=("use get",))
    reader.call("get", key="p", timeout=60)
    receipt.wait(timeout=60)
    deliver(producer, reader, Recipe("g").make())


def check_chunks_are_as_the_spec_says(rig: Rig) -> None:
    """Another name, dtype, shape or number of tensors is refused, and the stream goes on."""
    producer, consumer = rig.serve(), rig.connect_here()
    spec = {"hidden": torch.empty(0, 24), "ids": torch.empty(0, dtype=torch.int64)}
    good = {"hidden": torch.randn(4, 24), "ids": torch.arange(4)}
    expect(SchemaError, producer.open_stream, "g", {}, mentions=("no tensors",))
    expect(SchemaError, producer.open_stream, "g", spec, dim=1, mentions=("ids", "dimension 1"))
    expect(SchemaError, producer.open_stream, "g", spec, window=0, mentions=("window",))
    expect(SchemaError, consumer.read_stream, "g", timeout=60, start=-1, mentions=("start",))
    with producer.open_stream("g", spec) as out:
        for bad, mentions in (
            ({**good, "hidden": torch.randn(4, 23)}, ("hidden", "23", "24")),
            ({**good, "hidden": torch.randn(4, 24).half()}, ("hidden", "float16")),
            ({"hidden": good["hidden"]}, ("1 tensors", "2")),
            ({**good, "more": good["ids"]}, ("3 tensors",)),
            ({"ids": good["ids"], "hidden": good["hidden"]}, ("ids",)),
            ({**good, "ids": torch.tensor(7)}, ("ids", "no dimension")),
        ):
            expect(SchemaError, out.append, bad, mentions=mentions)
        expect(SchemaError, out.append, [good["ids"]], mentions=("dict",))
        expect(SchemaError, out.append, good, {"bad": {1, 2}}, mentions=("metadata",))
        assert out.count == 0
        out.append(good, {"step": 1})
        with consumer.read_stream("g", timeout=60) as stream:
            received = stream.receive()
            assert received is not None
            assert received.data.metadata == {"step": 1}
            out.commit()
            assert stream.receive() is None
    out.commit().wait(timeout=60)


def check_a_damaged_chunk_is_found(rig: Rig) -> None:
    """A byte that changed after the copy fails the stream on both sides, and names the tensor."""
    copier = TamperingCopier()
    producer, consumer = rig.serve(copier=copier), rig.connect_here()
    out = producer.open_stream("g", chunk(0))
    append(out, [chunk(0)])
    copier.tamper = partial(flip_bit, "tensors/data/more/0", 3)
    append(out, [chunk(1)])
    with consumer.read_stream("g", timeout=60, verify="full") as stream:
        assert take(stream) == (0, hash_chunk(chunk(0)))
        expect(IntegrityError, stream.receive, mentions=("data/more/0",))
    until_failed(out, "data/more/0")


def check_damaged_requests_are_found(rig: Rig) -> None:
    """The requests of a chunk are checked also by a reader that does not check its tensors."""
    copier = TamperingCopier()
    producer, consumer = rig.serve(copier=copier), rig.connect_here()
    out = producer.open_stream("g", chunk(0))
    copier.tamper = partial(flip_bit, "tensors/requests", 4)  # "a" becomes "q"
    out.append_requests({"a": 3, "b": 2}, chunk(0, 5), timeout=60)
    with consumer.read_stream("g", timeout=60) as stream:
        expect(IntegrityError, stream.receive, mentions=("requests",))
    until_failed(out, "requests")


def check_chunks_that_are_missing_or_swapped_are_found(rig: Rig) -> None:
    """A chunk with another number, and one after other chunks, raise IntegrityError."""
    copier = TamperingCopier()
    for offset, mentions in ((0, ("chunk 17 came instead of chunk 1",)), (9, ("chunks before 1",))):
        producer, consumer = rig.serve(copier=copier, digests=False), rig.connect_here()
        copier.tamper = do_nothing
        out = producer.open_stream("g", chunk(0))
        append(out, [chunk(0)])
        copier.tamper = partial(flip_bit, "tensors/position", offset)
        append(out, [chunk(1)])
        with consumer.read_stream("g", timeout=60) as stream:
            assert stream.receive() is not None
            expect(IntegrityError, stream.receive, mentions=mentions)
        out.fail("it was rejected")
        producer.close()


def check_a_stream_is_joined(rig: Rig) -> None:
    """`concatenate` joins the chunks along the dimension that grows, and its file opens again."""
    producer, consumer = rig.serve(), rig.connect_here()
    for lengths in ((), LENGTHS):
        parts = [torch.randn(2, rows, 3) for rows in lengths]
        spec = {"audio": [torch.empty(2, 0, 3, device="meta")]}
        with producer.open_stream("g", spec, dim=1, metadata={"rate": 16}) as out:
            append(out, [{"audio": [part]} for part in parts])
        joined = consumer.read_stream("g", timeout=60).concatenate()
        assert torch.equal(joined["audio"][0], torch.cat([torch.empty(2, 0, 3), *parts], 1))
        assert joined.metadata == {"rate": 16}
        with tempfile.TemporaryDirectory() as folder:
            joined.save(Path(folder, "g.safetensors"))
            loaded = TensorTransferData.load(Path(folder, "g.safetensors"))
        assert not loaded.difference(joined), loaded.difference(joined)
        out.commit().wait(timeout=60)


def check_chunks_by_asyncio(rig: Rig) -> None:
    """Opened and read by the links of `omni_kvlink.aio`."""
    chunks = [chunk(number, rows) for number, rows in enumerate(LENGTHS)]

    async def transfer() -> list[tuple[int, str]]:
        async with (
            await AsyncKVLink.serve(rig.url, **rig.options) as producer,
            await AsyncKVLink.connect(rig.url, timeout=60, **rig.options) as consumer,
        ):
            reading = asyncio.ensure_future(read(consumer))
            async with producer.open_stream("g", chunks[0], window=2) as out:
                for tensors in chunks[:-1]:
                    await out.append(tensors, timeout=60)
                await out.append_requests({"r": LENGTHS[-1]}, chunks[-1], timeout=60)
            contents = await reading
            await producer.wait(await out.commit(), timeout=60)
            return contents

    async def read(consumer: AsyncKVConsumer) -> list[tuple[int, str]]:
        with await consumer.read_stream("g", timeout=60) as stream:
            return [identify(received) async for received in stream]

    assert asyncio.run(transfer()) == numbered(chunks)
