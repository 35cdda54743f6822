"""A get that waits alone receives its small payload in its own thread; all else is the loop's."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq

from omni_kvlink import (
    CapacityError,
    ClosedError,
    KVConsumer,
    KVLink,
    KVProducer,
    PeerLostError,
    TensorTransferData,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.get_table import GetTable
from omni_kvlink.connectors.protocol.messages import Offer
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.memory.arena import ArenaPool
from omni_kvlink.payload.expected import ExpectedPayload
from omni_kvlink.testing.rig import expect, until, until_freed, until_requested
from support.connectors.held_loops import is_asleep, live_loops, loop_of, num_calls
from support.connectors.zmq_addresses import fresh_url
from support.link.ends import end_of, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from omni_kvlink import Received
    from omni_kvlink.connectors.control.remote_get import RemoteGet
    from omni_kvlink.memory.block import Block
    from omni_kvlink.memory.region import Region
    from omni_kvlink.system.waits import LazyEvent

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
LARGE = 1 << 20
_sizes = itertools.count()  # of payloads whose layout was not received before


@pytest.fixture(params=["tcp", "ipc"])
def url(request: pytest.FixtureRequest, sockets: str) -> str:
    return fresh_url(request.param, sockets)


@pytest.fixture
def producer(url: str, leaves_nothing: None) -> Iterator[KVProducer]:
    with KVLink.serve(url, quota=16 * LARGE) as link:
        yield link


@pytest.fixture
def consumer(producer: KVProducer) -> Iterator[KVConsumer]:
    with KVLink.connect(producer.url, timeout=60, quota=16 * LARGE) as link:
        yield link


class Receipts:
    """Threads that took a payload themselves, and those that received for it and did not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.own, self.left = list[int](), list[int]()
        self.waiting = 0
        receive, pause = ControlSession.receive_until, MonitoredSocket.pause

        def watched(
            session: ControlSession, event: LazyEvent, deadline: float, get: RemoteGet
        ) -> None:
            receive(session, event, deadline, get)
            found = self.left if get.delivery is None else self.own
            found.append(threading.get_ident())

        def counted(socket: MonitoredSocket) -> bool:
            paused = pause(socket)
            self.waiting += 1
            return paused

        monkeypatch.setattr(ControlSession, "receive_until", watched)
        monkeypatch.setattr(MonitoredSocket, "pause", counted)


@pytest.fixture
def receipts(monkeypatch: pytest.MonkeyPatch) -> Receipts:
    return Receipts(monkeypatch)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def data(key: str = "k", *, seed: int = 0, nbytes: int = 4096) -> TensorTransferData:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 255, (nbytes,), generator=generator, dtype=torch.uint8)
    return TensorTransferData(key, {"hidden": made})


def begin(
    pool: ThreadPoolExecutor, consumer: KVConsumer, receipts: Receipts, key: str = "k", **how: Any
) -> Future[Received]:
    """A get that waits for its payload, and reads the socket."""
    before = receipts.waiting
    got = pool.submit(consumer.get, key, **{"timeout": 60, **how})
    until_reading(receipts, before)
    return got


def until_reading(receipts: Receipts, before: int) -> None:
    """Wait until a get reads the socket, and the loop has sent its request and reads no more."""
    until(lambda: receipts.waiting > before, "it reads the socket")
    loops = live_loops()
    until(
        lambda: all(is_asleep(loop) and not num_calls(loop) for loop in loops), "every loop sleeps"
    )


def check(received: Received, put: TensorTransferData) -> None:
    assert received.data.difference(put) == ""  # type: ignore[arg-type]
    received.verify()
    assert received.manifest.request_id == put.request_id
    received.release()


def deliver(producer: KVProducer, consumer: KVConsumer, count: int) -> None:
    """Payloads of one layout; after two, the next is expected."""
    for number in range(count):
        producer.put(data(f"k{number}"))
        consumer.get(f"k{number}", timeout=60).release()


def counts(consumer: KVConsumer) -> dict[str, int]:
    return {name: count for name, count in consumer.stats()["verification"].items() if count}


