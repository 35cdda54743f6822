"""`ucx://` between real processes, killed and frozen: exact bytes, or a typed error."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from battle import Field, Start, kill, timed
from zmq_places import free_port

from omni_kvlink import KVLink, PeerLostError, TransferTimeout
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.zmq import sockets as zmq_sockets
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.memory_checks import sized
from omni_kvlink.testing.rig import (
    PATIENCE,
    SLACK,
    PeerGone,
    ProcessPeer,
    Remote,
    expect,
    until,
    until_freed,
)

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

NOTICED = 1.0
"""Seconds from a kill to every survivor's answer; on loopback it takes milliseconds."""
BIG = sized("k", 3 << 20)
HUGE_NBYTES = 96 << 20
HUGE = sized("k", HUGE_NBYTES)
"""Takes so long that its sender can be stopped amid it."""


@pytest.fixture
def field(battlefield: str) -> Iterator[Field]:
    field = Field(battlefield, url=f"ucx://127.0.0.1:{free_port()}")
    yield field
    field.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of this process give frozen peers up soon."""
    monkeypatch.setattr(zmq_sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(zmq_sockets, "GIVEN_UP_MS", 400)


# The producer dies


@pytest.mark.parametrize("point", ["publish.after", "send.chunk"])
def test_producer_killed(field: Field, start: Start, point: str) -> None:
    """The payload arrives whole, or the reader learns at once that it will not."""
    victim = start({point: "kill"})
    producer, reader = field.serve_at(victim), field.connect()
    waiting = reader.ask("get", key="k", timeout=PATIENCE, verify="full")
    ended = timed(waiting)
    until(lambda: producer.do("stats")["transfers"]["waiting"] == 1, "the want arrived")
    dying = producer.ask("put", recipe=BIG.to_dict())
    victim.process.wait(PATIENCE)
    moment = time.monotonic()
    if point == "publish.after" and waiting.exception(PATIENCE) is None:
        assert waiting.result() == fingerprint(BIG.make())
    else:
        expect(PeerLostError, lambda: waiting.result(PATIENCE), words=("'k'",))
    assert ended.result(PATIENCE) - moment < NOTICED
    with contextlib.suppress(PeerGone):  # it may have answered the moment before
        dying.result(PATIENCE)
    until(lambda: reader.do("stats")["memory"]["used"] == 0, "the reader's memory is free")
    expect(PeerLostError, lambda: reader.do("get", key="k", timeout=0.2), within=0.2 + SLACK)


def test_producer_returns_at_its_address(field: Field, start: Start) -> None:
    """Killed and started again: the reader that waits gets the next payload."""
    victim, heir = start(), start()
    producer, reader = field.serve_at(victim), field.connect()
    producer.do("put", recipe=BIG.to_dict())
    reader.do("get", key="k", timeout=5)
    heir.do("usage")  # its imports are done
    kill(victim)
    until(lambda: not reader.do("stats")["connected"], "the reader noticed")
    waiting = reader.ask("get", key="new", timeout=PATIENCE)
    again = field.serve_at(heir)
    again.do("put", recipe=sized("new", 1 << 20, seed=9).to_dict())
    assert waiting.result(PATIENCE) == fingerprint(sized("new", 1 << 20, seed=9).make())
    assert reader.do("stats")["sessions"] == 2


def test_writer_killed_between_layers(field: Field, start: Start) -> None:
    """What came of a stream stays; who waits for more learns that it will not come."""
    recipe = Recipe("s", layers=3, tokens=700, heads=4, dim=64)
    layers = {
        layer: hash_tensors(places) for (_, layer), places in layers_of(recipe.make()).items()
    }
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    producer.do("stream_put", recipe=recipe.to_dict())
    reader.do("stream_get", key="s", timeout=5)
    victim.do("write", key="s", layer=1)
    assert reader.handle.do("layer", key="s", layer=1, timeout=5) == layers[1]
    waiting = reader.handle.ask("layer", key="s", layer=2, timeout=PATIENCE)
    ended = timed(waiting)
    moment = kill(victim)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    assert ended.result(PATIENCE) - moment < NOTICED
    reader.handle.do("drop", key="s")
    until(lambda: reader.do("stats")["memory"]["used"] == 0, "the reader's memory is free")


# A reader dies


@pytest.mark.parametrize("point", ["fetch.chunk", "get.mapped"])
def test_reader_killed_while_leased(field: Field, start: Start, point: str) -> None:
    """What a dead reader had, or was fetching, is there for the next one."""
    victim = start({point: "kill"})
    producer = field.serve()
    dying, reader = field.connect_at(victim), field.connect()
    receipt = producer.put(BIG.make())
    dying.ask("get", key="k", timeout=PATIENCE)
    victim.process.wait(PATIENCE)
    moment = time.monotonic()
    waiting = reader.ask("get", key="k", timeout=PATIENCE, verify="full")
    assert waiting.result(PATIENCE) == fingerprint(BIG.make())
    assert time.monotonic() - moment < NOTICED
    receipt.wait(timeout=5)
    assert producer.stats()["transfers"]["redelivered"] == 1
    until_freed(producer)


# Frozen


def stop_amid(victim: ProcessPeer, producer: Remote, reader: Remote, timeout: float) -> Future[Any]:
    """A `get` whose producer was stopped when it had sent a part."""
    for _ in range(20):
        producer.do("put", recipe=HUGE.to_dict())
        waiting = reader.ask("get", key="k", timeout=timeout)
        until(lambda w=waiting: w.done() or active(reader), "its bytes are coming")
        os.kill(victim.process.pid, signal.SIGSTOP)
        time.sleep(0.3)  # what is in the sockets comes all the same
        if active(reader):
            return waiting
        os.kill(victim.process.pid, signal.SIGCONT)
        assert waiting.result(PATIENCE) == fingerprint(HUGE.make())
        until(lambda: producer.do("stats")["transfers"]["live"] == 0, "it was read")
    raise AssertionError("the producer could not be stopped in time")


def held(stats: dict[str, Any]) -> int:
    """Pieces that UCX has the memory of."""
    return int(stats["ucx"]["active"] + stats["ucx"]["quarantined"])


def active(reader: Remote) -> int:
    return held(reader.do("stats"))


def test_a_deadline_passes_while_bytes_come(field: Field, start: Start) -> None:
    """Memory that UCX may still write to is nobody else's until the sender has gone on."""
    field.options["quota"] = 256 << 20
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    waiting = stop_amid(victim, producer, reader, timeout=2.0)
    expect(TransferTimeout, lambda: waiting.result(PATIENCE), words=("bytes have come",))
    until(lambda: reader.do("stats")["ucx"]["quarantined"] == 1, "quarantine", 1.5)
    stats = reader.do("stats")
    assert stats["memory"]["used"] >= HUGE_NBYTES
    assert stats["ucx"]["quarantined_nbytes"] >= HUGE_NBYTES
    os.kill(victim.process.pid, signal.SIGCONT)
    until(lambda: reader.do("stats")["memory"]["used"] == 0, "the reader's memory is free")
    assert reader.do("stats")["ucx"]["quarantined"] == 0
    assert reader.do("get", key="k", timeout=10, verify="full") == fingerprint(HUGE.make())


