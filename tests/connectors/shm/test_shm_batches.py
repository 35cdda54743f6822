"""Over shared memory, what is put or got together travels together."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    CapacityError,
    DuplicateKeyError,
    KVConsumer,
    KVLink,
    KVProducer,
    TensorTransferData,
    TransferFailed,
)
from omni_kvlink.connectors.protocol.messages import (
    INLINE,
    Cancel,
    Get,
    Memory,
    Release,
    Retire,
    encode_all,
)
from omni_kvlink.connectors.shm.channel import ShmChannel
from omni_kvlink.link.producer import PAYLOADS_PER_TURN
from omni_kvlink.link.put_operation import CopiedPut
from omni_kvlink.lowlevel import begin_gets
from omni_kvlink.payload.manifest import Layout
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import until, until_freed, until_requested
from support.connectors.held_loops import loop_of
from support.connectors.shm_unauthorized import greeted
from support.link.ends import end_of, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink.connectors.protocol.messages import Message
    from omni_kvlink.payload.manifest import Manifest

# Reaches into _reserving: whose turn it is to reserve shows in nothing but who gets memory first.

pytestmark = pytest.mark.usefixtures("leaves_nothing")
KEYS = [f"k{number}" for number in range(64)]
ROWS = torch.arange(64 * 256, dtype=torch.float32).view(64, 256)


def payloads() -> list[TensorTransferData]:
    pairs = zip(KEYS, ROWS, strict=True)
    return [TensorTransferData(key, {"hidden": row}) for key, row in pairs]


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.fixture
def datagrams(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many datagrams with messages of each kind were received, by either side.

    "both" are those with a Get and a Release.
    """
    counts, receive, peek = Counter[str](), ShmChannel.receive, ShmChannel.peek
    lock = threading.Lock()  # the threads of both sides count

    def count(messages: Sequence[Message]) -> None:
        kinds = {type(message).__name__ for message in messages}
        with lock:
            counts.update(kinds)
            counts["both"] += {"Get", "Release"} <= kinds

    def receiving(channel: ShmChannel, turn: float = float("inf")) -> Iterator[Any]:
        for messages, fd in receive(channel, turn):
            count(messages)
            yield messages, fd

    def peeking(channel: ShmChannel) -> list[Message]:
        messages = peek(channel)
        count(messages)
        return messages

    monkeypatch.setattr(ShmChannel, "receive", receiving)
    monkeypatch.setattr(ShmChannel, "peek", peeking)
    return counts


@pytest.fixture(params=[0, INLINE], ids=["arena", "inline"])
def ends(
    request: pytest.FixtureRequest, sockets: str, datagrams: Counter[str]
) -> Iterator[tuple[KVProducer, KVConsumer]]:
    """Opened once datagrams are counted: a loop that receives would go on uncounted."""
    with (
        KVLink.serve("shm://batch", directory=sockets, inline=request.param) as producer,
        KVLink.connect("shm://batch", directory=sockets, timeout=60) as consumer,
    ):
        yield producer, consumer


