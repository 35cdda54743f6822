"""Checks of readers that leave before the end: what they had not read goes to another one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import TransferFailed, TransferTimeout
from omni_kvlink.testing.caches import Recipe, chunk, fingerprint, identify
from omni_kvlink.testing.growing_checks import append, numbered
from omni_kvlink.testing.rig import Rig, expect, receive, until_freed, wait_all

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import ChunkStream, KVConsumer, ReceivedChunk, ReceivedStream

CHUNKS = [chunk(number, rows) for number, rows in enumerate((3, 1, 0, 700))]
LAYERS = 3


class ReaderError(Exception):
    """The error that a reader raises in its own block."""


def check_a_payload_whose_reader_raises(rig: Rig) -> None:
    """An exception in a reader's block gives the payload back; without a block, a look reads it."""
    producer, consumer = rig.serve(), rig.connect_here()
    data = Recipe("r").make()
    receipt = producer.put(data)
    _raise_in(consumer.get("r", timeout=60))
    consumer.get("r", timeout=60).release_unread()
    _drop_unseen(consumer, "r")
    _until_offered(receipt)
    receive(consumer, receipt, data)
    receipt = producer.put(data)
    received = consumer.get("r", timeout=60)
    assert fingerprint(received.data) == fingerprint(data)
    del received
    receipt.wait(timeout=60)
    until_freed(producer)


def check_the_first_ending_of_a_payload_counts(rig: Rig) -> None:
    """After `release` it is read whatever follows, after `release_unread` it is not."""
    producer, consumer = rig.serve(), rig.connect_here()
    receipt = producer.put(Recipe("r").make())
    with contextlib.suppress(ReaderError), (received := consumer.get("r", timeout=60)) as data:
        kept = data.tensors()
        received.release_unread()
        received.release()
        raise ReaderError
    del data, kept, received
    _until_offered(receipt)
    with contextlib.suppress(ReaderError), (received := consumer.get("r", timeout=60)) as data:
        kept = data.tensors()
        received.release()
        raise ReaderError
    assert not receipt.done, "its tensors are in use"
    del data, kept, received
    receipt.wait(timeout=60)


def check_a_batch_whose_reader_raises(rig: Rig) -> None:
    """Its payloads are left to others, without those that it released before."""
    producer, consumer = rig.serve(), rig.connect_here()
    keys = ["a", "b", "c"]
    receipts = producer.put_many([Recipe(key).make() for key in keys])
    batch = consumer.get_many(keys, timeout=60)
    with contextlib.suppress(ReaderError), batch as payloads:
        assert list(map(fingerprint, payloads)) == [fingerprint(Recipe(k).make()) for k in keys]
        batch[1].release()
        raise ReaderError
    del payloads, batch
    receipts[1].wait(timeout=60)
    with consumer.get_many(["c", "a"], timeout=60) as payloads:
        assert list(map(fingerprint, payloads)) == [fingerprint(Recipe(k).make()) for k in "ca"]
    del payloads
    wait_all(receipts)


def check_layers_that_were_not_taken(rig: Rig) -> None:
    """A cache whose reader left before its last layer is left to another one."""
    producer, consumer = rig.serve(), rig.connect_here()
    recipe = Recipe("s", layers=LAYERS)
    receipt = producer.put(recipe.make())
    for leave in (_break_layers, _raise_at_last_layer, _drop_layers):
        leave(consumer)
        _until_offered(receipt)
    expected = fingerprint(recipe.make())
    for number, take in enumerate((_take_layers, _take_whole, _release_after_one)):
        if number:
            receipt = producer.put(recipe.make())
        take(consumer, expected)
        receipt.wait(timeout=60)
    until_freed(producer)


def check_chunks_that_were_not_taken(rig: Rig) -> None:
    """Wherever and however a reader leaves, the next one goes on; each chunk reaches one."""
    producer, consumer = rig.serve(), rig.connect_here()
    for leave in (_break_chunks, _raise_in_chunk, _time_out, _drop_chunks):
        for stop in range(len(CHUNKS)):
            with producer.open_stream("g", CHUNKS[0]) as out:
                append(out, CHUNKS[: stop + 1])
                leave(consumer, stop)
                append(out, CHUNKS[stop + 1 :])
            # To ask for the next chunk is to have read the one before.
            _read_from(consumer, out.commit(), stop + (leave is _time_out))
    until_freed(producer)


