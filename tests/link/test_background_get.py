"""`BackgroundGet`: one of answer, deadline, error and cancel ends a get, and no thread waits."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import (
    ClosedError,
    KVLink,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.lowlevel import BackgroundGet, GetPhase, begin_get, open_delivery
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until, until_freed, until_requested
from support.connectors.held_loops import loop_of
from support.link.ends import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.lowlevel import Delivery

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
DATA = Recipe("k", layers=2).make()
URLS = {"inproc": "inproc://background", "shm": "shm://background", "zmq": "zmq+ipc://{root}/b"}


@pytest.fixture(params=["inproc", "shm"])
def pair(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    options: dict[str, Any] = {"directory": sockets, "quota": 4 << 20}
    with (
        KVLink.serve(URLS[request.param].format(root=sockets), **options) as producer,
        KVLink.connect(producer.url, timeout=60, **options) as consumer,
    ):
        yield producer, consumer


class Owner:
    """The owner of a get, whose pool runs a job when the test says so."""

    def __init__(
        self,
        consumer: KVConsumer,
        timeout: float = 60,
        submit: Callable[[Callable[[], None]], object] | None = None,
    ):
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.copies: list[str] = []
        self.errors: list[Exception] = []
        self.link, self.may_connect = consumer, threading.Event()
        self.may_connect.set()
        self.get = BackgroundGet(
            "k",
            self._connect,
            begin_get,
            timeout,
            url="shm://p",
            submit=submit or self.jobs.put,
            copy=self._copy,
            fail=self.errors.append,
        )

    def run_job(self) -> None:
        """Run what was submitted to the pool."""
        self.jobs.get(timeout=60)()

    def _connect(self, timeout: float) -> KVConsumer:
        assert self.may_connect.wait(60)
        return self.link

    def _copy(self, delivery: Delivery) -> None:
        with open_delivery(self.link, delivery, started=0.0) as data:
            self.copies.append(fingerprint(data))


def check_nobody_waits(producer: KVProducer, consumer: KVConsumer, *, is_put: bool = False) -> None:
    """A payload can be read, and nothing of another get is left."""
    until(lambda: not producer.stats()["transfers"]["waiting"], "no get waits", timeout=10)
    if not is_put:
        producer.put(DATA)
    consumer.get("k", timeout=60).release()
    until_freed(producer)


@pytest.mark.parametrize("is_first", [False, True], ids=["put before", "put while it waits"])
def test_an_answer_is_copied_once(pair: tuple[KVProducer, KVConsumer], is_first: bool) -> None:
    producer, consumer = pair
    owner = Owner(consumer)
    assert (owner.get.phase, owner.get.is_requested) == (GetPhase.CONNECTING, False)
    assert repr(owner.get) == "<BackgroundGet of 'k': nothing is requested>"
    receipt = None if is_first else producer.put(DATA)
    owner.get.request()
    if is_first:
        assert owner.get.phase is GetPhase.WAITING
        receipt = producer.put(DATA)
    until(lambda: owner.get.phase is GetPhase.QUEUED, "its answer is there")
    assert (owner.copies, owner.get.is_requested) == ([], True)
    owner.run_job()
    assert owner.get.phase is GetPhase.TAKEN
    assert owner.copies == [fingerprint(DATA)]
    assert receipt is not None
    receipt.wait(timeout=60)
    owner.get.expire()
    assert not owner.get.cancel()
    assert (owner.errors, owner.jobs.qsize()) == ([], 0)
    until_freed(producer)


def test_cancelled_while_it_connects(pair: tuple[KVProducer, KVConsumer]) -> None:
    """Its thread requests nothing afterwards."""
    producer, consumer = pair
    owner = Owner(consumer)
    owner.may_connect.clear()
    thread = threading.Thread(target=owner.get.request)
    thread.start()
    assert owner.get.cancel()
    assert not owner.get.cancel()
    owner.may_connect.set()
    thread.join()
    assert (owner.get.phase, owner.get.is_requested) == (GetPhase.ENDED, False)
    with pytest.raises(ClosedError, match="the get of 'k' was cancelled"):
        owner.get.begin()
    assert (owner.copies, owner.errors, owner.jobs.qsize()) == ([], [], 0)
    check_nobody_waits(producer, consumer)


def test_cancelled_while_it_is_requested(pair: tuple[KVProducer, KVConsumer]) -> None:
    """The request that was sent nevertheless is withdrawn."""
    producer, consumer = pair
    get: BackgroundGet

    def begin(link: KVConsumer, key: str, *, timeout: float) -> Any:
        pending = begin_get(link, key, timeout=timeout)
        until_requested(producer, 1)
        assert get.cancel()
        return pending

    get = BackgroundGet("k", lambda timeout: consumer, begin, 60)
    get.begin()
    assert get.phase is GetPhase.ENDED
    check_nobody_waits(producer, consumer)


@pytest.mark.parametrize("is_put", [False, True])
def test_cancelled_before_its_copy(pair: tuple[KVProducer, KVConsumer], is_put: bool) -> None:
    """The request is withdrawn; a payload that has come goes to another reader."""
    producer, consumer = pair
    owner = Owner(consumer)
    owner.get.request()
    until_requested(producer, 1)
    if is_put:
        producer.put(DATA)
        until(lambda: owner.get.phase is GetPhase.QUEUED, "its answer is there")
    assert owner.get.cancel()
    assert not owner.get.cancel()
    if is_put:
        owner.run_job()
    assert (owner.copies, owner.errors, owner.jobs.qsize()) == ([], [], 0)
    check_nobody_waits(producer, consumer, is_put=is_put)


def test_its_deadline_while_it_connects(pair: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = pair
    owner = Owner(consumer, timeout=0.05)
    owner.may_connect.clear()
    thread = threading.Thread(target=owner.get.request)
    thread.start()
    owner.get.expire()
    assert owner.errors == []
    time.sleep(0.06)
    for _ in range(2):
        owner.get.expire()
    (error,) = owner.errors
    assert isinstance(error, TransferTimeout)
    assert str(error) == "the producer shm://p was not reached within 0.05 s"
    assert (error.key, error.waited) == ("k", 0.05)
    owner.may_connect.set()
    thread.join()
    check_nobody_waits(producer, consumer)
    assert (len(owner.errors), owner.jobs.qsize()) == (1, 0)


def test_its_deadline_while_it_waits(pair: tuple[KVProducer, KVConsumer]) -> None:
    """The pool ends it once, however often it is looked at."""
    producer, consumer = pair
    owner = Owner(consumer, timeout=0.05)
    owner.get.request()
    until(lambda: not owner.get.seconds_left(), "its time is over")
    for _ in range(3):
        owner.get.expire()
    owner.run_job()
    (error,) = owner.errors
    assert isinstance(error, TransferTimeout)
    assert "not announced by the producer" in str(error)
    assert owner.jobs.qsize() == 0
    check_nobody_waits(producer, consumer)


def test_errors_end_it(pair: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = pair
    unreachable = Owner(consumer)
    unreachable.link = None  # type: ignore[assignment]
    unreachable.get.request()
    assert isinstance(unreachable.errors.pop(), AttributeError)
    assert (unreachable.get.phase, unreachable.get.cancel()) == (GetPhase.ENDED, False)
    failed = Owner(consumer)
    failed.get.request()
    producer.fail("k", "no reason")
    failed.run_job()
    assert isinstance(failed.errors.pop(), TransferFailed)
    assert failed.copies == []
    with pytest.raises(SchemaError, match="timeout"):
        Owner(consumer, timeout=-1)


def test_one_of_all_that_come_together_ends_it(pair: tuple[KVProducer, KVConsumer]) -> None:
    """A put, a cancel and a deadline in three threads: the payload is copied, or for another."""
    producer, consumer = pair
    endings = [0, 0, 0]
    with ThreadPoolExecutor(4) as threads:
        for number in range(120):
            owner = Owner(consumer, timeout=0.001, submit=threads.submit)
            owner.get.request()
            start = threading.Barrier(3)

            def act(call: Callable[[], Any], delay: float, start: threading.Barrier = start) -> Any:
                start.wait(60)
                time.sleep(delay)
                return call()

            delays = [number % 3 * 0.0004, number // 3 % 5 * 0.0004, number // 9 % 3 * 0.0004]
            calls: list[Callable[[], Any]] = [
                partial(producer.put, DATA),
                owner.get.cancel,
                owner.get.expire,
            ]
            acts = zip(calls, delays, strict=True)
            results = [threads.submit(act, call, delay) for call, delay in acts]
            receipt, is_cancelled, _ = (result.result(60) for result in results)
            if not is_cancelled:
                until(partial(has_ended, owner), "the pool has ended it")
            outcomes = [len(owner.copies), int(is_cancelled), len(owner.errors)]
            assert sorted(outcomes) == [0, 0, 1]
            endings = [total + outcome for total, outcome in zip(endings, outcomes, strict=True)]
            if not owner.copies:
                consumer.get("k", timeout=60).release()
            receipt.wait(timeout=60)
            until_freed(producer)
    assert max(endings) < 120, "they come together"


def has_ended(owner: Owner) -> bool:
    return bool(owner.copies or owner.errors)


def cut(consumer: KVConsumer) -> None:
    """Break a connection of ZMQ, and not its producer."""
    session = session_of(consumer)
    loop_of(session).call(partial(session.disconnect_in_loop, PeerLostError("it was cut")))


def wait_until_lost(producer: KVProducer, consumer: KVConsumer, get: BackgroundGet) -> None:
    """Break the connection of a get that waits, and take its error."""
    until_requested(producer, 1)
    cut(consumer)
    assert isinstance(get.pending.future.exception(60), PeerLostError)
    with pytest.raises(PeerLostError, match="it was cut"):
        get.take()


@pytest.mark.parametrize("cuts", [3, 4])
def test_a_connection_that_breaks(sockets: str, cuts: int) -> None:
    """An event loop's get is requested again, three times and no more."""
    with (
        KVLink.serve(URLS["zmq"].format(root=sockets)) as producer,
        KVLink.connect(producer.url, timeout=60) as consumer,
    ):
        get = BackgroundGet("k", lambda timeout: consumer, begin_get, 60)
        get.begin()
        for number in range(cuts):
            wait_until_lost(producer, consumer, get)
            assert get.can_retry() == (number < 3)
            assert get.phase is (GetPhase.CONNECTING if number < 3 else GetPhase.TAKEN)
            if number < 3:
                get.begin()
        if cuts == 3:
            producer.put(DATA)
            get.pending.future.result(60)
            with open_delivery(consumer, get.take(), started=0.0) as data:
                assert fingerprint(data) == fingerprint(DATA)
            del data
            until_freed(producer)
        else:
            check_nobody_waits(producer, consumer)


def test_a_producer_that_has_ended_is_not_asked_again(sockets: str) -> None:
    options: dict[str, Any] = {"directory": sockets}
    producer = KVLink.serve(URLS["shm"], **options)
    with KVLink.connect(producer.url, timeout=60, **options) as consumer:
        get = BackgroundGet("k", lambda timeout: consumer, begin_get, 60)
        get.begin()
        producer.close()
        with pytest.raises(PeerLostError):
            get.pending.future.result(60)
        with pytest.raises(PeerLostError):
            get.take()
        assert not get.can_retry()
        assert not get.cancel()
