"""`ChunkStreams`: many append streams in one thread; what connectors must do is in the kit."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import (
    ChunkStreams,
    ClosedError,
    KVConsumer,
    KVLink,
    KVProducer,
    PeerLostError,
    TransferTimeout,
)
from omni_kvlink.testing.caches import chunk, hash_chunk, hash_tensors
from omni_kvlink.testing.rig import expect, until, until_freed
from support.connectors.held_loops import is_asleep, leader_of, loop_of
from support.link.ends import session_of

if TYPE_CHECKING:
    from omni_kvlink.link import AppendStream, ChunkStream, ReceivedChunk

    Streams = dict[str, ChunkStream[ReceivedChunk]]

# Reaches into _ready, _waiting: that a thread waits has no effect that shows before a chunk comes.

pytestmark = pytest.mark.usefixtures("leaves_nothing")
Ends = tuple[KVProducer, KVConsumer]


def open_both(ends: Ends, keys: str = "ab") -> tuple[dict[str, AppendStream], Streams]:
    producer, consumer = ends
    outs = {key: producer.open_stream(key, chunk(0)) for key in keys}
    return outs, {key: consumer.read_stream(key, timeout=60) for key in keys}


def hash_of(found: ReceivedChunk | None) -> str:
    assert found is not None
    return hash_tensors(found.data.tensors())


def end(outs: dict[str, AppendStream], streams: Streams) -> None:
    for key, out in outs.items():
        streams[key].release()
        out.commit().wait(timeout=60)


def test_a_stream_may_leave_and_come_back(ends: Ends) -> None:
    outs, streams = open_both(ends)
    together = ChunkStreams(streams.values())
    outs["a"].append(chunk(0))
    stream, held = together.receive(timeout=60)
    assert stream is streams["a"]
    together.remove(stream)
    together.remove(stream)
    assert (len(together), stream in together, streams["b"] in together) == (1, False, True)
    outs["a"].append(chunk(1))
    outs["b"].append(chunk(2))
    assert together.receive(timeout=60)[0] is streams["b"], "it has left"
    assert hash_of(held) == hash_chunk(chunk(0)), "its chunk is still the caller's"
    assert hash_of(stream.receive()) == hash_chunk(chunk(1))
    outs["a"].append(chunk(3))
    together.add(stream)
    together.add(stream)
    found, following = together.receive(timeout=60)
    assert (found, hash_of(following)) == (stream, hash_chunk(chunk(3)))
    expect(TransferTimeout, together.receive, timeout=0.0)
    end(outs, streams)


def test_it_iterates_with_the_longest_timeout_of_its_streams(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs, streams = open_both(ends, "abc")
    for key, timeout in (("a", 30.0), ("b", 20.0), ("c", 10.0)):
        streams[key].timeout = timeout
    together = ChunkStreams([streams["c"], streams["b"]])
    timeouts = list[float]()
    monkeypatch.setattr(together, "receive", lambda timeout: timeouts.append(timeout))
    steps = iter(together)
    next(steps)
    together.add(streams["a"])
    next(steps)
    together.remove(streams["a"])
    next(steps)
    assert timeouts == [20.0, 30.0, 20.0]
    end(outs, streams)


def test_streams_that_are_added_while_it_iterates(ends: Ends) -> None:
    outs, streams = open_both(ends)
    for number, out in enumerate(outs.values()):
        out.append(chunk(number))
        out.commit()
    together, seen = ChunkStreams([streams["a"]]), list[str]()
    for stream, found in together:
        seen.append(f"{stream.request_id} {found and found.number}")
        if found is not None and stream is streams["a"]:
            together.add(streams["b"])
    assert sorted(seen) == ["a 0", "a None", "b 0", "b None"]
    end(outs, streams)


@pytest.mark.parametrize("raises", [False, True])
def test_the_block_leaves_streams_that_have_not_ended(ends: Ends, raises: bool) -> None:
    """Another reader goes on with the first chunk that was not read."""
    outs, streams = open_both(ends)
    with contextlib.suppress(ValueError), ChunkStreams(streams.values()) as together:
        for number in range(2):
            outs["b"].append(chunk(number))
            together.receive(timeout=60)
        outs["a"].append(chunk(0))
        if raises:
            raise ValueError("the engine fell over")
    assert len(together) == 0
    expect(ClosedError, streams["a"].receive)
    expect(ClosedError, together.add, streams["a"])
    expect(ClosedError, together.receive, timeout=60)
    for out in outs.values():
        assert not out.commit().done
    with ChunkStreams(
        ends[1].read_stream(key, timeout=60, start=start) for key, start in (("a", 0), ("b", 1))
    ) as others:
        found = [(stream.request_id, last and last.number) for stream, last in others]
    assert sorted(found, key=str) == [("a", 0), ("a", None), ("b", 1), ("b", None)]
    for out in outs.values():
        out.commit().wait(timeout=60)
    until_freed(ends[0])


def test_a_release_of_all_says_that_they_were_read(ends: Ends) -> None:
    outs, streams = open_both(ends)
    with ChunkStreams(streams.values()) as together:
        outs["b"].append(chunk(0))
        together.receive(timeout=60)
        together.release()
        assert len(together) == 0
    end(outs, streams)
    until_freed(ends[0])


def test_dropped_streams_are_released_without_a_collection(ends: Ends) -> None:
    outs, streams = open_both(ends)
    found = [weakref.ref(stream) for stream in streams.values()]
    together = ChunkStreams(streams.values())
    outs["a"].append(chunk(0))
    gc.disable()
    try:
        del together
        streams.clear()
        assert [ref() for ref in found] == [None, None]
    finally:
        gc.enable()
    for key, out in outs.items():
        assert not out.commit().done, "nobody read it to its end"
        ends[1].read_stream(key, timeout=60).release()
        out.commit().wait(timeout=60)


def test_an_interrupt_behind_a_chunk_stops_no_stream(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk is taken; the next call goes on with the one behind it."""
    outs, streams = open_both(ends)
    together, receive = ChunkStreams(streams.values()), streams["a"].receive

    def interrupted(**options: Any) -> None:
        receive(**options)
        raise KeyboardInterrupt

    outs["a"].append(chunk(0))
    with monkeypatch.context() as patch:
        patch.setattr(streams["a"], "receive", interrupted)
        expect(KeyboardInterrupt, together.receive, timeout=60)
    outs["b"].append(chunk(1))
    assert together.receive(timeout=60)[0] is streams["b"]
    outs["a"].append(chunk(2))
    stream, found = together.receive(timeout=60)
    assert (stream, hash_of(found)) == (streams["a"], hash_chunk(chunk(2)))
    end(outs, streams)


