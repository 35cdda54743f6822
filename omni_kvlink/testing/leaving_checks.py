"""Checks of readers that leave before the end: what they had not read goes to another one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import TransferFailed, TransferTimeout
from omni_kvlink.testing.append_stream_checks import append, numbered
from omni_kvlink.testing.caches import Recipe, chunk, fingerprint, identify
from omni_kvlink.testing.rig import Rig, expect, receive, wait_all

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import KVConsumer

CHUNKS = [chunk(number, rows) for number, rows in enumerate((3, 1, 0, 700))]
LAYERS = 3
ENDINGS = ("break", "raise", "drop", "release_unread")
"""A reader leaves its loop and then its block, raises an error in the loop, has no block, or says
that it leaves. Of chunks it may also time out, or release the last one before it says so."""


class ReaderError(Exception):
    """The error that a reader raises in its own block."""


def check_a_payload_whose_reader_raises(rig: Rig) -> None:
    """An exception in a reader's block gives the payload back; without a block, a look reads it."""
    producer, consumer = rig.serve(), rig.connect_here()
    data = Recipe("r").make()
    receipt = producer.put(data)
    _raise_in(consumer.get("r", timeout=60))
    consumer.get("r", timeout=60).release_unread()
    consumer.get("r", timeout=60)  # dropped without a look
    until_offered(receipt)
    receive(consumer, receipt, data)
    receipt = producer.put(data)
    received = consumer.get("r", timeout=60)
    assert fingerprint(received.data) == fingerprint(data)
    del received
    receipt.wait(timeout=60)


def check_a_batch_whose_reader_raises(rig: Rig) -> None:
    """Its payloads are left to others, without those that it released before."""
    producer, consumer = rig.serve(), rig.connect_here()
    expected = {key: fingerprint(Recipe(key).make()) for key in "abc"}
    receipts = producer.put_many([Recipe(key).make() for key in expected])
    batch = consumer.get_many(list(expected), timeout=60)
    with contextlib.suppress(ReaderError), batch as payloads:
        assert list(map(fingerprint, payloads)) == list(expected.values())
        batch[1].release()
        raise ReaderError
    del payloads, batch
    receipts[1].wait(timeout=60)
    with consumer.get_many(["c", "a"], timeout=60) as payloads:
        assert list(map(fingerprint, payloads)) == [expected["c"], expected["a"]]
    del payloads
    wait_all(receipts)


def check_layers_that_were_not_taken(rig: Rig) -> None:
    """A cache whose reader left before its last layer is left to another one."""
    producer, consumer = rig.serve(), rig.connect_here()
    data = Recipe("s", layers=LAYERS).make()
    receipt = producer.put(data)
    for ending in ENDINGS:  # an error counts also at the last layer
        _leave(consumer.stream_get("s", timeout=60), ending, LAYERS - 1 - (ending != "raise"))
        until_offered(receipt)
    with consumer.stream_get("s", timeout=60) as stream:
        assert len(list(stream)) == LAYERS
    receipt.wait(timeout=60)
    receipt = producer.put(data)
    assert fingerprint(consumer.stream_get("s", timeout=60).wait()) == fingerprint(data)
    receipt.wait(timeout=60)
    receipt = producer.put(data)
    with consumer.stream_get("s", timeout=60) as stream:
        stream.wait_for_layer(0)
        stream.release()
    receipt.wait(timeout=60)


def check_chunks_that_were_not_taken(rig: Rig) -> None:
    """Wherever and however a reader leaves, the next one goes on; each chunk reaches one."""
    producer, consumer = rig.serve(), rig.connect_here()
    for ending in (*ENDINGS, "time out", "release"):
        for stop in range(len(CHUNKS)):
            with producer.open_stream("g", CHUNKS[0]) as out:
                append(out, CHUNKS[: stop + 1])
                _leave(consumer.read_stream("g", timeout=60), ending, stop)
                append(out, CHUNKS[stop + 1 :])
            # To ask for the next chunk is to have read the one before.
            _read_from(consumer, out.commit(), stop + (ending in ("time out", "release")))


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


def check_nobody_comes_after_a_reader_that_left(rig: Rig) -> None:
    """Then the receipt says so."""
    producer, consumer = rig.serve(), rig.connect_here()
    receipts = [producer.put(Recipe("r", layers=LAYERS).make(), ttl=1.0)]
    _raise_in(consumer.get("r", timeout=60))
    with producer.open_stream("g", CHUNKS[0], ttl=1.0) as out:
        append(out, CHUNKS)
        _leave(consumer.read_stream("g", timeout=60), "break", 2)
    receipts.append(out.commit())
    for receipt in receipts:
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("expired",))
        assert receipt.state == "expired"


def until_offered(receipt: Receipt) -> None:
    """The payload waits for another reader: the one that left has not read it."""
    expect(TransferTimeout, receipt.wait, timeout=0.0)


def _raise_in(received: Any) -> None:
    with contextlib.suppress(ReaderError), received:
        raise ReaderError


def _leave(stream: Any, ending: str, stop: int) -> None:
    """Read as far as layer or chunk `stop`, and leave."""
    block = contextlib.nullcontext() if ending == "drop" else stream
    with contextlib.suppress(ReaderError, TransferTimeout), block:
        for number, received in enumerate(stream):
            if number == stop:
                if ending == "raise":
                    raise ReaderError
                if ending == "release":
                    received.release()
                break
        if ending == "time out":
            stream.receive(timeout=0.0)
        if ending in ("release", "release_unread"):
            stream.release_unread()


def _read_from(consumer: KVConsumer, receipt: Receipt, start: int) -> None:
    """Read what a reader has left; as a new one learns where it begins, which ends no stream."""
    until_offered(receipt)
    if start:
        mentions = ("chunk 0 was released before", f"start={start}")
        expect(TransferFailed, _read_all, consumer, 0, mentions=mentions)
        until_offered(receipt)
    assert _read_all(consumer, start) == numbered(CHUNKS[start:], start)
    receipt.wait(timeout=60)


def _read_all(consumer: KVConsumer, start: int) -> list[tuple[int, str]]:
    with consumer.read_stream("g", timeout=60, start=start) as stream:
        return [identify(received) for received in stream]