def test_what_a_thread_releases_is_sent_by_it(
    ends: tuple[KVProducer, KVConsumer],
    datagrams: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A payload's release at once, those of a batch together; the loop is not woken for them."""
    producer, consumer = ends
    receipts = producer.put_many(payloads())
    calls, loop, received = (
        list[object](),
        loop_of(session_of(consumer)),
        consumer.get(KEYS[0], timeout=60),
    )
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call", calls.append)
        received.release()
        receipts[0].wait(timeout=60)
        with consumer.get_many(KEYS[1:], timeout=60) as data:
            del data
        for receipt in receipts:
            receipt.wait(timeout=60)
    assert datagrams["Release"] == 2
    assert not calls


def test_a_payload_that_was_released_keeps_no_session(sockets: str) -> None:
    """Nor the session's descriptor, once the link is closed."""
    with (
        KVLink.serve("shm://kept", directory=sockets) as producer,
        KVLink.connect("shm://kept", directory=sockets, timeout=60) as consumer,
    ):
        producer.put(payloads()[0])
        producer.put(payloads()[1])
        session, received = weakref.ref(session_of(consumer)), consumer.get(KEYS[0], timeout=60)
        batch = consumer.get_many(KEYS[1:2], timeout=60)
        received.release()
        batch.release()
    del consumer
    until(lambda: session() is None, "the session is gone")
    assert received.manifest.request_id == KEYS[0]
    assert len(batch) == 1


def test_a_chunk_is_released_with_the_next_request(
    ends: tuple[KVProducer, KVConsumer], datagrams: Counter[str]
) -> None:
    producer, consumer = ends
    with producer.open_stream("s", {"hidden": ROWS[:1]}) as out:
        for row in ROWS[:16]:
            out.append({"hidden": row[None]})
        with consumer.read_stream("s", timeout=60) as stream:
            assert stream.receive() is not None
            until(lambda: datagrams["Get"] == 5, "the stream and four chunks are requested")
            datagrams.clear()
            for _ in range(8):
                # An offer that came between the two would have the release sent before it.
                gets = list(stream._requested.values())
                until(lambda gets=gets: all(get.future.done() for get in gets), "offers came")  # type: ignore[misc]
                assert stream.receive() is not None
            until(lambda: datagrams["Get"] == 8, "the next chunks are requested")
            assert datagrams["both"] == 8
            assert datagrams["Release"] == 8


def test_64_payloads_are_a_few_datagrams(
    ends: tuple[KVProducer, KVConsumer], datagrams: Counter[str]
) -> None:
    """One for the requests, and one or, of inline payloads, as many as hold them for the offers."""
    producer, consumer = ends
    pending = begin_gets(consumer, KEYS, timeout=60)
    until_requested(producer, 64)
    assert datagrams["Get"] == 1
    receipts = producer.put_many(payloads())
    for get in pending:
        get.wait(timeout=60).release()
    assert datagrams["Offer"] <= 3
    # That they are being written is told only of those that may have to wait for memory.
    is_inline = bool(end_of(producer).inline_limit)
    assert datagrams["Status"] == (0 if is_inline else 1)
    pending.clear()
    del get
    for receipt in receipts:
        receipt.wait(timeout=60)
    until_freed(producer)


def test_a_manifest_of_a_known_layout_is_made_when_it_is_asked_for(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of tensors by name, that is; each is of its own payload."""
    producer, consumer = ends
    producer.put_many(payloads()[:2])
    consumer.get_many(KEYS[:2], timeout=60).release()
    until_freed(producer)
    made, make = list[str](), Layout.manifest

    def watched(self: Layout, request_id: str, text: bytes) -> Manifest:
        made.append(request_id)
        return make(self, request_id, text)

    monkeypatch.setattr(Layout, "manifest", watched)
    receipts = producer.put_many(payloads())
    received = consumer.get_many(KEYS, timeout=60)
    for row, one in zip(ROWS, received, strict=True):
        assert isinstance(one.data, TensorTransferData)
        assert torch.equal(one.data["hidden"], row)
        assert (list(one.data), one.data.metadata) == (["hidden"], {})
    assert made == []
    for row, receipt, one in zip(ROWS, receipts, received, strict=True):
        (spec,) = one.manifest.tensors
        assert (one.manifest.request_id, spec.shape) == (receipt.key, tuple(row.shape))
        assert one.ledger.nbytes == receipt.ledger.nbytes
        one.verify()
    assert made == KEYS
    received.release()


def test_a_known_layout_is_opened_as_what_was_put(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    row = ROWS[0]
    empty, deep = row[:0], {"a": [row, row[:3]], "b": row[5]}
    for turn in range(3):
        put = [
            TensorTransferData("plain", {"a": row + turn, "b": empty, "c": row[turn]}),
            TensorTransferData("metadata", {"a": row}, {"turn": 7}),
            TensorTransferData("nested", deep),
            Recipe("cache", layers=2, tokens=3).make(),
        ]
        producer.put_many(put)
        keys = [one.request_id for one in put]
        with consumer.get_many(keys, timeout=60) as received:
            for one, other in zip(put, received, strict=True):
                assert type(one) is type(other)
                assert one.difference(other) == ""  # type: ignore[arg-type]
        del received, other
        until_freed(producer)


def test_releases_travel_together(
    ends: tuple[KVProducer, KVConsumer], datagrams: Counter[str]
) -> None:
    producer, consumer = ends
    receipts = producer.put_many(payloads())
    with consumer.get_many(KEYS, timeout=60) as data:
        for one, row in zip(data, ROWS, strict=True):
            assert isinstance(one, TensorTransferData)
            assert torch.equal(one["hidden"], row)
        del data, one
        loop, blocked, go_on = loop_of(session_of(consumer)), threading.Event(), threading.Event()
        loop.call(blocked.set)
        loop.call(partial(wait_for, go_on))
        assert blocked.wait(60)
    go_on.set()
    for receipt in receipts:
        receipt.wait(timeout=60)
    assert datagrams["Release"] == 1
    until_freed(producer)


def test_an_unauthorized_batch(sockets: str) -> None:
    """A peer that mixes what it may not send with what it may is disconnected; others go on."""
    with KVLink.serve("shm://batch", directory=sockets) as producer:
        producer.put(payloads()[0])
        for wrong in (Memory(0, 4096), Retire(0)):
            with greeted(producer.stats()["socket"]) as peer:
                peer.send(encode_all([Cancel(1), wrong])[0])
                until(lambda: producer.stats()["readers"] == 0, "it is disconnected")
        with (
            KVLink.connect("shm://batch", directory=sockets, timeout=60) as consumer,
            consumer.get(KEYS[0], timeout=60) as data,
        ):
            assert isinstance(data, TensorTransferData)
            assert torch.equal(data["hidden"], ROWS[0])
        del data
        assert producer.stats()["refused"] == {"bad message": 2}
        until_freed(producer)


def test_a_release_among_others_is_of_its_own_lease(sockets: str) -> None:
    """A batch that releases what its peer does not hold changes nothing."""
    with (
        KVLink.serve("shm://batch", directory=sockets) as producer,
        KVLink.connect("shm://batch", directory=sockets, timeout=60) as consumer,
    ):
        receipt = producer.put(payloads()[0])
        held = consumer.get(KEYS[0], timeout=60)
        with greeted(producer.stats()["socket"]) as peer:
            peer.send(encode_all([Release(1, 1, "read"), Release(1, 2, "read"), Get(1, "x")])[0])
            until(lambda: producer.stats()["transfers"]["stale"] == 2, "they were handled")
            assert not receipt.done
        held.release()
        receipt.wait(timeout=60)


def test_offers_of_one_batch_are_received_by_those_who_wait(
    ends: tuple[KVProducer, KVConsumer],
) -> None:
    """One thread receives the batch; the gets of others end, too."""
    producer, consumer = ends
    first, second = (begin_gets(consumer, keys, timeout=60) for keys in (KEYS[:32], KEYS[32:]))
    until_requested(producer, 64)
    producer.put_many(payloads())
    first[0].wait(timeout=60).release()
    until(lambda: all(get.future.done() for get in second), "all were offered")
    for get in (*first[1:], *second):
        get.wait(timeout=60).release()
    first.clear()
    second.clear()
    del get
    until_freed(producer)


def test_readers_are_answered_while_a_batch_is_packed(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVLink.serve("shm://batch", directory=sockets, inline=INLINE) as producer:
        given = list[None]()
        loop = end_of(producer).loop
        monkeypatch.setattr(loop, "give_way", lambda: given.append(None))
        producer.put_many(payloads())
        assert len(given) == 64 // PAYLOADS_PER_TURN


def test_a_batch_with_a_key_that_is_taken_puts_nothing(
    ends: tuple[KVProducer, KVConsumer],
) -> None:
    """And its memory is free again."""
    producer, _ = ends
    producer.put(payloads()[-1])
    used = producer.stats()["memory"]["used"]
    with pytest.raises(DuplicateKeyError):
        producer.put_many(payloads())
    assert producer.stats()["transfers"]["live"] == 1
    assert producer.stats()["memory"]["used"] == used


def test_packed_payloads_beside_one_that_cannot_be_copied_keep_no_quota(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    producer, _ = ends
    large = TensorTransferData("large", {"hidden": torch.ones(INLINE)})
    with monkeypatch.context() as patch:
        patch.setattr(CopiedPut, "fill", fail)
        with pytest.raises(MemoryError):
            producer.put_many([*payloads()[:2], large])
    stats = producer.stats()
    assert (stats["memory"]["used"], stats["transfers"]["live"]) == (0, 0)
    producer.put_many([*payloads()[:2], large])


def test_payloads_before_an_error_are_free_while_the_error_is_kept(
    ends: tuple[KVProducer, KVConsumer],
) -> None:
    """The error's traceback keeps the frame that received them."""
    producer, consumer = ends
    receipts = producer.put_many(payloads()[:2])
    producer.fail("missing", "it was not computed")
    with pytest.raises(TransferFailed, match="not computed") as kept:
        consumer.get_many([*KEYS[:2], "missing"], timeout=60)
    with consumer.get_many(KEYS[:2], timeout=60) as received:
        for data, row in zip(received, ROWS[:2], strict=True):
            assert torch.equal(data.tensors()[0], row)  # type: ignore[arg-type]
    del received
    for receipt in receipts:
        receipt.wait(timeout=60)
    assert kept.tb is not None


def test_one_call_at_a_time_waits_for_memory(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Two that each have a part of what they need would wait for each other."""
    producer, _ = ends
    with ThreadPoolExecutor(1) as pool, end_of(producer)._reserving:
        rows = torch.zeros(INLINE, dtype=torch.uint8)  # too long to travel inside an offer
        large = [TensorTransferData(key, {"hidden": rows}) for key in KEYS]
        waiting = pool.submit(producer.put_many, large, timeout=0.0)
        with pytest.raises(CapacityError, match="another put_many"):
            waiting.result(60)
    assert not producer.stats()["transfers"]["live"]


def test_batches_of_packed_and_copied_payloads_do_not_wait_for_each_other(sockets: str) -> None:
    """Each needs more than half of the quota: the one that waits has no part of it."""

    class Turn:
        def __init__(self, lock: Any):
            self._lock, self.waiting, self.begin = lock, Counter[str](), threading.Event()
            self.release = lock.release

        def acquire(self, timeout: float) -> bool:
            self.waiting["batches"] += 1
            self.begin.wait()
            return bool(self._lock.acquire(timeout=timeout))

    def batch(name: str) -> list[TensorTransferData]:
        small = [TensorTransferData(f"{name}{n}", {"h": torch.ones(8000)}) for n in range(60)]
        return [*small, TensorTransferData(f"{name}-large", {"h": torch.ones(3 << 18)})]

    with (
        KVLink.serve("shm://mixed", directory=sockets, quota=6 << 20) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
        ThreadPoolExecutor(4) as pool,
    ):
        end = end_of(producer)
        end._reserving = turn = Turn(end._reserving)
        calls = [pool.submit(producer.put_many, batch(name), timeout=30) for name in "ab"]
        until(lambda: turn.waiting["batches"] == 2, "both batches wait for their turn")
        turn.begin.set()
        get: Any = lambda keys: consumer.get_many(keys, timeout=60).release()  # noqa: E731
        for name in "ab":
            keys = [data.request_id for data in batch(name)]
            calls.append(pool.submit(get, keys))
        for call in calls:
            call.result(60)


def test_readers_of_small_payloads_learn_that_these_wait_for_memory(sockets: str) -> None:
    with (
        KVLink.serve("shm://full", directory=sockets, inline=INLINE, quota=2 << 20) as producer,
        KVLink.connect("shm://full", directory=sockets, timeout=60) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        nearly_all = torch.zeros((2 << 20) - (16 << 10), dtype=torch.uint8)
        producer.put(TensorTransferData("large", {"hidden": nearly_all}))
        pending = begin_gets(consumer, KEYS, timeout=60)
        until_requested(producer, 64)
        put = pool.submit(producer.put_many, payloads(), timeout=60)
        gets: list[Any] = pending
        until(lambda: all("still writing" in get.phase for get in gets), "each was told")
        consumer.get("large", timeout=60).release()
        put.result(60)
        for get in pending:
            get.wait(timeout=60).release()
