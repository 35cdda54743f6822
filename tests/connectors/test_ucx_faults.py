"""`ucx://` between real processes, killed and frozen: a payload, or a typed error, and no torn byte."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Iterator

import pytest
from battle import Field, Start, kill, timed
from zmq_places import free_port

from omni_kvlink import KVLink, PeerLostError, TransferTimeout
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.zmq import sockets as zmq_sockets
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.memory_checks import sized
from omni_kvlink.testing.rig import PATIENCE, SLACK, PeerGone, Remote, expect, until, until_freed

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

NOTICED = 1.0
"""Seconds from a kill to every survivor's answer; on loopback it takes milliseconds."""
BIG = sized("k", 3 << 20)
HUGE = sized("k", 200 << 20)
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


@pytest.mark.parametrize("point", ["publish.before", "publish.after", "send.chunk"])
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


@pytest.mark.parametrize("how", ["hold", "get.offered", "fetch.chunk", "get.mapped"])
def test_reader_killed_while_leased(field: Field, start: Start, how: str) -> None:
    """What a dead reader had, or was fetching, is there for the next one."""
    victim = start({how: "kill"} if "." in how else None)
    producer = field.serve()
    dying, reader = field.connect_at(victim), field.connect()
    receipt = producer.put(BIG.make())
    taken = dying.ask("get" if "." in how else how, key="k", timeout=5)
    if "." in how:
        victim.process.wait(PATIENCE)
        moment = time.monotonic()
    else:
        taken.result(PATIENCE)
        moment = kill(victim)
    waiting = reader.ask("get", key="k", timeout=PATIENCE, verify="full")
    assert waiting.result(PATIENCE) == fingerprint(BIG.make())
    assert time.monotonic() - moment < NOTICED
    receipt.wait(timeout=5)
    assert producer.stats()["transfers"]["redelivered"] == 1
    until_freed(producer)


# Frozen


def stopped_amid(reader: Remote, victim_pid: int) -> float:
    """Stop the producer when it has sent a part; the moment."""
    until(lambda: reader.do("stats")["ucx"]["active"] == 1, "its bytes are coming")
    os.kill(victim_pid, signal.SIGSTOP)
    return time.monotonic()


def test_a_deadline_passes_while_bytes_come(field: Field, start: Start) -> None:
    """Memory that UCX may still write to is nobody else's until the sender has gone on."""
    field.options["quota"] = 256 << 20
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    producer.do("put", recipe=HUGE.to_dict())
    waiting = reader.ask("get", key="k", timeout=1.5)
    stopped_amid(reader, victim.process.pid)
    expect(TransferTimeout, lambda: waiting.result(PATIENCE), words=("bytes have come",))
    until(lambda: reader.do("stats")["ucx"]["quarantined"] == 1, "it is in quarantine")
    stats = reader.do("stats")
    assert stats["memory"]["used"] >= 200 << 20
    assert stats["ucx"]["quarantined_nbytes"] >= 200 << 20
    os.kill(victim.process.pid, signal.SIGCONT)
    until(lambda: reader.do("stats")["memory"]["used"] == 0, "the reader's memory is free")
    assert reader.do("stats")["ucx"]["quarantined"] == 0
    assert reader.do("get", key="k", timeout=10, verify="full") == fingerprint(HUGE.make())


def test_a_link_closes_while_its_producer_is_frozen(field: Field, start: Start) -> None:
    field.options["quota"] = 256 << 20
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    producer.do("put", recipe=HUGE.to_dict())
    waiting = reader.ask("get", key="k", timeout=PATIENCE)
    moment = stopped_amid(reader, victim.process.pid)
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
    again = reader.ask("get", key="k", timeout=PATIENCE)
    os.kill(victim.process.pid, signal.SIGCONT)
    producer.do("put", recipe=BIG.to_dict())
    assert again.result(PATIENCE) == fingerprint(BIG.make())


def test_frozen_reader(impatient: None, field: Field, start: Start) -> None:
    """What it has is given to another, and stays what it is where it was."""
    victim = start()
    producer = field.serve()
    frozen, reader = field.connect_at(victim), field.connect()
    receipt = producer.put(BIG.make())
    frozen.do("hold", key="k", timeout=5)
    before = victim.do("look", key="k")
    os.kill(victim.process.pid, signal.SIGSTOP)
    assert reader.do("get", key="k", timeout=5) == fingerprint(BIG.make())
    receipt.wait(timeout=5)
    until_freed(producer)
    os.kill(victim.process.pid, signal.SIGCONT)
    assert victim.do("look", key="k") == before


def test_a_reader_is_frozen_amid_its_bytes(
    impatient: None, field: Field, start: Start
) -> None:
    """Another reader has them; the memory they left from is not reused before UCX let go of it."""
    field.options["quota"] = 256 << 20
    victim = start()
    producer = field.serve()
    frozen, reader = field.connect_at(victim), field.connect()
    producer.put(HUGE.make())
    frozen.ask("get", key="k", timeout=PATIENCE)
    until(lambda: producer.stats()["ucx"]["active"] == 1, "bytes are leaving")
    os.kill(victim.process.pid, signal.SIGSTOP)
    assert reader.do("get", key="k", timeout=10, verify="full") == fingerprint(HUGE.make())
    until(lambda: producer.stats()["transfers"]["released"] == 1, "it was read")
    assert producer.stats()["ucx"]["quarantined"] == 1
    assert producer.stats()["memory"]["used"] >= 200 << 20
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
