"""A `get` that a signal handler's exception ends, at any line, leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import (
    ClosedError,
    KVConsumer,
    KVLink,
    Receipt,
    Received,
    ReceivedBatch,
    ReceivedChunk,
    ReceivedStream,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.link.allocation import Allocation
from omni_kvlink.lowlevel import BackgroundGet, begin_get, begin_gets, open_delivery
from omni_kvlink.testing.caches import (
    Recipe,
    chunk,
    fingerprint,
    hash_chunk,
    hash_tensors,
    layers_of,
)
from omni_kvlink.testing.rig import until, until_freed, until_requested
from support.processes.line_interrupts import LOCKING, TRACED, interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink import KVProducer, Payload, PutStream

pytestmark = [
    pytest.mark.usefixtures("zmq_started", "leaves_nothing"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
URLS = {
    "inproc": "inproc://interrupt?inline=0",
    "shm": "shm://interrupt?inline=0",
    "inline": "shm://interrupt?inline=32768",
    "zmq": "zmq+ipc://{root}/i",
}
DATA = Recipe("k", layers=2).make()


@pytest.fixture(params=URLS)
def pair(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    options: dict[str, Any] = {"directory": sockets, "quota": 4 << 20}
    with (
        KVLink.serve(URLS[request.param].format(root=sockets), **options) as producer,
        KVLink.connect(producer.url, timeout=60, **options) as consumer,
    ):
        yield producer, consumer


def put_once_awaited(producer: KVProducer, receipts: list[Receipt], ended: threading.Event) -> None:
    """Put when the get waits, or has ended."""
    stats = producer.stats
    until(lambda: ended.is_set() or stats()["transfers"]["waiting"] > 0, "the get waits")
    receipts.append(producer.put(DATA))


def received_nbytes(consumer: KVConsumer) -> int:
    """Bytes in use of the memory that a consumer has of its own."""
    memory = consumer.stats().get("memory", {"used": 0})
    assert isinstance(memory, dict)
    return int(memory["used"])


def is_committed(receipt: Receipt) -> bool:
    return receipt.state == "committed"


class Timeout(Exception):
    """The exception that the handler of a SIGALRM raises to end a call."""


@pytest.fixture(params=[KeyboardInterrupt, Timeout])
def interrupt(request: pytest.FixtureRequest) -> type[BaseException]:
    """An interrupt, which no `except Exception` catches, and one that is caught."""
    kind: type[BaseException] = request.param
    return kind


def get_in_background(consumer: KVConsumer, key: str, timeout: float) -> Received:
    """The same as `KVConsumer.get`, of a `BackgroundGet`."""
    get = BackgroundGet(key, lambda timeout: consumer, begin_get, timeout)
    try:
        get.begin()
        get.pending.future.exception(timeout)
        return open_delivery(consumer, get.take(), started=0.0)
    except BaseException:
        get.cancel()
        raise


@pytest.mark.parametrize("wait", ["layer", "whole"])
def test_a_wait_for_a_layer_interrupted_at_each_line(
    pair: tuple[KVProducer, KVConsumer], wait: str
) -> None:
    """Not one leaves a lock that the connection's thread takes when the layer comes."""
    producer, consumer = pair

    def wait_in_vain(stream: ReceivedStream) -> None:
        with contextlib.suppress(TransferTimeout):
            if wait == "layer":
                stream.wait_for_layer(0, timeout=0.001)
            else:
                stream.wait(timeout=0.001)

    def send(out: PutStream) -> None:
        for (_, layer), views in layers_of(DATA).items():
            out.write_layer(layer, *views)
        out.commit()

    for number in itertools.count():
        out = producer.stream_put(DATA)
        with consumer.stream_get("k", timeout=60) as stream:
            call, traced = partial(wait_in_vain, stream), (*TRACED, *LOCKING)
            is_interrupted = interrupted(number, call, [], traced=traced)
            sending = threading.Thread(target=send, args=(out,), daemon=True)
            sending.start()
            sending.join(20)
            assert not sending.is_alive(), number
            assert fingerprint(stream.wait(timeout=20)) == fingerprint(DATA)
        assert out.receipt is not None
        out.receipt.wait(timeout=20)
        if not is_interrupted:
            break


