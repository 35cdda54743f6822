"""A producer whose process has no descriptor left serves its readers, and accepts again later.

Not over `zmq+ipc`: libzmq 4.3.5 ends a process that cannot accept a connection there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink, KVProducer
from omni_kvlink.connectors.control import peer
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import until, until_freed
from support.connectors.zmq_addresses import fresh_url
from support.link.ends import end_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from support.faults.harness import Start

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[list[int]]:
    """Limit this process to a few more descriptors than it has; give those that fill the gaps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # else it would free some later
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for _ in range(count):
            os.close(fillers.pop())
        yield fillers
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


@pytest.fixture
def producer(sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve(fresh_url("tcp", sockets), quota=8 << 20) as link:
        yield link


def connect(producer: KVProducer, start: Start, name: str) -> RemoteLink:
    reader = RemoteLink(start(), name)
    reader.call("connect", url=producer.url, timeout=PATIENCE, quota=8 << 20)
    return reader


def transfer(producer: KVProducer, reader: RemoteLink, key: str) -> None:
    receipt = producer.put(Recipe(key).make())
    got = reader.call("get", key=key, timeout=PATIENCE, verify="full")
    assert got == fingerprint(Recipe(key).make())
    receipt.wait(timeout=PATIENCE)
    until_freed(producer)


def until_refused(producer: KVProducer, connecting: Future[Any]) -> None:
    """Wait until some attempts of a reader were refused; ZMQ took them from the queue."""

    def count() -> int:
        found: int = producer.stats()["refused"].get("no descriptors", 0)
        return found

    until(lambda: count() >= 5 or connecting.done(), "ZMQ does not try without end")
    assert not connecting.done(), connecting.exception()


def test_no_descriptor_is_left(
    producer: KVProducer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that wait are taken from the queue and ended, those that are there are served."""
    # On a busy machine a late event would give up a duplicate, too, and so admit the reader.
    monkeypatch.setattr(peer, "_ACCEPT_SECONDS", 3600)
    reader, later = connect(producer, start, "first"), connect(producer, start, "later")
    later.call("close")
    until(lambda: producer.stats()["readers"] == 1, "the later reader has left")
    with descriptors_left(0):
        connecting = later.submit("connect", url=producer.url, timeout=PATIENCE, quota=8 << 20)
        until_refused(producer, connecting)
        transfer(producer, reader, "meanwhile")
        assert producer.stats()["readers"] == 1
    connecting.result(PATIENCE)
    transfer(producer, later, "later")
    transfer(producer, reader, "again")


def test_the_last_descriptor(producer: KVProducer, start: Start) -> None:
    """The reader whose connection takes it is served, though it cannot be duplicated."""
    reader = RemoteLink(start(), "last")
    with descriptors_left(1):
        reader.call("connect", url=producer.url, timeout=PATIENCE, quota=8 << 20)
        transfer(producer, reader, "k")
    reader.call("close")
    until(lambda: producer.stats()["readers"] == 0, "its end was noticed")
    assert "too long" not in producer.stats()["refused"]


def test_another_thread_takes_the_descriptor_that_was_given_up(
    producer: KVProducer, start: Start
) -> None:
    """The descriptor of a peer's duplicate serves as well."""
    reader, later = connect(producer, start, "first"), connect(producer, start, "later")
    later.call("close")
    until(lambda: producer.stats()["readers"] == 1, "the later reader has left")
    end = end_of(producer)
    served = end.listeners[0]
    with descriptors_left(0):
        # The spare descriptor is lost at the moment at which another thread takes its number.
        os.close(served._ungreeted.spare)
        served._ungreeted.spare = -1  # as above
        taken = os.dup(0)
        connecting = later.submit("connect", url=producer.url, timeout=PATIENCE, quota=8 << 20)
        until_refused(producer, connecting)
        os.close(taken)
        connecting.result(PATIENCE)
    transfer(producer, reader, "first")
    transfer(producer, later, "later")


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_closing_without_a_descriptor(transport: str, sockets: str, start: Start) -> None:
    """Readers are told, and the socket's file is removed."""
    producer = KVLink.serve(fresh_url(transport, sockets), quota=8 << 20)
    reader = connect(producer, start, "r")
    with descriptors_left(0):
        producer.close()
    assert reader.submit("get", key="k", timeout=0.0).exception(PATIENCE) is not None
    assert os.listdir(sockets) == []


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_more_descriptors_than_select_takes(transport: str, sockets: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this process may not have 2,000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    fillers = [os.dup(0) for _ in range(1100)]
    try:
        with (
            KVLink.serve(fresh_url(transport, sockets), quota=8 << 20) as producer,
            KVLink.connect(producer.url, timeout=PATIENCE, quota=8 << 20) as reader,
        ):
            producer.put(Recipe("k").make())
            reader.get("k", timeout=PATIENCE, verify="full").release()
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Servers switch the cyclic garbage collector off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_lost_producers_leave_no_descriptor(
    no_collector: None, transport: str, sockets: str, start: Start
) -> None:
    target, url, before = start(), fresh_url(transport, sockets), 0
    producer = RemoteLink(target, "p")
    producer.call("serve", url=url, quota=8 << 20)
    with KVLink.connect(url, timeout=PATIENCE, quota=8 << 20) as reader:
        for number in range(5):
            producer.call("put", recipe=Recipe("k").to_dict())
            reader.get("k", timeout=PATIENCE).release()
            if number == 1:
                before = count_descriptors()
            producer.call("close")
            until(lambda: not reader.stats()["connected"], "the producer is gone")
            producer = RemoteLink(target, f"p{number}")
            producer.call("serve", url=url, quota=8 << 20)
        until(lambda: count_descriptors() <= before, "closed sessions keep none")
        producer.call("close")


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_lost_readers_leave_no_descriptor(
    no_collector: None, transport: str, sockets: str, start: Start
) -> None:
    target, url, before = start(), fresh_url(transport, sockets), 0
    with KVLink.serve(url, quota=8 << 20) as producer:
        for number in range(5):
            reader = RemoteLink(target, f"r{number}")
            reader.call("connect", url=url, timeout=PATIENCE, quota=8 << 20)
            transfer(producer, reader, f"k{number}")
            if number == 0:
                before = count_descriptors()
            reader.call("close")
            until(lambda: producer.stats()["readers"] == 0, "it has left")
        until(lambda: count_descriptors() <= before, "connections that ended keep none")
