"""A consumer's own memory: its limit, waiting for it, its reuse and release."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import CapacityError, KVLink, KVProducer, TransferTimeout
from omni_kvlink.aio import AsyncKVLink
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, FetchLimits
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.memory import arena
from omni_kvlink.testing.caches import Recipe, fingerprint, sized
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import RemoteLink, ThreadPeer
from omni_kvlink.testing.rig import expect, until, until_freed, until_requested
from support.connectors.zmq_addresses import fresh_url
from support.faults.harness import expect_reason, until_loops_sleep
from support.link.ends import end_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.connectors.control.remote_get import InboundTransfer

# Reaches into _inbound_transfers: what is requested at one moment; `stats()`
# is read later.

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
MIB = 1 << 20


@pytest.fixture
def producer(sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve(fresh_url("tcp", sockets), quota=64 * MIB) as link:
        yield link


@pytest.fixture
def threads() -> Iterator[ThreadPeer]:
    peer = ThreadPeer(LinkCommands())
    yield peer
    peer.close()


def connect(threads: ThreadPeer, producer: KVProducer, quota: int) -> RemoteLink:
    threads.call("connect", link="r", url=producer.url, timeout=60, quota=quota)
    return RemoteLink(threads, "r")


def test_larger_than_the_readers_quota(producer: KVProducer, threads: ThreadPeer) -> None:
    """The error comes at once and names the sizes; another reader can still get the payload."""
    reader = connect(threads, producer, MIB)
    receipt = producer.put(sized("k", 2 * MIB).make())
    error = expect(CapacityError, lambda: reader.call("get", key="k", timeout=60))
    assert error.requested > 2 * MIB
    with KVLink.connect(producer.url, timeout=60) as other, other.get("k", timeout=60):
        pass
    receipt.wait(timeout=60)


def test_waiting_for_memory(producer: KVProducer, threads: ThreadPeer) -> None:
    """The timeout names the reason; freed memory is used; small payloads overtake."""
    reader = connect(threads, producer, 4 * MIB)
    for key in ("one", "two"):
        producer.put(sized(key, 3 * MIB).make())
    reader.call("hold", key="one", timeout=60)
    error = expect_reason(
        TransferTimeout,
        "waits for memory",
        lambda timeout: reader.call("get", key="two", timeout=timeout),
    )
    assert isinstance(error, TransferTimeout)
    assert "quota" in error.phase
    waiting = reader.submit("get", key="two", timeout=60)
    until(lambda: producer.stats()["transfers"]["leased"] == 2, "it was offered again")
    producer.put(Recipe("small").make())
    assert reader.call("get", key="small", timeout=60) == fingerprint(Recipe("small").make())
    assert not waiting.done()
    threads.call("release", key="one")
    assert waiting.result(60) == fingerprint(sized("two", 3 * MIB).make())
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "all is back")
    until_freed(producer)


def test_memory_that_must_be_mapped(
    producer: KVProducer, threads: ThreadPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The freed block is too small, but the quota allows to map another."""
    monkeypatch.setattr(arena, "MIN_ARENA", MIB)
    reader = connect(threads, producer, 4 * MIB)
    for key, size in (("one", MIB), ("two", 3 * MIB + MIB // 2)):
        producer.put(sized(key, size).make())
    reader.call("hold", key="one", timeout=60)
    waiting = reader.submit("get", key="two", timeout=60)
    expect(TimeoutError, lambda: waiting.result(0.1))
    threads.call("release", key="one")
    assert waiting.result(60) == fingerprint(sized("two", 3 * MIB + MIB // 2).make())


def test_a_get_that_times_out_waiting_for_memory_leaves_nothing(
    producer: KVProducer, threads: ThreadPeer
) -> None:
    reader = connect(threads, producer, 4 * MIB)
    for key in ("one", "two", "three"):
        producer.put(sized(key, 3 * MIB).make())
    reader.call("hold", key="one", timeout=60)
    for key in ("two", "three"):
        expect(TransferTimeout, lambda key=key: reader.call("get", key=key, timeout=0.05))
    until(lambda: producer.stats()["transfers"]["leased"] == 1, "they went back")
    threads.call("release", key="one")
    for key in ("three", "two"):
        assert reader.call("get", key=key, timeout=60) == fingerprint(sized(key, 3 * MIB).make())
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "all is back")


FAULTS = """
import resource, sys
from omni_kvlink import KVLink
with KVLink.connect(sys.argv[1], timeout=60) as reader:
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        reader.get("k", timeout=60).release()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_no_page_faults_when_warm(producer: KVProducer) -> None:
    """Payloads and ZMQ's receive buffers use memory that is already mapped, in most rounds.

    A round in which more chunks than ever wait in ZMQ needs a new buffer.
    """
    producer.put(sized("k", 48 * MIB).make(), readers=8)
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, producer.url], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    faults = [int(line) for line in done.stdout.split()]
    pages = 48 * MIB // 4096
    assert faults[0] > 200, "its memory is new, be it in huge pages"
    assert statistics.median(faults[2:]) < 100, faults
    assert sum(faults[2:]) < pages // 2, faults  # the window once, which then stays mapped


def test_the_window_is_shared_by_all_payloads(
    producer: KVProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more bytes than the window are requested, however many payloads arrive."""
    window = 2 * CHUNK
    monkeypatch.setattr(ControlSession, "fetch_limits", FetchLimits(CHUNK, window))
    most = []
    fetch_more = ControlSession.fetch_more_in_loop

    def watched(session: ControlSession, inbound: InboundTransfer) -> None:
        fetch_more(session, inbound)
        most.append(sum(one.plan.pending_nbytes for one in session._inbound_transfers.values()))

    monkeypatch.setattr(ControlSession, "fetch_more_in_loop", watched)
    with KVLink.connect(producer.url, timeout=60, quota=64 * MIB) as reader:
        recipes = [sized(f"k{n}", 3 * CHUNK, seed=n) for n in range(4)]
        pending = [begin_get(reader, recipe.key, timeout=60) for recipe in recipes]
        for recipe in recipes:
            producer.put(recipe.make())
        for recipe, get in zip(recipes, pending, strict=True):
            started = time.perf_counter()
            delivery = get.wait(timeout=60)
            with open_delivery(reader, delivery, started=started, verify="full") as found:
                assert fingerprint(found) == fingerprint(recipe.make())
            del found, delivery
    assert max(most) == window


def test_a_small_payload_overtakes_a_large_one(
    producer: KVProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small payload that was requested later does not wait for the end of a large one."""
    ended, both_requested = [], threading.Event()
    monkeypatch.setattr(ControlSession, "fetch_limits", FetchLimits(CHUNK, CHUNK))
    with KVLink.connect(producer.url, timeout=60, quota=64 * MIB, prefault=64 * MIB) as reader:
        for key, size in (("large", 24 * MIB), ("small", 2 * MIB)):
            producer.put(sized(key, size).make())
        end = end_of(reader)
        end._loop.call(both_requested.wait)  # else the large one may arrive before
        try:
            pending = [begin_get(reader, key, timeout=60) for key in ("large", "small")]
        finally:
            both_requested.set()
        for get, key in zip(pending, ("large", "small"), strict=True):
            get.future.add_done_callback(lambda _, key=key: ended.append(key))  # type: ignore[misc]
        for get in pending:
            get.wait(timeout=60).release()
    assert ended == ["small", "large"]


def test_asyncio(producer: KVProducer) -> None:
    """The future completes when the bytes have arrived; a cancelled get releases them."""
    data = sized("k", 5 * MIB).make()

    async def run() -> None:
        async with await AsyncKVLink.connect(producer.url, timeout=60, quota=64 * MIB) as reader:
            getting = asyncio.create_task(reader.get("k", timeout=60))
            await asyncio.to_thread(until_requested, producer, 1)
            receipt = producer.put(data)
            with await getting as found:
                assert fingerprint(found) == fingerprint(data)
            del found, getting
            receipt.wait(timeout=60)
            again = producer.put(data)
            getting = asyncio.create_task(reader.get("k", timeout=60))
            await asyncio.sleep(0)
            getting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await getting
            with await reader.get("k", timeout=60) as found:
                assert fingerprint(found) == fingerprint(data)
            del found
            again.wait(timeout=60)

    asyncio.run(run())
    until_freed(producer)


def test_an_idle_pair_sleeps(producer: KVProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVLink.connect(producer.url, timeout=60) as reader:
        pending = begin_get(reader, "never", timeout=60)
        until_requested(producer, 1)
        until_loops_sleep(monkeypatch)
        pending.cancel()