@pytest.mark.parametrize("get_payload", [KVConsumer.get, get_in_background])
@pytest.mark.parametrize("is_waiting", [False, True], ids=["put before", "put while it waits"])
def test_a_get_interrupted_at_each_line(
    pair: tuple[KVProducer, KVConsumer],
    is_waiting: bool,
    interrupt: type[BaseException],
    get_payload: Callable[..., Received],
) -> None:
    producer, consumer = pair
    gc.disable()  # what is left to the cyclic collector is left behind, on servers
    try:
        for number in itertools.count():
            results, receipts, ended = list[Received](), list[Receipt](), threading.Event()
            put = partial(put_once_awaited, producer, receipts, ended)
            thread = threading.Thread(target=put)
            if is_waiting:
                thread.start()
            else:
                receipts.append(producer.put(DATA))
            get = partial(get_payload, consumer, "k", timeout=60)
            was_interrupted = interrupted(number, get, results, interrupt)
            ended.set()
            if is_waiting:
                thread.join()
            if results:
                results.pop().release_unread()
            until(partial(is_committed, receipts[0]), "it can be read")
            until(lambda: not producer.stats()["transfers"]["waiting"], "no get waits")
            with consumer.get("k", timeout=60) as data:
                assert fingerprint(data) == fingerprint(DATA)
            del data
            receipts[0].wait(timeout=60)
            until_freed(producer)
            until(lambda: not received_nbytes(consumer), "the consumer's memory is free")
            if not was_interrupted:
                break
        assert number > 30
    finally:
        gc.enable()


MANY = ["m0", "m1", "m2"]


def make_many(keys: Sequence[str] = MANY) -> list[Payload]:
    return [Recipe(key, seed=seed).make() for seed, key in enumerate(keys)]


def test_a_get_many_interrupted_at_each_line(
    pair: tuple[KVProducer, KVConsumer], interrupt: type[BaseException]
) -> None:
    """Another one receives all payloads."""
    producer, consumer = pair
    expected = list(map(fingerprint, make_many()))
    gc.disable()
    try:
        for number in itertools.count():
            results, receipts = list[ReceivedBatch[Received]](), producer.put_many(make_many())
            get_many = partial(consumer.get_many, MANY, timeout=60)
            was_interrupted = interrupted(number, get_many, results, interrupt)
            if results:
                results.pop().release_unread()
            until(lambda results=receipts: all(map(is_committed, results)), "they can be read")  # type: ignore[misc]
            with consumer.get_many(MANY, timeout=60) as data:
                assert list(map(fingerprint, data)) == expected
            del data
            for receipt in receipts:
                receipt.wait(timeout=60)
            until_freed(producer)
            until(lambda: not received_nbytes(consumer), "the consumer's memory is free")
            if not was_interrupted:
                break
        assert number > 50
    finally:
        gc.enable()


def test_a_put_many_interrupted_at_each_line(pair: tuple[KVProducer, KVConsumer]) -> None:
    """Each payload is there as a whole or not at all; no key stays taken, and no memory.

    Nobody waits for it: within an offer the producer's table cannot be interrupted, as in `put`.
    """
    producer, consumer = pair
    gc.disable()
    try:
        for number in itertools.count():
            keys = [f"{number} {key}" for key in MANY]  # those before are remembered as failed
            payloads, results = make_many(keys), list[list[Receipt]]()
            was_interrupted = interrupted(number, partial(producer.put_many, payloads), results)
            pending = begin_gets(consumer, keys, timeout=60)
            until_requested(producer, len(keys))
            for get, key, payload in zip(pending, keys, payloads, strict=True):
                producer.fail(key, "it was not put")  # unless it was
                with contextlib.suppress(TransferFailed):
                    with open_delivery(consumer, get.wait(timeout=60), started=0.0) as data:
                        assert fingerprint(data) == fingerprint(payload)
                    del data
            del get
            pending.clear()
            until_freed(producer)
            until(lambda: not received_nbytes(consumer), "the consumer's memory is free")
            assert not producer.stats()["transfers"]["live"]
            if not was_interrupted:
                break
        assert number > 50
    finally:
        gc.enable()


def test_a_pending_get_that_is_dropped_is_cancelled(pair: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = pair
    pending = begin_get(consumer, "k", timeout=60)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "it waits")
    del pending
    until(lambda: producer.stats()["transfers"]["waiting"] == 0, "it was cancelled")
    pending = begin_get(consumer, "k", timeout=60)
    receipt = producer.put(DATA)
    pending.future.result(60)
    del pending
    until(lambda: receipt.state == "committed", "it can be read by another")
    delivery = begin_get(consumer, "k", timeout=60).wait(timeout=60)
    del delivery
    until(lambda: receipt.state == "committed", "nobody looked at it")
    consumer.get("k", timeout=60).release()
    receipt.wait(timeout=60)


def test_a_release_interrupted_at_each_line(pair: tuple[KVProducer, KVConsumer]) -> None:
    """The producer learns of it without another call of this side."""
    producer, consumer = pair
    gc.disable()
    try:
        for number in itertools.count():
            receipts, results = producer.put_many(make_many()), list[None]()
            single, batch = consumer.get("m0", timeout=60), consumer.get_many(MANY[1:], timeout=60)
            for received in (single, *batch):
                assert received.data.request_id  # it was read
            del received
            was_interrupted = interrupted(number, partial(release_all, single, batch), results)
            del single, batch
            for receipt in receipts:
                receipt.wait(timeout=60)
            until_freed(producer)
            until(lambda: not received_nbytes(consumer), "the consumer's memory is free")
            if not was_interrupted:
                break
        assert number > 10
    finally:
        gc.enable()


