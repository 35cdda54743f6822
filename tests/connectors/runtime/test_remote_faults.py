"""Links over sockets between real processes, killed and frozen: a payload, or a typed error."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVLink, PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.connectors.control import monitored_socket
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of, sized
from omni_kvlink.testing.peer_harness import PATIENCE, PeerExited
from omni_kvlink.testing.rig import expect, until, until_freed
from support.connectors.zmq_addresses import fresh_url
from support.faults.frozen import freeze
from support.faults.harness import Field, Start, expect_reason, kill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.connectors.protocol.transfer import Transfer
    from omni_kvlink.memory.region import Region

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

HOUR_MS = 3_600_000
BIG = sized("k", 3 << 20)
"""Too large to travel with its offer: it is fetched in chunks."""


UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is missing"),
)


@pytest.fixture(params=["tcp", UCX])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def field(transport: str, socket_dir: str) -> Iterator[Field]:
    field = Field(socket_dir, url=fresh_url(transport, socket_dir))
    yield field
    field.close()


@pytest.fixture(autouse=True)
def _no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death must be detected by the end of its connections, not by a missing heartbeat."""
    monkeypatch.setattr(monitored_socket, "HEARTBEAT_MS", HOUR_MS)
    monkeypatch.setattr(monitored_socket, "HEARTBEAT_TIMEOUT_MS", HOUR_MS)


EACH = pytest.mark.parametrize("transport", ["tcp", "ipc", UCX])


# The producer dies


@EACH
@pytest.mark.parametrize("point", ["put.copied", "publish.after", "send.chunk"])
def test_producer_killed(field: Field, start: Start, point: str) -> None:
    """The payload arrives whole, or the get fails at once."""
    target = start({point: "kill"})
    producer, reader = field.serve_at(target), field.connect()
    waiting = reader.submit("get", key="k", timeout=PATIENCE, verify="full")
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    dying = producer.submit("put", recipe=BIG.to_dict())
    target.process.wait(PATIENCE)
    if point == "publish.after" and waiting.exception(PATIENCE) is None:
        assert waiting.result() == fingerprint(BIG.make())
    else:
        expect(PeerLostError, lambda: waiting.result(PATIENCE), mentions=("'k'",))
    with contextlib.suppress(PeerExited):  # it may have answered before it was killed
        dying.result(PATIENCE)
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "the reader's memory is free")
    expect(PeerLostError, lambda: reader.call("get", key="k", timeout=0.2))


def test_what_was_received_outlives_its_producer(field: Field, start: Start) -> None:
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    producer.call("put", recipe=BIG.to_dict())
    assert reader.call("hold", key="k", timeout=60) == fingerprint(BIG.make())
    before = field.here.call("hash_held", key="k")
    waiting = reader.submit("get", key="other", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    kill(target)
    expect(PeerLostError, lambda: waiting.result(PATIENCE), mentions=("'other'",))
    assert field.here.call("hash_held", key="k") == before
    assert reader.call("stats")["memory"]["used"] > 0
    field.here.call("release", key="k")
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "the reader's memory is free")


@EACH
def test_producer_returns_at_its_address(field: Field, start: Start) -> None:
    """After a restart, a waiting reader gets the next payload."""
    target, successor = start(), start()
    producer, reader = field.serve_at(target), field.connect()
    producer.call("put", recipe=BIG.to_dict())
    reader.call("get", key="k", timeout=60)
    producer.call("put", recipe=Recipe("lost").to_dict())
    successor.call("usage")  # its imports are done
    kill(target)
    until(lambda: not reader.call("stats")["connected"], "the reader noticed")
    waiting = reader.submit("get", key="new", timeout=PATIENCE)
    again = field.serve_at(successor)
    again.call("put", recipe=sized("new", 1 << 20, seed=9).to_dict())
    assert waiting.result(PATIENCE) == fingerprint(sized("new", 1 << 20, seed=9).make())
    expect(
        TransferTimeout,
        lambda: reader.call("get", key="lost", timeout=0.1),
        mentions=("not announced",),
    )
    assert reader.call("stats")["sessions"] == 2