def test_a_link_closes_while_its_producer_is_frozen(field: Field, start: Start) -> None:
    field.options["quota"] = 256 << 20
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    waiting = stop_amid(victim, producer, reader, timeout=PATIENCE)
    moment = time.monotonic()
    reader.do("close")
    assert time.monotonic() - moment < 4
    assert waiting.exception(PATIENCE) is not None


def test_frozen_producer(impatient: None, field: Field, start: Start) -> None:
    """No call outlives its deadline; at last it is given up, and found again when it thaws."""
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    waiting = reader.ask("get", key="k", timeout=PATIENCE)
    until(lambda: producer.do("stats")["transfers"]["waiting"] == 1, "the want arrived")
    os.kill(victim.process.pid, signal.SIGSTOP)
    with pytest.raises(TransferTimeout, match="does not answer"):
        KVLink.connect(field.url, timeout=0.2)
    expect(PeerLostError, lambda: waiting.result(5), words=("'k'",))
    until(lambda: not reader.do("stats")["ucx"]["endpoints"], "UCX is told", 2)
    again = reader.ask("get", key="k", timeout=PATIENCE)
    os.kill(victim.process.pid, signal.SIGCONT)
    producer.do("put", recipe=BIG.to_dict())
    assert again.result(PATIENCE) == fingerprint(BIG.make())


def freeze_amid(victim: ProcessPeer, producer: KVLink, frozen: Remote) -> None:
    """Stop a reader that has a part of what is sent to it."""
    for _ in range(20):
        producer.put(HUGE.make())
        waiting = frozen.ask("get", key="k", timeout=PATIENCE)
        until(lambda w=waiting: w.done() or held(producer.stats()), "bytes leave")
        os.kill(victim.process.pid, signal.SIGSTOP)
        time.sleep(0.3)  # less than it takes to be given up
        if held(producer.stats()):
            return
        os.kill(victim.process.pid, signal.SIGCONT)
        waiting.result(PATIENCE)
        until(lambda: not producer.stats()["transfers"]["live"], "it was read")
    raise AssertionError("the reader could not be stopped in time")


def test_a_reader_is_frozen_amid_its_bytes(impatient: None, field: Field, start: Start) -> None:
    """Another reader has them; the memory they left from is not reused before UCX let go of it."""
    field.options["quota"] = 256 << 20
    victim = start()
    producer = field.serve()
    frozen, reader = field.connect_at(victim), field.connect()
    freeze_amid(victim, producer, frozen)
    assert reader.do("get", key="k", timeout=10, verify="full") == fingerprint(HUGE.make())
    until(lambda: not producer.stats()["transfers"]["live"], "it was read")
    assert producer.stats()["ucx"]["quarantined"] == 1
    assert producer.stats()["memory"]["used"] >= HUGE_NBYTES
    kill(victim)
    until_freed(producer)


# Forked


def test_fork_of_a_producer(field: Field, start: Start) -> None:
    """The child may use nothing, and does not hide its parent's death."""
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    answers = producer.do("fork", linger=1.5)
    for name in ("pid", "close", "get"):
        del answers[name]
    assert set(answers.values()) == {"ClosedError"}, answers
    waiting = reader.ask("get", key="w", timeout=PATIENCE)
    ended = timed(waiting)
    until(lambda: producer.do("stats")["transfers"]["waiting"] == 1, "the want arrived")
    moment = kill(victim)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    assert ended.result(PATIENCE) - moment < NOTICED, "the child hid its parent's death"