def release_all(single: Received, batch: ReceivedBatch[Received]) -> None:
    single.release()
    batch.release()


def test_a_receive_interrupted_at_each_line(
    pair: tuple[KVProducer, KVConsumer], interrupt: type[BaseException]
) -> None:
    """The next one returns the same chunk; at the end, it says again that it is the end."""
    producer, consumer = pair
    gc.disable()
    try:
        for number in itertools.count():
            with producer.open_stream("g", chunk(0)) as out:
                for step in range(2):
                    out.append(chunk(step))
            stream, results = consumer.read_stream("g", timeout=60), list[ReceivedChunk | None]()
            receive = partial(stream.receive, timeout=60)
            was_interrupted = interrupted(number, receive, results, interrupt)
            first = results.pop() if results else stream.receive(timeout=60)
            assert first is not None
            assert first.number == 0
            assert hash_tensors(first.data.tensors()) == hash_chunk(chunk(0))
            del first
            assert stream.receive(timeout=60).number == 1  # type: ignore[union-attr]
            interrupted(number, receive, results, interrupt)
            assert stream.receive(timeout=60) is None
            assert stream.count == 2
            out.commit().wait(timeout=60)
            until_freed(producer)
            until(lambda: not received_nbytes(consumer), "the consumer's memory is free")
            if not was_interrupted:
                break
        assert number > 30
    finally:
        gc.enable()


def test_an_append_interrupted_at_each_line(pair: tuple[KVProducer, KVConsumer]) -> None:
    """The stream goes on, or has failed; either way its reader knows, and no memory is left."""
    producer, consumer = pair
    gc.disable()
    try:
        for number in itertools.count():
            out, results = producer.open_stream("g", chunk(0)), list[int]()
            out.append(chunk(0))
            was_interrupted = interrupted(number, partial(out.append, chunk(1)), results)
            with contextlib.suppress(ClosedError):
                out.append(chunk(out.count))
                out.commit()
            with contextlib.suppress(TransferFailed):
                with consumer.read_stream("g", timeout=60) as stream:
                    for received in stream:
                        tensors = received.data.tensors()
                        assert hash_tensors(tensors) == hash_chunk(chunk(received.number))
                        del tensors, received
                assert stream.count == out.count
            out.fail("enough")
            until_freed(producer)
            until(lambda: not received_nbytes(consumer), "the consumer's memory is free")
            if not was_interrupted:
                break
        assert number > 30
    finally:
        gc.enable()


@pytest.mark.parametrize("pair", ["inproc"], indirect=True)
def test_an_allocation_interrupted_at_each_line(pair: tuple[KVProducer, KVConsumer]) -> None:
    """Its memory is free again, at the latest when the key is aborted."""
    producer, _ = pair
    gc.disable()
    try:
        for number in itertools.count():
            plan, results = Recipe(f"a{number}").make(), list[None]()
            allocate = partial(release_allocated, producer, plan)
            was_interrupted = interrupted(number, allocate, results)
            producer.abort(plan.request_id)
            until_freed(producer)
            assert not producer.stats()["transfers"]["live"]
            if not was_interrupted:
                break
        assert number > 50
    finally:
        gc.enable()


def test_an_allocation_interrupted_before_its_caller_has_it(
    pair: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is free: a put takes other memory."""
    producer, _ = pair
    begin = Allocation.__init__

    def begin_interrupted(*arguments: Any) -> None:
        begin(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Allocation, "__init__", begin_interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.allocate(DATA)
    producer.put(DATA)


def release_allocated(producer: KVProducer, plan: Payload) -> None:
    producer.allocate(plan).release()


@pytest.mark.parametrize("pair", ["inproc"], indirect=True)
def test_what_was_allocated_is_free_once_its_key_is_aborted(
    pair: tuple[KVProducer, KVConsumer],
) -> None:
    producer, _ = pair
    producer.allocate(DATA)
    assert producer.stats()["memory"]["used"]
    producer.abort("k")
    until_freed(producer)


@pytest.mark.parametrize("pair", ["inproc"], indirect=True)
def test_a_put_of_what_was_allocated_and_aborted_is_refused(
    pair: tuple[KVProducer, KVConsumer],
) -> None:
    """Once, in memory that the abort left to the caller; the key serves another payload then."""
    producer, consumer = pair
    kept = producer.allocate(DATA).data
    producer.abort("k", "the user left")
    with pytest.raises(TransferFailed, match=r"'k' was aborted: the user left; allocate it anew"):
        producer.put(kept)
    producer.put(DATA)
    consumer.get("k", timeout=60).release()
