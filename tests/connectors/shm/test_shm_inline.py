"""Small payloads that travel inside their offers, and gets that receive in their own thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from omni_kvlink import (
    CapacityError,
    DuplicateKeyError,
    KVConsumer,
    KVLink,
    KVProducer,
    SchemaError,
    TensorTransferData,
    TransferTimeout,
)
from omni_kvlink.connectors.protocol.messages import INLINE, Get, Message, Offer, Release
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.rig import expect, until, until_freed, until_requested
from support.connectors.held_loops import is_asleep, leader_of, loop_of
from support.connectors.shm_unauthorized import greeted
from support.link.ends import end_of, session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.connectors.protocol.get_table import GetState
    from omni_kvlink.connectors.shm.consumer import ShmSession

# Reaches into _on_events_in_loop, _on_messages, _receiving, _watch_channel: which thread receives
# is not public, and neither is what wakes the loop.

pytestmark = pytest.mark.usefixtures("leaves_nothing")
QUOTA = 2 << 20


def data(key: str = "k", nbytes: int = 4096) -> TensorTransferData:
    return TensorTransferData(key, {"hidden": torch.arange(nbytes, dtype=torch.uint8)})


@pytest.fixture
def producer(sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve("shm://name", directory=sockets, inline=INLINE, quota=QUOTA) as link:
        yield link


@pytest.fixture
def consumer(producer: KVProducer, sockets: str) -> Iterator[KVConsumer]:
    with KVLink.connect("shm://name", timeout=60, directory=sockets) as link:
        yield link


def memory(producer: KVProducer) -> dict[str, Any]:
    found: dict[str, Any] = producer.stats()["memory"]
    return found


# What travels


def test_the_padding_of_a_payload_is_zero(producer: KVProducer, sockets: str) -> None:
    """Also in memory where an earlier payload was put together."""
    many, ones = (torch.full((count,), 255, dtype=torch.uint8) for count in (8192, 3))
    producer.put(TensorTransferData("before", {"many": many}))
    producer.put(TensorTransferData("k", {"a": ones, "b": ones}))
    with greeted(f"{sockets}/name.sock") as peer:
        peer.send(Get(1, "k"))
        offer, _ = peer.receive()
        assert isinstance(offer, Offer)
        header = int.from_bytes(offer.inline[:8], "little") + 8
        assert sum(bytes(offer.inline[header:])) == 6 * 255


def test_an_offer_holds_the_payload(producer: KVProducer, sockets: str) -> None:
    receipt = producer.put(data())
    with greeted(f"{sockets}/name.sock") as peer:
        peer.send(Get(1, "k"))
        offer, descriptors = peer.receive()
        assert isinstance(offer, Offer)
        assert not descriptors
        tensors = safetensors.torch.load(bytes(offer.inline))
        assert torch.equal(tensors["tensors/hidden"], data()["hidden"])
        peer.send(Release(1, offer.epoch, "read"))
        receipt.wait(timeout=60)


@pytest.mark.parametrize("nbytes", [0, 1, 20_000, INLINE - 512, INLINE, 3 * INLINE])
def test_each_size_arrives_aligned(producer: KVProducer, consumer: KVConsumer, nbytes: int) -> None:
    """Beyond the limit by the link's memory, of which the reader has no copy."""
    receipt = producer.put(data(nbytes=nbytes))
    received = consumer.get("k", timeout=60, verify="full")
    with received as found:
        assert isinstance(found, TensorTransferData)
        assert found.difference(data(nbytes=nbytes)) == ""
        assert nbytes == 0 or found["hidden"].data_ptr() % 256 == 0
    assert received.ledger.copies == int(receipt.ledger.nbytes <= INLINE)
    del received, found
    receipt.wait(timeout=60)


def test_the_header_counts_for_the_limit(sockets: str) -> None:
    """Also of the second payload, whose layout is known."""
    with (
        KVLink.serve("shm://limit", directory=sockets, inline=INLINE) as producer,
        KVLink.connect("shm://limit", timeout=60, directory=sockets) as consumer,
    ):
        for key in ("a", "b"):
            producer.put(data(key, INLINE - 100))
            received = consumer.get(key, timeout=60)
            with received as found:
                assert found.difference(data(key, INLINE - 100)) == ""  # type: ignore[arg-type]
            assert received.ledger.copies == 0
            del found, received


def test_tensors_of_a_known_layout_may_lie_otherwise(
    producer: KVProducer, consumer: KVConsumer
) -> None:
    """A payload that cannot be packed at once, or must not be put at all, after one that was."""
    dense = torch.arange(64, dtype=torch.int16).view(8, 8)
    producer.put(TensorTransferData("dense", {"x": dense}))
    for key in ("strided", "again"):
        producer.put(TensorTransferData(key, {"x": dense.t()}))
    for key, tensor in (("dense", dense), ("strided", dense.t()), ("again", dense.t())):
        with consumer.get(key, timeout=60) as found:
            assert isinstance(found, TensorTransferData)
            assert torch.equal(found["x"], tensor)
    blank = TensorTransferData.blank("blank", {"x": dense})
    expect(SchemaError, lambda: producer.put(blank))
    expect(SchemaError, lambda: producer.put_many([blank]))


