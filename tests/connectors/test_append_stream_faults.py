"""Append streams between real processes, killed and frozen: whole chunks, or a typed error."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_kvlink import (
    CapacityError,
    ChunkStreams,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.testing.append_stream_checks import (
    append,
    numbered,
    receive,
    receive_all,
    until_failed,
)
from omni_kvlink.testing.caches import chunk, hash_chunk
from omni_kvlink.testing.peer_harness import PATIENCE, PeerExited
from omni_kvlink.testing.rig import expect, until, until_freed
from support.faults.every_connector import field as field
from support.faults.frozen import freeze
from support.faults.harness import Field, Start, kill
from support.link.ends import delivery_of

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

CHUNKS = [chunk(number) for number in range(6)]


def test_the_producer_is_killed_between_chunks(field: Field, start: Start) -> None:
    """A reader that waits raises at once; a chunk that it holds stays as it was."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    producer.call("open_stream", key="g")
    reader.call("read_stream", key="g", timeout=60)
    target.call("append", key="g", number=0)
    held = field.commands.kept["g"].receive()
    assert held is not None
    tensor, before = held.data["hidden"], chunk(0)["hidden"]
    waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
    kill(target)
    expect(PeerLostError, waiting.result, PATIENCE)
    expect(PeerLostError, receive, reader)
    assert tensor.equal(before)
    del held, tensor
    reader.peer.call("release", key="g")


