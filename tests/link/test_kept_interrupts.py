"""Calls of kept payloads that a signal handler's exception ends, at any line, leave nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVConsumer, KVLink, MissingError, Receipt, Received, ReceivedBatch
from omni_kvlink.testing.caches import fingerprint, sized
from omni_kvlink.testing.rig import until, until_freed
from support.processes.line_interrupts import interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVProducer

pytestmark = [
    pytest.mark.usefixtures("zmq_started", "leaves_nothing"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
URLS = {
    "inproc": "inproc://kept?inline=0",
    "shm": "shm://kept?inline=0",
    "inline": "shm://kept?inline=32768",
    "zmq": "zmq+ipc://{root}/k",
}
QUOTA = 1 << 20
SMALL = sized("k", 8_000).make()
OLD = [sized(key, 250_000, seed=seed).make() for seed, key in enumerate("abc")]
LARGE = sized("new", 500_000, seed=7).make()
"""For which two of `OLD` are evicted."""


@pytest.fixture(params=URLS)
def pair(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    options: dict[str, Any] = {"directory": sockets, "quota": QUOTA, "prefault": 0}
    gc.disable()  # what is left to the cyclic collector is left behind, on servers
    try:
        with (
            KVLink.serve(URLS[request.param].format(root=sockets), **options) as producer,
            KVLink.connect(producer.url, timeout=60, **options) as consumer,
        ):
            yield producer, consumer
    finally:
        gc.enable()


def check_withdrawn(producer: KVProducer, consumer: KVConsumer) -> None:
    """Nothing is kept, waits or is leased, and no memory is in use, once all is withdrawn."""
    for key in ("k", "new", *"abc"):
        producer.withdraw(key)
    until_freed(producer)
    stats = producer.stats()["transfers"]
    assert (stats["live"], stats["kept"], stats["leased"]) == (0, 0, 0)
    until(lambda: not producer.stats()["transfers"]["waiting"], "no get waits")
    until(lambda: not used_by(consumer), "the consumer's memory is free")


def used_by(consumer: KVConsumer) -> int:
    """Bytes in use of the memory that a consumer has of its own."""
    memory: Any = consumer.stats().get("memory", {"used": 0})
    return int(memory["used"])


def test_a_put_that_evicts_interrupted_at_each_line(pair: tuple[KVProducer, KVConsumer]) -> None:
    """It is kept as a whole or not at all, and what was not evicted for it is there."""
    producer, consumer = pair
    for number in itertools.count():
        olds = [producer.put(data, readers=None) for data in OLD]
        results = list[Receipt]()
        put = partial(producer.put, LARGE, readers=None, timeout=60)
        was_interrupted = interrupted(number, put, results)
        kept = [data for data, old in zip(OLD, olds, strict=True) if not old.done]
        states = {old.state for old in olds if old.done}
        assert states <= {"evicted"}
        [is_here] = consumer.contains(["new"], timeout=60)
        assert is_here or not results
        for data in [*kept, *[LARGE] * is_here]:
            with consumer.get(data.request_id, timeout=60, wait=False) as received:
                assert fingerprint(received) == fingerprint(data)
            del received
        results.clear()
        check_withdrawn(producer, consumer)
        if not was_interrupted:
            break
    assert number > 50
    assert producer.stats()["transfers"]["evicted"] > 20


@pytest.mark.parametrize("is_held", [False, True], ids=["idle", "held"])
def test_a_withdrawal_interrupted_at_each_line(
    pair: tuple[KVProducer, KVConsumer], is_held: bool
) -> None:
    """The payload is there still, or it has ended; a second call ends it."""
    producer, consumer = pair
    for number in itertools.count():
        receipt, results = producer.put(SMALL, readers=None), list[bool]()
        held = consumer.get("k", timeout=60) if is_held else None
        was_interrupted = interrupted(number, partial(producer.withdraw, "k"), results)
        [is_here] = consumer.contains(["k"], timeout=60)
        assert is_here is not (receipt.state == "withdrawn")
        if is_here:
            with consumer.get("k", timeout=60, wait=False) as received:
                assert fingerprint(received) == fingerprint(SMALL)
            del received
            assert producer.withdraw("k")
        receipt.wait(timeout=60)
        if held is not None:
            assert fingerprint(held.data) == fingerprint(SMALL)
            held.release()
        check_withdrawn(producer, consumer)
        if not was_interrupted:
            break
    assert results == [True]
    assert number > 15


def test_contains_interrupted_at_each_line(pair: tuple[KVProducer, KVConsumer]) -> None:
    """The next call is answered, and right."""
    producer, consumer = pair
    producer.put(SMALL, readers=None)
    keys = ["k", *("x" * 1000 + str(number) for number in range(70))]  # several messages
    for number in itertools.count():
        contains, results = partial(consumer.contains, keys, timeout=60), list[list[bool]]()
        was_interrupted = interrupted(number, contains, results)
        assert consumer.contains(["x", "k"], timeout=60) == [False, True]
        if not was_interrupted:
            break
    assert results == [[True] + 70 * [False]]
    assert number > 15
    check_withdrawn(producer, consumer)


def test_a_get_that_does_not_wait_interrupted_at_each_line(
    pair: tuple[KVProducer, KVConsumer],
) -> None:
    """The payload is for the next reader, too."""
    producer, consumer = pair
    producer.put(SMALL, readers=None)
    for number in itertools.count():
        results = list[Received]()
        get = partial(consumer.get, "k", timeout=60, wait=False)
        was_interrupted = interrupted(number, get, results)
        results.clear()
        until(lambda: not producer.stats()["transfers"]["leased"], "it is nobody's")
        with consumer.get("k", timeout=60, wait=False) as received:
            assert fingerprint(received) == fingerprint(SMALL)
        del received
        if not was_interrupted:
            break
    assert number > 30
    check_withdrawn(producer, consumer)


def test_a_get_many_that_misses_interrupted_at_each_line(
    pair: tuple[KVProducer, KVConsumer],
) -> None:
    """What was there is released, whether the call got so far or not."""
    producer, consumer = pair
    producer.put(SMALL, readers=None)

    def get_many() -> ReceivedBatch[Received] | None:
        with contextlib.suppress(MissingError):
            return consumer.get_many(["k", "x"], timeout=60, wait=False)
        return None

    for number in itertools.count():
        results = list[Any]()
        was_interrupted = interrupted(number, get_many, results)
        assert results in ([None], [])
        until(lambda: not producer.stats()["transfers"]["leased"], "it is nobody's")
        if not was_interrupted:
            break
    assert number > 30
    check_withdrawn(producer, consumer)