def test_allocated_memory_is_used_for_a_known_layout(
    producer: KVProducer, consumer: KVConsumer
) -> None:
    producer.put(data("before"))
    consumer.get("before", timeout=60).release()
    for put in (producer.put, lambda payload: producer.put_many([payload])[0]):
        allocation = producer.allocate(data("k"))
        target = allocation.data.tensors()[0]
        assert isinstance(target, torch.Tensor)
        target.copy_(data()["hidden"])
        receipt = put(TensorTransferData("k", {"hidden": target}))
        assert receipt.ledger.copies == 0
        del target, allocation
        with consumer.get("k", timeout=60) as found:
            assert found.difference(data()) == ""  # type: ignore[arg-type]
        del found
        receipt.wait(timeout=60)


def test_it_counts_against_the_quota(producer: KVProducer, consumer: KVConsumer) -> None:
    receipts = [producer.put(data(f"k{number}")) for number in range(10)]
    nbytes = receipts[0].ledger.nbytes
    assert (memory(producer)["used"], memory(producer)["blocks"]) == (10 * nbytes, 10)
    assert memory(producer)["arenas"] == 0
    expect(DuplicateKeyError, lambda: producer.put(data("k0")))
    assert memory(producer)["blocks"] == 10
    producer.abort("k9")
    assert memory(producer)["blocks"] == 9
    for number in range(9):
        consumer.get(f"k{number}", timeout=60).release()
    until_freed(producer)


def test_a_full_quota_is_waited_for(producer: KVProducer, consumer: KVConsumer) -> None:
    held = producer.put(data("large", QUOTA - 20_000))
    small = [producer.put(data(f"k{number}")) for number in range(2)]
    error = expect(CapacityError, lambda: producer.put(data("more", 20_000), timeout=0.0))
    assert error.requested > 20_000
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.put, data("more", 20_000), timeout=60)
        until(lambda: memory(producer)["waiting"] == 1, "it waits for memory")
        consumer.get("large", timeout=60).release()
        small.append(waiting.result(60))
    held.wait(timeout=60)
    for key in ("k0", "k1", "more"):
        consumer.get(key, timeout=60).release()
    for receipt in small:
        receipt.wait(timeout=60)


def test_a_reader_that_is_lost_is_replaced(producer: KVProducer, consumer: KVConsumer) -> None:
    receipt = producer.put(data())
    with greeted(producer.stats()["socket"]) as peer:
        peer.send(Get(1, "k"))
        peer.receive()
        until(lambda: receipt.state == "leased", "it was offered")
    with consumer.get("k", timeout=60) as found:
        assert isinstance(found, TensorTransferData)
        assert found.difference(data()) == ""
    del found
    receipt.wait(timeout=60)


# Who receives