def test_the_producer_is_killed_while_one_thread_waits_for_two_streams(
    field: Field, start: Start
) -> None:
    """Both raise, one after the other, and nothing waits for the timeout."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    for key in "ab":
        producer.call("open_stream", key=key)
        reader.call("read_stream", key=key, timeout=60)
    streams = [field.commands.kept[key] for key in "ab"]
    together = ChunkStreams(streams)
    target.call("append", key="b", number=0)
    assert together.receive(timeout=60)[0] is streams[1]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together.receive, timeout=PATIENCE)
        kill(target)
        expect(PeerLostError, waiting.result, PATIENCE)
    lost = [together.last]
    expect(PeerLostError, together.receive, timeout=60)
    assert {*lost, together.last} == set(streams)
    assert len(together) == 0
    for key in "ab":
        reader.peer.call("release", key=key)


@pytest.mark.parametrize(
    "point", ["put.reserved", "put.copied", "put.encoded", "publish.before", "publish.after"]
)
def test_the_producer_is_killed_in_an_append(field: Field, start: Start, point: str) -> None:
    """The reader has the whole chunk or none of it, and never takes the stream for complete."""
    target = start({point: "kill"})
    producer, reader = field.serve_at(target), field.connect()
    producer.call("open_stream", key="g")
    reader.call("read_stream", key="g", timeout=60)
    waiting = reader.peer.submit("receive", key="g", timeout=PATIENCE)
    dying = target.submit("append", key="g", number=0)
    target.process.wait(PATIENCE)
    expect(PeerExited, dying.result, PATIENCE)
    if point == "publish.after" and waiting.exception(PATIENCE) is None:
        assert tuple(waiting.result()) == (0, hash_chunk(chunk(0)))
    else:
        expect(PeerLostError, waiting.result, PATIENCE)
    expect(PeerLostError, receive, reader)
    reader.peer.call("release", key="g")


def test_a_reader_is_killed_and_another_one_goes_on(field: Field, start: Start) -> None:
    """It receives the chunk that the killed one had in hand, and those after it."""
    target = start()
    producer, dying, reader = field.serve(), field.connect_at(target), field.connect()
    with producer.open_stream("g", CHUNKS[0]) as out:
        append(out, CHUNKS[:4])
        dying.call("read_stream", key="g", timeout=60)
        assert [receive(dying) for _ in range(3)] == numbered(CHUNKS[:3])
        until(lambda: producer.stats()["transfers"]["released"] == 2, "two were released")
        kill(target)
        until(lambda: producer.stats()["transfers"]["redelivered"] == 1, "the reader is lost")
        append(out, CHUNKS[4:])
        reader.call("read_stream", key="g", timeout=60, start=2)
        assert [receive(reader) for _ in range(4)] == numbered(CHUNKS[2:], 2)
        out.commit()
        assert receive(reader) is None
    out.commit().wait(timeout=60)
    until_freed(producer)


def test_an_append_says_that_its_reader_is_lost(field: Field, start: Start) -> None:
    """It still waits for another one in its place."""
    target = start()
    producer, dying = field.serve(), field.connect_at(target)
    with producer.open_stream("g", CHUNKS[0], window=2) as out:
        dying.call("read_stream", key="g", timeout=60)
        append(out, CHUNKS[:2])
        with pytest.raises(CapacityError, match="readers: 1 reading, 0 lost, 0 missing"):
            out.append(CHUNKS[2], timeout=0.0)
        kill(target)
        until(lambda: producer.stats()["transfers"]["redelivered"] == 1, "the reader is lost")
        with pytest.raises(CapacityError, match="readers: 0 reading, 1 lost, 0 missing"):
            out.append(CHUNKS[2], timeout=0.0)


@pytest.mark.parametrize("point", ["get.offered", "get.mapped"])
def test_a_reader_is_killed_as_it_opens(field: Field, start: Start, point: str) -> None:
    """Another one receives all chunks."""
    target = start({point: "kill"})
    producer, dying, reader = field.serve(), field.connect_at(target), field.connect()
    with producer.open_stream("g", CHUNKS[0]) as out:
        append(out, CHUNKS[:2])
        taken = dying.submit("read_stream", key="g", timeout=60)
        target.process.wait(PATIENCE)
        expect(PeerExited, taken.result, PATIENCE)
        append(out, CHUNKS[2:])
    reader.call("read_stream", key="g", timeout=60)
    assert receive_all(reader) == numbered(CHUNKS)
    out.commit().wait(timeout=60)
    until_freed(producer)


def test_a_frozen_reader_holds_up_its_own_stream_alone(field: Field, start: Start) -> None:
    """The writer has a deadline, other streams go on, and the reader when it continues."""
    target = start()
    producer, frozen, reader = field.serve(), field.connect_at(target), field.connect()
    with (
        producer.open_stream("f", CHUNKS[0], window=2) as held,
        producer.open_stream("g", CHUNKS[0], window=2) as out,
    ):
        frozen.call("read_stream", key="f", timeout=60)
        reader.call("read_stream", key="g", timeout=60)
        freeze(target.process.pid)
        append(held, CHUNKS[:2])
        expect(CapacityError, held.append, CHUNKS[2], timeout=0.1, mentions=("chunk 0", "'f'"))
        for number, tensors in enumerate(CHUNKS):
            append(out, [tensors])
            assert receive(reader) == (number, hash_chunk(tensors))
        os.kill(target.process.pid, signal.SIGCONT)
        reading = target.submit("receive_all", key="f")
        append(held, CHUNKS[2:])
        held.commit()
        assert [tuple(found) for found in reading.result(PATIENCE)] == numbered(CHUNKS)
        out.commit()
        assert receive(reader) is None
    held.commit().wait(timeout=60)
    out.commit().wait(timeout=60)
    until_freed(producer)


def test_a_frozen_producer(field: Field, start: Start) -> None:
    """No wait exceeds its deadline, and the stream continues when the producer does."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    producer.call("open_stream", key="g")
    reader.call("read_stream", key="g", timeout=60)
    target.call("append", key="g", number=0)
    assert receive(reader) == (0, hash_chunk(chunk(0)))
    freeze(target.process.pid)
    appending = target.submit("append", key="g", number=1)
    expect(TransferTimeout, receive, reader, 0.3)
    expect(TransferTimeout, receive, reader, 0.0, mentions=("chunk 1",))
    os.kill(target.process.pid, signal.SIGCONT)
    assert receive(reader) == (1, hash_chunk(chunk(1)))
    appending.result(PATIENCE)
    target.call("commit_chunks", key="g")
    assert receive(reader) is None
    target.call("wait", key="g", timeout=60)


def test_a_reader_that_rejects_a_chunk_fails_the_stream(field: Field) -> None:
    """The writer and the other readers learn why."""
    producer, reader, other = field.serve(), field.connect(), field.connect()
    out = producer.open_stream("g", CHUNKS[0], readers=2)
    reader.call("read_stream", key="g", timeout=60)
    append(out, CHUNKS[:1])
    received = field.commands.kept["g"].receive()
    assert received is not None
    stream = field.commands.kept.pop("g")
    other.call("read_stream", key="g", timeout=60)
    assert receive(other) == (0, hash_chunk(CHUNKS[0]))
    waiting = other.peer.submit("receive", key="g", timeout=PATIENCE)
    delivery_of(received).reject("its bytes are wrong")
    expect(TransferFailed, waiting.result, PATIENCE, mentions=("its bytes are wrong",))
    until_failed(out, "its bytes are wrong")
    del received
    stream.release()
    other.peer.call("release", key="g")
    until_freed(producer)
