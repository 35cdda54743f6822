"""A forked child has none of its parent's arenas, and none of what was received in them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import ClosedError, KVConsumer, KVLink, KVProducer
from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.link.received_stream import ReceivedLayer
from omni_kvlink.memory.mapping import PAGE, Mapping
from omni_kvlink.payload.views import dense, same_bytes
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import expect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.link import Payload


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; 0 if it returned, a negative number if a signal ended it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # the signal is what is expected
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def for_reading(shared: Mapping) -> Mapping:
    return Mapping.readonly(os.dup(shared.fd), shared.nbytes)


@pytest.fixture(params=["anonymous", "shared", "readonly"])
def mapping(request: pytest.FixtureRequest) -> Mapping:
    if request.param == "anonymous":
        return Mapping.anonymous(3 * PAGE)
    shared = Mapping.shared("fork-test", 3 * PAGE)
    return shared if request.param == "shared" else for_reading(shared)


def lines_of(start: int, nbytes: int) -> list[str]:
    """The lines of /proc/self/maps about a span of memory, from their access rights on."""
    found = list[str]()
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, rest = line.split(maxsplit=1)
            first, last = (int(side, 16) for side in span.split("-"))
            if first < start + nbytes and last > start:
                found.append(rest)
    return found


def files_of_this_process() -> list[str]:
    found = list[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_a_child_does_not_keep_the_memory(mapping: Mapping) -> None:
    span = mapping.region.address, mapping.nbytes

    def check() -> None:
        rights = [line.split()[0] for line in lines_of(*span)]
        assert rights, "the addresses could be used for something else"
        assert set(rights) == {"---p"}
        assert not any("fork-test" in file for file in files_of_this_process())

    assert in_child(check) == 0
    assert not any(line.startswith("---") for line in lines_of(*span))
    assert bytes(mapping.region.view()) == bytes(mapping.nbytes)


def test_an_access_in_a_child_ends_it(mapping: Mapping) -> None:
    view = mapping.region.view()
    assert in_child(lambda: view[5]) == -signal.SIGSEGV


def test_a_child_frees_the_addresses_with_its_copies() -> None:
    mapping = Mapping.shared("fork-test", 3 * PAGE)
    held, span = [mapping], (mapping.region.address, mapping.nbytes)
    del mapping

    def check() -> None:
        assert lines_of(*span)
        held.clear()
        assert not lines_of(*span)

    assert in_child(check) == 0
    assert lines_of(*span)


@pytest.fixture(params=["inproc", "shm", "zmq"])
def pair(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = "zmq+tcp://127.0.0.1:0" if request.param == "zmq" else f"{request.param}://forked"
    options: dict[str, Any] = {} if request.param == "zmq" else {"directory": sockets}
    with (
        KVLink.serve(url, quota=8 << 20, inline=0, **options) as producer,
        KVLink.connect(producer.url, timeout=60, quota=8 << 20, **options) as consumer,
    ):
        yield producer, consumer


def test_a_child_never_reads_another_payload(pair: tuple[KVProducer, KVConsumer]) -> None:
    """The parent releases what it received, and reuses the memory, while a child looks at it.

    The payload is too large to travel beside its offer, as over ZMQ one without `inline=` may.
    """
    producer, consumer = pair
    first, second = (Recipe("k", seed=seed, tokens=512).make() for seed in (1, 2))
    receipt = producer.put(first)
    received = consumer.get("k", timeout=60)
    tensor = dense(received.data.tensors()[0])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.close(writing)
        os.read(reading, 1)  # until the parent has reused the memory
        os._exit(int(not torch.equal(tensor, dense(first.tensors()[0]))))
    try:
        del tensor
        received.release()
        del received
        receipt.wait(timeout=60)
        for _ in range(3):
            deliver(producer, consumer, second)
    finally:
        os.close(reading)
        os.close(writing)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGSEGV


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
def test_a_child_keeps_its_copy_of_a_payload_that_came_inline(scheme: str, sockets: str) -> None:
    """Its parent does not reuse that memory."""
    url, data = f"{scheme}://kept", Recipe("k").make()
    with (
        KVLink.serve(url, directory=sockets, inline=INLINE) as producer,
        KVLink.connect(url, timeout=60, directory=sockets) as consumer,
    ):
        producer.put(data)
        received = consumer.get("k", timeout=60)
        tensor = dense(received.data.tensors()[0])
        child = os.fork()
        if child == 0:
            os._exit(int(not same_bytes(tensor, data.tensors()[0])))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        received.release()


def deliver(producer: KVProducer, consumer: KVConsumer, data: Payload) -> None:
    receipt = producer.put(data)
    with consumer.get(data.request_id, timeout=60) as received:
        assert fingerprint(received) == fingerprint(data)
    del received
    receipt.wait(timeout=60)


def test_a_child_is_told(pair: tuple[KVProducer, KVConsumer]) -> None:
    """What the library itself would read or write raises ClosedError in a child."""
    producer, consumer = pair
    data = Recipe("k").make()
    producer.put(data)
    received = consumer.get("k", timeout=60)
    targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
    stream = producer.stream_put(Recipe("s").make())
    layers = consumer.stream_get("s", timeout=60)
    allocation = producer.allocate(Recipe("a").make())

    def check() -> None:
        expect(ClosedError, received.verify, mentions=("after fork",))
        expect(ClosedError, received.scatter, targets, mentions=("after fork",))
        expect(ClosedError, stream.write_layer, 0, *targets[:2])
        expect(ClosedError, lambda: producer.put(Recipe("a").make()))
        expect(ClosedError, lambda: ReceivedLayer(layers, received.manifest, "kv", 0).tensors)

    assert in_child(check) == 0
    stream.fail("the test is over")
    layers.release()
    allocation.release()
    received.scatter(targets)
    received.release()


def test_a_child_does_not_wait_for_a_thread_that_opened_a_layer(
    pair: tuple[KVProducer, KVConsumer],
) -> None:
    """Whatever a thread of the parent was doing at the fork, no lock of it is left to the child."""
    producer, consumer = pair
    producer.put(Recipe("k").make())
    received = consumer.get("k", timeout=60)
    producer.put(Recipe("s").make())
    layers = consumer.stream_get("s", timeout=60)
    inside, may_end = threading.Event(), threading.Event()

    class SlowStream:
        @property
        def delivery(self) -> object:
            inside.set()
            may_end.wait(60)
            return layers.delivery

    slow = ReceivedLayer(SlowStream(), received.manifest, "kv", 0)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: slow.tensors)
    thread.start()
    inside.wait(60)

    def check() -> None:
        signal.alarm(60)
        other = ReceivedLayer(layers, received.manifest, "kv", 0)
        expect(ClosedError, lambda: other.tensors, mentions=("after fork",))

    status = in_child(check)
    may_end.set()
    thread.join()
    assert status == 0
    layers.release()
    received.release()