@pytest.fixture
def receivers(consumer: KVConsumer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that handled offers."""
    names, session = list[str](), session_of(consumer)
    handle = session._on_messages

    def watched(messages: Sequence[Message], fd: int) -> None:
        if any(isinstance(message, Offer) for message in messages):
            names.append(threading.current_thread().name)
        handle(messages, fd)

    monkeypatch.setattr(session, "_on_messages", watched)
    return names


def get_in_thread(pool: ThreadPoolExecutor, consumer: KVConsumer, key: str) -> Any:
    return pool.submit(lambda: consumer.get(key, timeout=60).release())


def receiving_get(
    pool: ThreadPoolExecutor, producer: KVProducer, consumer: KVConsumer, *, requested: int
) -> Any:
    """A get of "k" in a thread that receives for the link; `requested` as `until_requested`."""
    for _ in range(2):  # the loop's thread handles what the last get has left, and sleeps
        is_handled = threading.Event()
        loop_of(session_of(consumer)).call(is_handled.set)
        is_handled.wait()
    got = get_in_thread(pool, consumer, "k")
    until_requested(producer, requested)
    until(lambda: leader_of(session_of(consumer)) != 0, "it receives")
    return got


def test_a_get_that_waits_alone_receives(
    producer: KVProducer, consumer: KVConsumer, receivers: list[str]
) -> None:
    with ThreadPoolExecutor(1, "alone") as pool:
        for number in range(5):
            got = get_in_thread(pool, consumer, f"k{number}")
            until_requested(producer, 1)
            until(lambda: leader_of(session_of(consumer)) != 0, "it receives")
            producer.put(data(f"k{number}"))
            got.result(60)
    assert receivers == ["alone_0"] * 5


def test_one_receives_for_all_and_hands_over(
    producer: KVProducer, consumer: KVConsumer, receivers: list[str]
) -> None:
    """The first of three gets to wait is the last to be answered; then another order."""
    with ThreadPoolExecutor(3, "reader") as pool:
        for order in ((2, 1, 0), (0, 1, 2), (1, 0, 2)):
            got = list[Any]()
            for number in range(3):
                got.append(get_in_thread(pool, consumer, f"k{number}"))
                until_requested(producer, number + 1)
            for number in order:
                producer.put(data(f"k{number}"))
                got[number].result(60)
            until_freed(producer)
    assert len(receivers) == 9
    assert leader_of(session_of(consumer)) == 0


def test_a_get_that_receives_keeps_its_deadline(
    producer: KVProducer, consumer: KVConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it spent with receiving is not waited for once more."""
    table, left = session_of(consumer).get_table, list[float]()
    wait: Callable[[GetState, float], Offer] = table.wait

    def watched(get_state: GetState, timeout: float) -> Offer:
        left.append(timeout)
        return wait(get_state, timeout)

    monkeypatch.setattr(table, "wait", watched)
    expect(TransferTimeout, lambda: consumer.get("never", timeout=0.05))
    assert left == [0.0]
    receipt = producer.put(data())
    consumer.get("k", timeout=60).release()
    receipt.wait(timeout=60)


def test_the_link_is_closed_while_a_get_receives(
    producer: KVProducer, consumer: KVConsumer
) -> None:
    with ThreadPoolExecutor(1) as pool:
        got = receiving_get(pool, producer, consumer, requested=1)
        consumer.close()
        assert type(got.exception(60)).__name__ == "ClosedError"


def test_the_link_is_closed_while_a_get_receives_and_a_payload_is_in_use(
    producer: KVProducer, consumer: KVConsumer
) -> None:
    """The connection stays, so nothing but the end of the get wakes its thread."""
    receipt = producer.put(data("in use"))
    kept = consumer.get("in use", timeout=60)
    with ThreadPoolExecutor(1) as pool:
        got = receiving_get(pool, producer, consumer, requested=2)
        consumer.close()
        assert type(got.exception(60)).__name__ == "ClosedError"
    kept.release()
    receipt.wait(timeout=60)


def test_an_abort_here_ends_a_get_that_receives(producer: KVProducer, consumer: KVConsumer) -> None:
    """At once, while the producer cannot answer."""
    with ThreadPoolExecutor(1) as pool:
        got = receiving_get(pool, producer, consumer, requested=1)
        with end_of(producer).lock:
            consumer.abort("k", "enough")
            assert type(got.exception(60)).__name__ == "TransferFailed"


def test_the_producer_closes_while_gets_receive(sockets: str) -> None:
    """At any moment of theirs: each ends with an error of the library."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(100):
            with (
                KVLink.serve("shm://name", directory=sockets, inline=INLINE) as producer,
                KVLink.connect("shm://name", timeout=60, directory=sockets) as consumer,
            ):
                # One that begins after the end waits for another producer, for so long.
                got = [pool.submit(consumer.get, key, timeout=5) for key in ("a", "b")]
                until(lambda: producer.stats()["transfers"]["waiting"] > 0, "one waits")
                producer.close()
                for each in got:
                    assert type(each.exception(60)).__name__ in ("PeerLostError", "ClosedError")


def go_round(session: ShmSession) -> None:
    """Return after the session's loop has run every call that was pending."""
    has_run = threading.Event()
    loop_of(session).call(has_run.set)
    assert has_run.wait(60)


def test_the_loop_sleeps_while_it_may_not_receive(
    producer: KVProducer, consumer: KVConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is woken once for a message that another thread is about to receive."""
    session, woken = session_of(consumer), list[int]()
    on_events = session._on_events_in_loop

    def watched(events: int) -> None:
        woken.append(events)
        on_events(events)

    monkeypatch.setattr(session, "_on_events_in_loop", watched)
    pending = begin_get(consumer, "k", timeout=60)
    until_requested(producer, 1)
    go_round(session)  # its first call watches the channel, which would wake it once more
    with session._receiving:
        session._watch_channel()
        producer.put(data())
        until(lambda: bool(woken), "the loop is woken")
        for _ in range(20):
            go_round(session)
        assert len(woken) == 1
    session._watch_channel()  # as a thread does that receives no more
    pending.wait(timeout=60).release()


def test_a_get_of_large_payloads_receives_too(
    producer: KVProducer, consumer: KVConsumer, receivers: list[str]
) -> None:
    """Its arena comes first, which is left to the loop."""
    with ThreadPoolExecutor(1, "alone") as pool:
        for number in range(2):
            until(lambda: is_asleep(loop_of(session_of(consumer))), "the loop receives nothing")
            got = get_in_thread(pool, consumer, f"k{number}")
            until_requested(producer, 1)
            until(lambda: leader_of(session_of(consumer)) != 0, "it receives")
            producer.put(data(f"k{number}", 100_000))
            got.result(60)
            until_freed(producer)
    assert receivers == ["kvlink-reader", "alone_0"]