def test_an_interrupt_before_a_chunk_loses_none(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs, streams = open_both(ends)
    together = ChunkStreams(streams.values())

    def interrupted(**options: Any) -> None:
        raise KeyboardInterrupt

    outs["a"].append(chunk(0))
    with monkeypatch.context() as patch:
        patch.setattr(streams["a"], "receive", interrupted)
        expect(KeyboardInterrupt, together.receive, timeout=60)
    stream, found = together.receive(timeout=60)
    assert (stream, hash_of(found)) == (streams["a"], hash_chunk(chunk(0)))
    end(outs, streams)


def test_a_lost_producer_ends_each_stream(ends: Ends) -> None:
    outs, streams = open_both(ends)
    together = ChunkStreams(streams.values())
    ends[0].close()
    lost = list[object]()
    for _ in streams:
        expect(PeerLostError, together.receive, timeout=60)
        lost.append(together.last)
    assert set(lost) == set(streams.values())
    expect(ClosedError, together.receive, timeout=60)
    for out in outs.values():
        out.fail("its link is closed")


def wait_in_thread(
    together: ChunkStreams[ReceivedChunk],
) -> tuple[threading.Thread, list[tuple[ChunkStream[ReceivedChunk], ReceivedChunk | None]]]:
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(together.receive(timeout=60)))
    thread.start()
    return thread, found


def test_the_thread_that_waits_reads_the_socket(sockets: str) -> None:
    with (
        KVLink.serve("shm://together", directory=sockets) as producer,
        KVLink.connect("shm://together", timeout=60, directory=sockets) as consumer,
    ):
        outs, streams = open_both((producer, consumer))
        session = session_of(consumer)
        until(lambda: is_asleep(loop_of(session)), "the link's thread sleeps")
        thread, found = wait_in_thread(ChunkStreams(streams.values()))
        until(lambda: leader_of(session) == thread.ident, "it reads")
        outs["b"].append(chunk(0))
        thread.join()
        assert found[0][0] is streams["b"]
        found.clear()
        end(outs, streams)


def test_streams_of_two_consumers(sockets: str) -> None:
    """Neither keeps the thread from the other one's chunks."""
    connect = partial(KVLink.connect, "shm://two", timeout=60, directory=sockets)
    with (
        KVLink.serve("shm://two", directory=sockets) as producer,
        connect() as one,
        connect() as other,
    ):
        outs = {key: producer.open_stream(key, chunk(0)) for key in "ab"}
        streams = {
            "a": one.read_stream("a", timeout=60),
            "b": other.read_stream("b", timeout=60),
        }
        together = ChunkStreams(streams.values())
        for key in "abba":
            thread, found = wait_in_thread(together)
            until(lambda: bool(together._ready.event._waiting), "it waits")
            outs[key].append(chunk(0))
            thread.join()
            assert found[0][0] is streams[key]
            found.clear()
        together.remove(streams["a"])
        thread, found = wait_in_thread(together)
        session = session_of(other)
        until(lambda: leader_of(session) == thread.ident, "with one link left, it reads itself")
        outs["b"].append(chunk(0))
        thread.join()
        found.clear()
        end(outs, streams)