def check_a_chunk_that_was_given_back(rig: Rig) -> None:
    """A stream of which a chunk was given back was not read, also at its end."""
    producer, consumer = rig.serve(), rig.connect_here()
    for stop in range(len(CHUNKS)):
        with producer.open_stream("g", CHUNKS[0]) as out:
            append(out, CHUNKS)
        with consumer.read_stream("g", timeout=60) as stream:
            for received in stream:
                if received.number == stop:
                    _raise_in(received)
            assert stream.count == len(CHUNKS)
        _read_from(consumer, out.commit(), stop)
    until_freed(producer)


def check_nobody_comes_after_a_reader_that_left(rig: Rig) -> None:
    """Then the receipt says so."""
    producer, consumer = rig.serve(), rig.connect_here()
    data = Recipe("r", layers=LAYERS).make()
    receipts = [producer.put(data, ttl=1.0)]
    _raise_in(consumer.get("r", timeout=60))
    with producer.open_stream("g", CHUNKS[0], ttl=1.0) as out:
        append(out, CHUNKS)
        _break_chunks(consumer, 2)
    receipts.append(out.commit())
    for receipt in receipts:
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("expired",))
        assert receipt.state == "expired"
    until_freed(producer)


def _until_offered(receipt: Receipt) -> None:
    """The payload waits for another reader: the one that left has not read it."""
    expect(TransferTimeout, receipt.wait, timeout=0.0)


def _raise_in(received: Any) -> None:
    with contextlib.suppress(ReaderError), received:
        raise ReaderError


def _drop_unseen(consumer: KVConsumer, key: str) -> None:
    """Receive a payload, and drop it without a look."""
    consumer.get(key, timeout=60)


def _break_layers(consumer: KVConsumer) -> None:
    with consumer.stream_get("s", timeout=60) as stream:
        for layer in stream:
            if layer.index == LAYERS - 2:
                break


def _raise_at_last_layer(consumer: KVConsumer) -> None:
    with contextlib.suppress(ReaderError), consumer.stream_get("s", timeout=60) as stream:
        for layer in stream:
            if layer.index == LAYERS - 1:
                raise ReaderError


def _drop_layers(consumer: KVConsumer) -> None:
    for layer in consumer.stream_get("s", timeout=60):
        if layer.index == LAYERS - 2:
            break


def _take_layers(consumer: KVConsumer, expected: str) -> None:
    with consumer.stream_get("s", timeout=60) as stream:
        assert len(list(stream)) == LAYERS


def _take_whole(consumer: KVConsumer, expected: str) -> None:
    stream: ReceivedStream = consumer.stream_get("s", timeout=60)
    assert fingerprint(stream.wait()) == expected


def _release_after_one(consumer: KVConsumer, expected: str) -> None:
    with consumer.stream_get("s", timeout=60) as stream:
        stream.wait_for_layer(0)
        stream.release()


def _break_chunks(consumer: KVConsumer, stop: int) -> None:
    with consumer.read_stream("g", timeout=60) as stream:
        for received in stream:
            if received.number == stop:
                break


def _raise_in_chunk(consumer: KVConsumer, stop: int) -> None:
    with contextlib.suppress(ReaderError), consumer.read_stream("g", timeout=60) as stream:
        for received in stream:
            if received.number == stop:
                raise ReaderError


def _time_out(consumer: KVConsumer, stop: int) -> None:
    with contextlib.suppress(TransferTimeout), consumer.read_stream("g", timeout=60) as stream:
        for _ in range(stop + 1):
            assert stream.receive() is not None
        stream.receive(timeout=0.0)


def _drop_chunks(consumer: KVConsumer, stop: int) -> None:
    for received in consumer.read_stream("g", timeout=60):
        if received.number == stop:
            break


def _read_from(consumer: KVConsumer, receipt: Receipt, start: int) -> None:
    """Read what a reader has left; as a new one learns where it begins, which ends no stream."""
    _until_offered(receipt)
    if start:
        expect(TransferFailed, _read_all, consumer, 0, mentions=(f"start={start}",))
        _until_offered(receipt)
    assert _read_all(consumer, start) == numbered(CHUNKS[start:], start)
    receipt.wait(timeout=60)


def _read_all(consumer: KVConsumer, start: int) -> list[tuple[int, str]]:
    stream: ChunkStream[ReceivedChunk] = consumer.read_stream("g", timeout=60, start=start)
    with stream:
        return [identify(received) for received in stream]