def test_writer_killed_between_layers(field: Field, start: Start) -> None:
    """Layers that have arrived stay; waiting for the next one fails."""
    recipe = Recipe("s", layers=3, tokens=700, heads=4, dim=64)
    layers = {layer: hash_tensors(views) for (_, layer), views in layers_of(recipe.make()).items()}
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    producer.call("stream_put", recipe=recipe.to_dict())
    reader.call("stream_get", key="s", timeout=60)
    target.call("write", key="s", layer=1)
    assert reader.peer.call("wait_layer", key="s", layer=1, timeout=60) == layers[1]
    waiting = reader.peer.submit("wait_layer", key="s", layer=2, timeout=PATIENCE)
    kill(target)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    reader.peer.call("release", key="s")
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "the reader's memory is free")


# A reader dies


def test_reader_killed_while_waiting(field: Field, start: Start) -> None:
    target = start()
    producer = field.serve()
    dying = field.connect_at(target)
    dying.submit("get", key="k", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
    kill(target)
    until(lambda: producer.stats()["readers"] == 0, "the producer noticed")
    assert producer.stats()["transfers"]["waiting"] == 0


@EACH
@pytest.mark.parametrize("how", ["hold", "get.offered", "fetch.chunk", "get.mapped"])
def test_reader_killed_while_leased(field: Field, start: Start, how: str) -> None:
    """A payload that a dead reader had, or was fetching, goes to the next one."""
    target = start({how: "kill"} if "." in how else None)
    producer = field.serve()
    dying, reader = field.connect_at(target), field.connect()
    receipt = producer.put(BIG.make())
    taken = dying.submit("get" if "." in how else how, key="k", timeout=60)
    if "." in how:
        target.process.wait(PATIENCE)
    else:
        taken.result(PATIENCE)
        assert receipt.state == "leased"
        kill(target)
    waiting = reader.submit("get", key="k", timeout=PATIENCE, verify="full")
    assert waiting.result(PATIENCE) == fingerprint(BIG.make())
    receipt.wait(timeout=60)
    assert producer.stats()["transfers"]["redelivered"] == 1
    until_freed(producer)


def test_reader_killed_and_nobody_else_comes(field: Field, start: Start) -> None:
    target = start()
    producer = field.serve()
    dying = field.connect_at(target)
    hold = dying.submit("hold", key="k", timeout=PATIENCE)  # before the time starts to run
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
    receipt = producer.put(BIG.make(), ttl=0.3)
    hold.result(PATIENCE)
    kill(target)
    expect(TransferFailed, lambda: receipt.wait(timeout=60), mentions=("expired",))
    until_freed(producer)


# Sent from the caller's own tensors


@EACH
def test_reader_killed_during_a_direct_put(field: Field, start: Start) -> None:
    """The put waits for another reader, which gets every byte."""
    target = start({"fetch.chunk": "kill"})
    producer, reader = field.serve(), field.connect()
    field.connect_at(target).submit("get", key="k", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(producer.put, BIG.make(), direct=True)
        target.process.wait(PATIENCE)
        assert reader.call("get", key="k", timeout=60, verify="full") == fingerprint(BIG.make())
        putting.result(PATIENCE).wait(timeout=60)
    until_freed(producer)


@EACH
def test_reader_killed_after_a_direct_put(field: Field, start: Start) -> None:
    """The reader had the only copy: the receipt and the next get fail with that reason."""
    target = start()
    producer, reader = field.serve(), field.connect()
    held_future = field.connect_at(target).submit("hold", key="k", timeout=PATIENCE)
    receipt = producer.put(BIG.make(), direct=True)
    assert held_future.result(PATIENCE) == fingerprint(BIG.make())
    kill(target)
    again = ("the caller's again",)
    expect(TransferFailed, lambda: receipt.wait(timeout=60), mentions=again)
    expect(TransferFailed, lambda: reader.call("get", key="k", timeout=60), mentions=again)
    until_freed(producer)


@EACH
def test_a_direct_put_is_aborted_during_a_fetch(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort comes just before the tensors are sent; the reader is not disconnected for it."""
    piece, aborted = PooledProducer.piece, list[str]()

    def abort_first(self: PooledProducer, transfer: Transfer, start: int, stop: int) -> Region:
        if transfer.direct is not None and stop - start > 64 << 10 and not aborted:
            aborted.append(transfer.key)
            self.fail(transfer.key, "no more", aborted=True)
        return piece(self, transfer, start, stop)

    monkeypatch.setattr(PooledProducer, "piece", abort_first)
    producer, reader = field.serve(), field.connect()
    waiting = reader.submit("get", key="k", timeout=PATIENCE)
    with pytest.raises(TransferFailed, match="no more"):
        producer.put(BIG.make(), direct=True)
    expect(TransferFailed, lambda: waiting.result(PATIENCE), mentions=("no more",))
    assert (aborted, producer.stats()["refused"]) == (["k"], {})
    receipt = producer.put(BIG.make())
    assert reader.call("get", key="k", timeout=60, verify="full") == fingerprint(BIG.make())
    receipt.wait(timeout=60)


# Frozen


def test_frozen_producer(impatient: None, field: Field, start: Start) -> None:
    """Calls end in time; the producer is disconnected, and found again when it continues."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    waiting = reader.submit("get", key="k", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    freeze(target.process.pid)
    expect_reason(
        TransferTimeout,
        "does not answer",
        lambda timeout: KVLink.connect(field.url, timeout=timeout),
    )
    expect(PeerLostError, lambda: waiting.result(PATIENCE), mentions=("'k'",))
    expect(PeerLostError, lambda: reader.call("get", key="k", timeout=0.2))
    again = reader.submit("get", key="k", timeout=PATIENCE)
    os.kill(target.process.pid, signal.SIGCONT)
    producer.call("put", recipe=BIG.to_dict())
    assert again.result(PATIENCE) == fingerprint(BIG.make())


def test_frozen_reader(impatient: None, field: Field, start: Start) -> None:
    """Its payload goes to another reader, and stays unchanged in its own memory."""
    target = start()
    producer = field.serve()
    frozen, reader = field.connect_at(target), field.connect()
    receipt = producer.put(BIG.make())
    frozen.call("hold", key="k", timeout=60)
    before = target.call("hash_held", key="k")
    freeze(target.process.pid)
    assert reader.call("get", key="k", timeout=60) == fingerprint(BIG.make())
    receipt.wait(timeout=60)
    until_freed(producer)
    os.kill(target.process.pid, signal.SIGCONT)
    assert target.call("hash_held", key="k") == before
    target.call("release", key="k")
    data = Recipe("again").make()
    waiting = frozen.submit("get", key="again", timeout=60)
    last = producer.put(data)
    with contextlib.suppress(PeerLostError):  # asked before it knew
        assert waiting.result(PATIENCE) == fingerprint(data)
        last.wait(timeout=60)
    assert producer.stats()["transfers"]["redelivered"] == 1


# Forked


@EACH
def test_fork_of_a_producer(field: Field, start: Start) -> None:
    """The child cannot use the link, and does not hide its parent's death."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    answers = producer.call("fork", linger=2 * PATIENCE)
    child = int(answers.pop("pid"))
    assert answers.pop("close") == ""
    assert answers.pop("get") == "AttributeError"  # a producer has no such method
    assert set(answers.values()) == {"ClosedError"}, answers
    waiting = reader.submit("get", key="w", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    kill(target)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    again = field.serve()  # the address is free, though the child is still there
    receipt = again.put(BIG.make())
    assert reader.call("get", key="k", timeout=60) == fingerprint(BIG.make())
    receipt.wait(timeout=60)
    os.kill(child, signal.SIGKILL)  # an error if it was not there to the end


def test_fork_of_a_reader(field: Field, start: Start) -> None:
    target = start()
    producer, reader = field.serve(), field.connect_at(target)
    other = field.connect()
    receipt = producer.put(BIG.make())
    reader.call("hold", key="k", timeout=60)
    child = int(reader.call("fork", linger=2 * PATIENCE)["pid"])
    assert receipt.state == "leased", "the child's copy released it"
    kill(target)
    assert other.call("get", key="k", timeout=60) == fingerprint(BIG.make())
    receipt.wait(timeout=60)
    os.kill(child, signal.SIGKILL)  # an error if it was not there to the end