def test_its_own_thread_receives(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """And its memory counts until it is released."""
    for number in range(4):
        put = data(f"k{number}", seed=number)
        got = begin(pool, consumer, receipts, put.request_id)
        receipt = producer.put(put)
        received = got.result(60)
        assert consumer.stats()["memory"]["used"] == received.manifest.nbytes
        check(received, put)
        receipt.wait(timeout=60)
        until_freed(producer)
        until(lambda: not consumer.stats()["memory"]["used"], "its memory is free")
    assert len(receipts.own) == 4
    assert threading.get_ident() not in receipts.own
    assert counts(consumer) == {"verified": 4}


def test_a_forked_child_keeps_its_copy(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """The memory is the process's own."""
    got = begin(pool, consumer, receipts)
    producer.put(data())
    received = got.result(60)
    (tensor,) = received.data.tensors()
    assert isinstance(tensor, torch.Tensor)
    child = os.fork()
    if child == 0:
        os._exit(int(not torch.equal(tensor, data()["hidden"])))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    received.release()
    assert len(receipts.own) == 1


def test_all_of_the_quota_is_mapped(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """A payload is charged for a block then."""
    producer.put(data("large", nbytes=LARGE))
    consumer.get("large", timeout=60).release()
    memory = consumer.stats()["memory"]
    assert memory["mapped"] == memory["quota"]
    for number in range(20):  # on a busy machine the loop may receive one
        got = begin(pool, consumer, receipts)
        producer.put(data(seed=number))
        received = got.result(60)
        assert consumer.stats()["memory"]["used"] >= received.manifest.nbytes
        check(received, data(seed=number))
        until_freed(producer)
        until(lambda: not consumer.stats()["memory"]["used"], "its memory is free")
        if len(receipts.own) == 2:
            break
    assert len(receipts.own) == 2


@pytest.mark.parametrize("before", [0, 2], ids=["first", "expected"])
def test_a_damaged_byte_is_fetched_again(
    producer: KVProducer,
    consumer: KVConsumer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
) -> None:
    """By the loop; also of a payload whose views are made already, which are not used then."""
    deliver(producer, consumer, before)
    peek, filled, seen = MonitoredSocket.peek, list[bool](), list[Any]()
    fill = ExpectedPayload.fill

    def watched(expected: ExpectedPayload, payload: memoryview, *, verify: bool) -> Region | None:
        region = fill(expected, payload, verify=verify)
        filled.append(region is not None)
        return region

    class Damaged:
        def __init__(self, frame: Any):
            self.bytes, self.more = bytes([*frame.bytes[:-1], frame.bytes[-1] ^ 1]), False
            self.buffer = memoryview(self.bytes)

        def __len__(self) -> int:
            return len(self.bytes)

    def damaged(socket: MonitoredSocket) -> list[Any]:
        frames: list[Any] = peek(socket)
        if socket.socket.type == zmq.DEALER and len(frames) == 2 and not seen:
            frames[1] = Damaged(frames[1])
            seen.append(frames[1])
        return frames

    monkeypatch.setattr(ExpectedPayload, "fill", watched)
    put = data("damaged", seed=5, nbytes=4096 if before else 5000 + next(_sizes))
    got = begin(pool, consumer, receipts, "damaged")
    with monkeypatch.context() as patch:
        patch.setattr(MonitoredSocket, "peek", damaged)
        producer.put(put)
        check(got.result(60), put)
    assert filled == [False] or not (before or any(filled))
    assert counts(consumer) == {"verified": before + 1, "refetched": 1}
    assert receipts.left[-1] != threading.get_ident()
    until_freed(producer)
    until(lambda: not consumer.stats()["memory"]["used"], "its memory is free")


def test_what_is_expected_after_a_large_payload(
    producer: KVProducer,
    consumer: KVConsumer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing, until one has come inside its offer."""
    producer.put(data("large", nbytes=LARGE))
    consumer.get("large", timeout=60).release()
    opened, open_payload = list[str](), ExpectedPayload.open

    def watched(expected: ExpectedPayload) -> None:
        open_payload(expected)
        opened.append(expected.plan.request_id)

    monkeypatch.setattr(ExpectedPayload, "open", watched)
    for number in range(4):
        put = data(f"k{number}", seed=number, nbytes=4096)
        got = begin(pool, consumer, receipts, put.request_id)
        producer.put(put)
        check(got.result(60), put)
    assert opened[-2:] == ["k2", "k3"]


def test_a_payload_of_a_get_that_ended_meanwhile(
    producer: KVProducer,
    consumer: KVConsumer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is released unread, and forgotten: a retry may bring another one."""
    deliver(producer, consumer, 2)
    on_message, discard, discarded = GetTable.on_message, ExpectedPayload.discard, list[bool]()

    def late(table: GetTable[Any], message: Any) -> None:
        if isinstance(message, Offer):
            table.fail("k", TransferFailed("ended", key="k", reason="ended"))
        on_message(table, message)

    def watched(expected: ExpectedPayload) -> None:
        assert expected.header is not None
        discard(expected)
        discarded.append(expected.header is None)

    monkeypatch.setattr(ExpectedPayload, "discard", watched)
    got = begin(pool, consumer, receipts)
    with monkeypatch.context() as patch:
        patch.setattr(GetTable, "on_message", late)
        receipt = producer.put(data())
        expect(TransferFailed, lambda: got.result(60))
    assert discarded == [True]
    until(lambda: receipt.state == "committed", "another can have it")
    check(consumer.get("k", timeout=60), data())
    until_freed(producer)
    until(lambda: not consumer.stats()["memory"]["used"], "its memory is free")


@pytest.mark.parametrize("verify", ["off", "full"])
def test_bytes_that_nobody_compares(
    producer: KVProducer,
    consumer: KVConsumer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    verify: str,
) -> None:
    for number in range(3):
        put = data(f"k{number}", seed=number)
        got = begin(pool, consumer, receipts, put.request_id, verify=verify)
        producer.put(put)
        check(got.result(60), put)
    assert counts(consumer) == {("unverified" if verify == "off" else "verified"): 3}


def test_a_payload_without_digests(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    for number in range(3):
        got = begin(pool, consumer, receipts, f"k{number}")
        producer.put(data(f"k{number}"), digests=False)
        received = got.result(60)
        assert received.data.difference(data(f"k{number}")) == ""  # type: ignore[arg-type]
        received.release()
    assert counts(consumer) == {"unverified": 3}
    assert len(receipts.own) == 3


def test_several_that_wait(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """One of them reads the socket; what is not its own is received by the loop."""
    first = begin(pool, consumer, receipts, "k0")
    others = [pool.submit(consumer.get, f"k{number}", timeout=60) for number in range(1, 4)]
    until_requested(producer, 4)
    for number in (2, 0, 3, 1):
        producer.put(data(f"k{number}", seed=number))
    for number, got in enumerate([first, *others]):
        check(got.result(60), data(f"k{number}", seed=number))
    until_freed(producer)


def test_a_large_payload_is_the_loops(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    got = begin(pool, consumer, receipts)
    put = data(nbytes=LARGE)
    producer.put(put)
    check(got.result(60), put)
    assert receipts.own == []


def test_there_is_no_room(
    producer: KVProducer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """It is delivered when there is."""
    with KVLink.connect(producer.url, timeout=60, quota=8192) as consumer:
        producer.put(data("kept"))
        kept = consumer.get("kept", timeout=60)
        got = begin(pool, consumer, receipts, timeout=0.5)
        producer.put(data())
        error = expect(TransferTimeout, lambda: got.result(60))
        assert "quota" in error.phase
        got = pool.submit(consumer.get, "k", timeout=60)
        until_requested(producer, 2)
        kept.release()
        check(got.result(60), data())
        until_freed(producer)


def test_room_that_comes_while_more_is_mapped(
    producer: KVProducer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that maps has found none; it is tried again."""
    reserve, is_freed = ArenaPool.reserve, threading.Event()
    tried = list[bool]()
    with KVLink.connect(producer.url, timeout=60, quota=8192) as consumer:
        # Memory that frees at one moment: while a thread maps more, which no call waits for.
        memory = end_of(consumer)._receive_pool

        def late(arenas: ArenaPool, nbytes: int, *, timeout: float = 0.0) -> Block:
            if arenas is not memory._pool:  # the producer's, in the same process
                return reserve(arenas, nbytes, timeout=timeout)
            tried.append(memory.is_in_use)
            try:
                return reserve(arenas, nbytes, timeout=timeout)
            except CapacityError:
                assert is_freed.wait(60)
                raise

        monkeypatch.setattr(ArenaPool, "reserve", late)
        got = begin(pool, consumer, receipts, "kept")
        producer.put(data("kept"))
        kept = got.result(60)
        got = begin(pool, consumer, receipts)
        producer.put(data())
        until(lambda: bool(tried), "more memory is mapped")
        kept.release()
        until(lambda: not memory.is_in_use, "there is room")
        is_freed.set()
        check(got.result(60), data())
    assert tried == [True, False]


def test_a_timeout_tells_how_far_the_payload_is(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """The producer's status is read by the thread that waits."""
    got = begin(pool, consumer, receipts, timeout=0.5)
    allocation = producer.allocate(data())
    error = expect(TransferTimeout, lambda: got.result(60))
    allocation.data.close()
    assert "still writing it" in error.phase
    until(lambda: not producer.stats()["transfers"]["waiting"], "it is cancelled")


def test_it_fails(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    got = begin(pool, consumer, receipts)
    producer.fail("k", "out of blocks")
    assert "out of blocks" in str(expect(TransferFailed, lambda: got.result(60)))
    got = begin(pool, consumer, receipts, "other")
    consumer.abort("other", "not wanted")
    assert "not wanted" in str(expect(TransferFailed, lambda: got.result(60)))


def test_the_loop_ends_it(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """The thread that reads the socket is woken, where no message comes."""
    got = begin(pool, consumer, receipts)
    session = session_of(consumer)
    session.get_table.fail("k", TransferFailed("ended", key="k", reason="ended"))
    expect(TransferFailed, lambda: got.result(60))


@pytest.mark.parametrize("side", ["here", "there"])
def test_the_link_is_closed(
    producer: KVProducer,
    consumer: KVConsumer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    side: str,
) -> None:
    got = begin(pool, consumer, receipts)
    (consumer if side == "here" else producer).close()
    expect(ClosedError if side == "here" else PeerLostError, lambda: got.result(60))


def test_without_a_descriptor_it_is_the_loops(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(int(number) for number in os.listdir("/proc/self/fd"))
    plugs = list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                plugs.append(os.dup(0))
        got = pool.submit(consumer.get, "k", timeout=60)
        until_requested(producer, 1)
        producer.put(data())
        check(got.result(60), data())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for plug in plugs:
            os.close(plug)
    assert receipts.own == []


def test_a_get_with_a_future(
    producer: KVProducer, consumer: KVConsumer, pool: ThreadPoolExecutor, receipts: Receipts
) -> None:
    """It is done, whoever receives; `wait` returns the payload once, and `cancel` drops it."""
    for is_cancelled in (False, True):
        pending = begin_get(consumer, "k", timeout=60)
        waited = pool.submit(pending.wait, timeout=60)
        until_reading(receipts, len(receipts.own))
        receipt = producer.put(data())
        assert pending.future.result(60) is None
        delivery = waited.result(60)
        if is_cancelled:
            pending.cancel()
        check(open_delivery(consumer, delivery, started=0.0), data())
        del delivery, waited
        receipt.wait(timeout=60)
        until_freed(producer)
    assert len(receipts.own) == 2


def test_a_wait_that_an_interrupt_has_ended_is_cancelled(
    producer: KVProducer,
    consumer: KVConsumer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the moment when the get has its answer: another one receives the payload."""
    on_message = GetTable.on_message

    def interrupted(table: GetTable[Any], message: Any) -> None:
        on_message(table, message)
        if isinstance(message, Offer) and not loop_of(end_of(consumer)).is_own_thread:
            raise KeyboardInterrupt

    pending = begin_get(consumer, "k", timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(GetTable, "on_message", interrupted)
        waited = pool.submit(pending.wait, timeout=60)
        until_reading(receipts, 0)
        receipt = producer.put(data())
        assert isinstance(waited.exception(60), KeyboardInterrupt)
    pending.cancel()
    until(lambda: receipt.state == "committed", "another can have it")
    check(consumer.get("k", timeout=60), data())
    until_freed(producer)
    until(lambda: not consumer.stats()["memory"]["used"], "its memory is free")


def test_an_interrupt_while_it_leaves_the_socket(
    producer: KVProducer,
    consumer: KVConsumer,
    pool: ThreadPoolExecutor,
    receipts: Receipts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop reads again: gets that nobody waits for are answered."""
    resume, calls = MonitoredSocket.resume, list[MonitoredSocket]()

    def interrupted(socket: MonitoredSocket) -> None:
        calls.append(socket)
        if len(calls) == 1:
            raise KeyboardInterrupt
        resume(socket)

    monkeypatch.setattr(MonitoredSocket, "resume", interrupted)
    got = begin(pool, consumer, receipts)
    producer.put(data())
    assert isinstance(got.exception(60), KeyboardInterrupt)
    del got  # its traceback has the payload
    pending = [begin_get(consumer, f"k{number}", timeout=60) for number in range(2)]
    until_requested(producer, 2)
    for number, one in enumerate(pending):
        producer.put(data(f"k{number}"))
        one.future.result(60)
        one.cancel()
