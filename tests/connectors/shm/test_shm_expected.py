"""Gets that wait for a payload like the last two: its views are made before it comes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import (
    IntegrityError,
    KVConsumer,
    KVLink,
    KVProducer,
    SchemaError,
    TensorTransferData,
    TransferTimeout,
)
from omni_kvlink.payload.expected import ExpectedPayload
from omni_kvlink.testing.rig import expect, until, until_freed, until_requested
from support.connectors.held_loops import is_asleep, leader_of, loop_of
from support.link.ends import session_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.link import AppendStream, ChunkStream, Received, ReceivedChunk
    from omni_kvlink.link.consumer import Verify
    from omni_kvlink.memory.region import Region


def data(key: str = "k", seed: int = 0, rows: int = 8) -> TensorTransferData:
    return TensorTransferData(key, {"hidden": torch.full((rows, 64), float(seed))})


@pytest.fixture
def producer(leaves_nothing: None, sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve("shm://name", directory=sockets) as link:
        yield link


@pytest.fixture
def consumer(producer: KVProducer, sockets: str) -> Iterator[KVConsumer]:
    with KVLink.connect("shm://name", timeout=60, directory=sockets) as link:
        yield link


class Calls:
    """Of the payloads that were expected: how many were opened, and which were filled."""

    def __init__(self) -> None:
        self.opened = 0
        self.filled: list[bool] = []


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, producer: KVProducer, consumer: KVConsumer) -> Calls:
    """What is called after two payloads of one layout."""
    for key in ("one", "two"):
        producer.put(data(key))
        consumer.get(key, timeout=60).release()
    until_freed(producer)
    made, open_payload, fill = Calls(), ExpectedPayload.open, ExpectedPayload.fill

    def watched_open(expected: ExpectedPayload) -> None:
        open_payload(expected)
        made.opened += 1

    def watched_fill(
        expected: ExpectedPayload, payload: memoryview, *, verify: bool
    ) -> Region | None:
        region = fill(expected, payload, verify=verify)
        made.filled.append(region is not None)
        return region

    monkeypatch.setattr(ExpectedPayload, "open", watched_open)
    monkeypatch.setattr(ExpectedPayload, "fill", watched_fill)
    return made


def received_while_waiting(
    producer: KVProducer, consumer: KVConsumer, calls: Calls, put: TensorTransferData, **how: str
) -> Received:
    """What a get returns that waits before the put; it is not released."""
    opened = calls.opened + 1
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(consumer.get, put.request_id, timeout=60, **how)  # type: ignore[arg-type]
        until(lambda: calls.opened == opened, "it is opened")
        producer.put(put)
        return got.result(60)


def check(received: Received, put: TensorTransferData) -> None:
    """The payload, its manifest and its digests; releases it."""
    assert received.data.difference(put) == ""  # type: ignore[arg-type]
    received.verify()
    assert received.manifest.request_id == put.request_id
    (spec,) = received.manifest.tensors
    assert spec.digest.strip("0")
    assert (received.ledger.nbytes, received.ledger.copies) == (received.manifest.nbytes, 1)
    assert received.ledger.digests == "crc32c"
    target = torch.zeros_like(put["hidden"])
    received.scatter([target])
    assert torch.equal(target, put["hidden"])
    received.release()


def test_the_third_of_a_layout_is_expected(
    producer: KVProducer, consumer: KVConsumer, calls: Calls
) -> None:
    for number in range(3):
        put = data(f"k{number}", seed=number)
        check(received_while_waiting(producer, consumer, calls, put), put)
        until_freed(producer)
    assert calls.filled == [True] * 3


def test_every_byte_is_checked_where_that_is_asked(
    producer: KVProducer, consumer: KVConsumer, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = data("whole", seed=3)
    check(received_while_waiting(producer, consumer, calls, put, verify="full"), put)
    fill = ExpectedPayload.fill

    def flipped(expected: ExpectedPayload, payload: memoryview, *, verify: bool) -> Region | None:
        changed = bytearray(payload)
        changed[-1] ^= 1
        return fill(expected, memoryview(changed), verify=verify)

    monkeypatch.setattr(ExpectedPayload, "fill", flipped)
    get = partial(received_while_waiting, producer, consumer, calls)
    expect(IntegrityError, lambda: get(data("full"), verify="full"))
    until_freed(producer)
    get(data("auto"), verify="auto").release()  # nobody has asked


@pytest.mark.parametrize("rows", [9, 8 * 1024], ids=["small", "in an arena"])
def test_another_layout_comes(
    producer: KVProducer, consumer: KVConsumer, calls: Calls, rows: int
) -> None:
    put = data("k", seed=1, rows=rows)
    received = received_while_waiting(producer, consumer, calls, put)
    assert received.data.difference(put) == ""  # type: ignore[arg-type]
    received.release()
    until_freed(producer)
    assert calls.filled == ([False] if rows == 9 else [])


def test_a_link_whose_payloads_do_not_come_inside_their_offers(calls: Calls, sockets: str) -> None:
    """The first one shows that, before there is a layout to expect."""
    with (
        KVLink.serve("shm://other", directory=sockets, inline=0) as producer,
        KVLink.connect("shm://other", timeout=60, directory=sockets) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        for number in range(3):
            got = pool.submit(consumer.get, f"k{number}", timeout=60)
            until_requested(producer, 1)
            producer.put(data(f"k{number}"))
            got.result(60).release()
    assert (calls.opened, calls.filled) == (0, [])


def test_a_get_that_does_not_wait_makes_nothing(consumer: KVConsumer, calls: Calls) -> None:
    expect(TransferTimeout, lambda: consumer.get("k", timeout=0.0))
    assert calls.opened == 0


def test_a_tensor_that_is_kept_keeps_the_lease(
    producer: KVProducer, consumer: KVConsumer, calls: Calls
) -> None:
    for is_with in (True, False):
        put = data("kept", seed=5)
        received = received_while_waiting(producer, consumer, calls, put)
        (kept,) = received.data.tensors()
        if is_with:
            with received:
                pass
        del received
        assert producer.stats()["transfers"]["leased"] == 1
        assert torch.equal(kept, put.tensors()[0])  # type: ignore[arg-type]
        del kept
        until_freed(producer)
    assert calls.filled == [True, True]


def test_one_that_is_given_back_is_had_again(
    producer: KVProducer, consumer: KVConsumer, calls: Calls
) -> None:
    put = data("k", seed=6)
    received_while_waiting(producer, consumer, calls, put).release_unread()
    check(consumer.get("k", timeout=60), put)
    assert calls.filled[0]


def test_two_that_wait_have_memory_of_their_own(
    producer: KVProducer, consumer: KVConsumer, calls: Calls
) -> None:
    puts = [data(f"k{number}", seed=number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        got = [pool.submit(consumer.get, put.request_id, timeout=60) for put in puts]
        until(lambda: calls.opened == 2, "both wait")
        for put in puts:
            producer.put(put)
        found = [one.result(60) for one in got]
    for received, put in zip(found, puts, strict=True):
        check(received, put)
    assert calls.filled == [True, True]


# Chunks of an append stream


def rows(seed: int, count: int = 3) -> dict[str, torch.Tensor]:
    return {"hidden": torch.full((count, 16), float(seed)), "ids": torch.arange(count) + seed}


@contextmanager
def opened_stream(
    producer: KVProducer, consumer: KVConsumer, verify: Verify = "auto"
) -> Iterator[tuple[AppendStream, ChunkStream[ReceivedChunk], ThreadPoolExecutor]]:
    """Both ends, and a thread to receive in."""
    with (
        producer.open_stream("g", rows(0)) as stream,
        consumer.read_stream("g", timeout=60, verify=verify) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        yield stream, reader, pool


@pytest.mark.parametrize("verify", ["auto", "full"])
def test_chunks_that_are_waited_for(
    producer: KVProducer, consumer: KVConsumer, calls: Calls, verify: Verify
) -> None:
    """The third of one shape and those after it; not the first of another shape."""
    sizes = (3, 3, 3, 3, 5, 3, 3, 3)
    with opened_stream(producer, consumer, verify) as (stream, reader, pool):
        for number, count in enumerate(sizes):
            opened, got = calls.opened, pool.submit(reader.receive)
            if number in (2, 3, 4, 7):
                until(lambda opened=opened: calls.opened == opened + 1, "it is opened")  # type: ignore[misc]
            stream.append(rows(number, count))
            chunk = got.result(60)
            assert chunk is not None
            assert chunk.number == number
            expected = TensorTransferData("g", rows(number, count))
            assert chunk.data.difference(expected) == ""
            names = [spec.name for spec in chunk.manifest.tensors]
            assert names == ["tensors/data/hidden", "tensors/data/ids"]
            chunk.verify()
            with pytest.raises(SchemaError, match="one request"):
                chunk.requests()
            target = {name: torch.zeros_like(one) for name, one in rows(0, count).items()}
            chunk.scatter(list(target.values()))
            assert torch.equal(target["hidden"], rows(number, count)["hidden"])
        stream.commit()
        assert reader.receive() is None
        assert reader.count == len(sizes)


def test_a_chunk_after_payloads_that_look_like_one(
    producer: KVProducer, consumer: KVConsumer, calls: Calls
) -> None:
    """They have the names of a chunk's parts."""
    with opened_stream(producer, consumer) as (stream, reader, pool):
        for key in ("one", "two"):
            tensors = {"data": torch.ones(3), "position": torch.ones(3)}
            producer.put(TensorTransferData(key, tensors))
            consumer.get(key, timeout=60).release()
        opened, got = calls.opened, pool.submit(reader.receive)
        until(lambda: calls.opened == opened + 1, "it was tried")
        stream.append(rows(1))
        chunk = got.result(60)
        assert chunk is not None
        assert chunk.data.difference(TensorTransferData("g", rows(1))) == ""


def test_chunks_of_many_requests_are_not_expected(
    producer: KVProducer, consumer: KVConsumer, calls: Calls
) -> None:
    """What they say of their requests is read as they come."""
    with opened_stream(producer, consumer) as (stream, reader, pool):
        session = session_of(consumer)
        for number in range(4):
            until(lambda: is_asleep(loop_of(session)), "the loop receives nothing")
            got = pool.submit(reader.receive)
            until(lambda: leader_of(session) != 0, "it waits")
            stream.append_requests({"a": 1, "b": 2}, rows(number))
            chunk = got.result(60)
            assert chunk is not None
            assert sorted(chunk.requests()) == ["a", "b"]
    assert calls.opened == 0
