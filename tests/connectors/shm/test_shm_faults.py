"""Real processes, killed and frozen: each survivor gets a payload or a typed error."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import Future

import pytest
from fault_harness import NOTICED, Field, Start, kill, timed

from omni_kvlink import KVLink, PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import PATIENCE, SLACK, PeerGone, expect, until, until_freed

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# The producer dies


@pytest.mark.parametrize("point", ["put.reserved", "put.copied", "put.encoded", "publish.before"])
def test_producer_killed_before_commit(pooled: Field, start: Start, point: str) -> None:
    victim = start({point: "kill"})
    producer, reader = pooled.serve_at(victim), pooled.connect()
    waiting = reader.ask("get", key="k", timeout=PATIENCE)
    ended = timed(waiting)
    until(lambda: producer.do("stats")["transfers"]["waiting"] == 1, "the want arrived")
    dying = producer.ask("put", recipe=Recipe("k").to_dict())
    victim.process.wait(PATIENCE)
    moment = time.monotonic()
    expect(PeerLostError, lambda: waiting.result(PATIENCE), words=("'k'",))
    assert ended.result(PATIENCE) - moment < NOTICED
    expect(PeerGone, lambda: dying.result(PATIENCE))
    # Nobody answers at that name: the deadline holds.
    expect(PeerLostError, lambda: reader.do("get", key="k", timeout=0.2), within=0.2 + SLACK)


def test_producer_killed_after_commit(field: Field, start: Start) -> None:
    """The payload that was offered arrives whole, or the reader learns that it will not."""
    victim = start({"publish.after": "kill"})
    producer, reader = field.serve_at(victim), field.connect()
    waiting = reader.ask("get", key="k", timeout=PATIENCE, verify="full")
    ended = timed(waiting)
    until(lambda: producer.do("stats")["transfers"]["waiting"] == 1, "the want arrived")
    producer.ask("put", recipe=Recipe("k").to_dict())
    victim.process.wait(PATIENCE)
    moment = time.monotonic()
    with contextlib.suppress(PeerLostError):
        assert waiting.result(PATIENCE) == fingerprint(Recipe("k").make())
    assert ended.result(PATIENCE) - moment < NOTICED


def test_producer_killed_between_commit_and_fetch(pooled: Field, start: Start) -> None:
    victim = start()
    producer, reader = pooled.serve_at(victim), pooled.connect()
    producer.do("put", recipe=Recipe("k").to_dict())
    waiting = reader.ask("get", key="other", timeout=PATIENCE)
    ended = timed(waiting)
    until(lambda: producer.do("stats")["transfers"]["waiting"] == 1, "the want arrived")
    moment = kill(victim)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    assert ended.result(PATIENCE) - moment < NOTICED
    expect(PeerLostError, lambda: reader.do("get", key="k", timeout=0.2), within=0.2 + SLACK)


def test_producer_killed_while_offering(pooled: Field, start: Start) -> None:
    """A get issued at the very moment of the death never hangs and never gives wrong bytes."""
    victim = start()
    producer, reader = pooled.serve_at(victim), pooled.connect()
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        producer.do("put", recipe=Recipe(key).to_dict())
    early = [reader.ask("get", key=key, timeout=1, verify="full") for key in keys[:20]]
    kill(victim)
    late, lasted = list[Future[str]](), list[float]()
    for key in keys[20:]:
        asked = time.monotonic()
        late.append(reader.ask("get", key=key, timeout=0.2))
        late[-1].add_done_callback(lambda _, asked=asked: lasted.append(time.monotonic() - asked))  # type: ignore[misc]
    for key, get in zip(keys, [*early, *late], strict=True):
        with contextlib.suppress(PeerLostError):
            assert get.result(PATIENCE) == fingerprint(Recipe(key).make())
    until(lambda: len(lasted) == 20, "all have ended")
    assert max(lasted) < 0.2 + SLACK


def test_producer_killed_while_leased(field: Field, start: Start) -> None:
    """What a reader holds stays whole after its producer's death, and can be let go."""
    victim = start()
    producer, reader = field.serve_at(victim), field.connect()
    producer.do("put", recipe=Recipe("k").to_dict())
    reader.do("hold", key="k", timeout=5)
    before = field.here.do("look", key="k")
    waiting = reader.ask("get", key="other", timeout=PATIENCE)
    ended = timed(waiting)
    until(lambda: producer.do("stats")["transfers"]["waiting"] == 1, "the want arrived")
    moment = kill(victim)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    assert ended.result(PATIENCE) - moment < NOTICED
    assert field.here.do("look", key="k") == before
    field.here.do("drop", key="k")


def test_producer_returns_under_its_name(pooled: Field, start: Start) -> None:
    """Killed and started again: the reader that waits has the next payload when it is put."""
    victim, heir = start(), start()
    producer, reader = pooled.serve_at(victim), pooled.connect()
    producer.do("put", recipe=Recipe("old").to_dict())
    reader.do("get", key="old", timeout=5)
    producer.do("put", recipe=Recipe("lost").to_dict())
    kill(victim)
    until(lambda: not reader.do("stats")["connected"], "the reader noticed")
    waiting = reader.ask("get", key="new", timeout=PATIENCE)
    ended = timed(waiting)
    again = pooled.serve_at(heir)
    again.do("put", recipe=Recipe("new", seed=9).to_dict())
    moment = time.monotonic()
    assert waiting.result(PATIENCE) == fingerprint(Recipe("new", seed=9).make())
    assert ended.result(PATIENCE) - moment < NOTICED
    expect(TransferTimeout, lambda: reader.do("get", key="lost", timeout=0.1), words=("never",))
    assert reader.do("stats")["sessions"] == 2


# A reader dies


def test_reader_killed_while_waiting(pooled: Field, start: Start) -> None:
    victim = start()
    producer = pooled.serve()
    dying, reader = pooled.connect_at(victim), pooled.connect()
    dying.ask("get", key="k", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the want arrived")

    def is_noticed() -> bool:
        stats = producer.stats()  # the reader goes first, then its wants
        return stats["readers"] == 1 and stats["transfers"]["waiting"] == 0

    kill(victim)
    until(is_noticed, "the producer noticed", NOTICED)
    receipt = producer.put(Recipe("k").make())
    assert reader.do("get", key="k", timeout=5) == fingerprint(Recipe("k").make())
    receipt.wait(timeout=5)
    until_freed(producer)


@pytest.mark.parametrize("how", ["hold", "open", "get.offered", "get.mapped"])
def test_reader_killed_while_leased(field: Field, start: Start, how: str) -> None:
    """What a dead reader had is there for the next one, who may be waiting already."""
    victim = start({how: "kill"} if "." in how else None)
    producer = field.serve()
    dying, reader = field.connect_at(victim), field.connect()
    receipt = producer.put(Recipe("k").make())
    taken = dying.ask("get" if "." in how else how, key="k", timeout=5)
    if "." in how:
        victim.process.wait(PATIENCE)
        moment = time.monotonic()
    else:
        taken.result(PATIENCE)
        assert receipt.state == "leased"
        waiting = reader.ask("get", key="k", timeout=PATIENCE)
        ended = timed(waiting)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the want arrived")
        moment = kill(victim)
    if "." in how:
        waiting = reader.ask("get", key="k", timeout=PATIENCE)
        ended = timed(waiting)
    assert waiting.result(PATIENCE) == fingerprint(Recipe("k").make())
    assert ended.result(PATIENCE) - moment < NOTICED
    receipt.wait(timeout=5)
    assert producer.stats()["transfers"]["redelivered"] == 1
    until_freed(producer)


def test_reader_killed_and_nobody_else_comes(pooled: Field, start: Start) -> None:
    victim = start()
    producer = pooled.serve()
    dying = pooled.connect_at(victim)
    holding = dying.ask("hold", key="k", timeout=PATIENCE)  # before the time starts to run
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the want arrived")
    receipt = producer.put(Recipe("k").make(), ttl=0.5)
    holding.result(PATIENCE)
    time.sleep(0.5)  # the time to live passes while it is read, which is no fault
    assert receipt.state == "leased"
    kill(victim)
    expect(TransferFailed, lambda: receipt.wait(timeout=5), within=NOTICED, words=("expired",))
    until_freed(producer)


def test_both_killed(pooled: Field, start: Start) -> None:
    """The next producer of the name starts clean."""
    one, two = start(), start()
    producer, reader = pooled.serve_at(one), pooled.connect_at(two)
    producer.do("put", recipe=Recipe("k").to_dict())
    reader.do("hold", key="k", timeout=5)
    kill(one)
    kill(two)
    again, here = pooled.serve(), pooled.connect()
    expect(TransferTimeout, lambda: here.do("get", key="k", timeout=0.1), words=("never",))
    receipt = again.put(Recipe("k", seed=4).make())
    assert here.do("get", key="k", timeout=5) == fingerprint(Recipe("k", seed=4).make())
    receipt.wait(timeout=5)


# Frozen


def test_frozen_producer(pooled: Field, start: Start) -> None:
    """No call outlives its deadline, and all goes on when it thaws."""
    victim = start()
    producer, reader = pooled.serve_at(victim), pooled.connect()
    os.kill(victim.process.pid, signal.SIGSTOP)
    expect(TransferTimeout, lambda: reader.do("get", key="k", timeout=0.3), within=0.3 + SLACK)
    with pytest.raises(TransferTimeout, match="does not answer"):
        KVLink.connect("shm://field", timeout=0.3, **pooled.options)
    waiting = reader.ask("get", key="k", timeout=PATIENCE)
    os.kill(victim.process.pid, signal.SIGCONT)
    producer.do("put", recipe=Recipe("k").to_dict())
    assert waiting.result(PATIENCE) == fingerprint(Recipe("k").make())


def test_frozen_reader(pooled: Field, start: Start) -> None:
    """What a frozen reader holds is not taken from it; others go on."""
    victim = start()
    producer = pooled.serve()
    frozen, reader = pooled.connect_at(victim), pooled.connect()
    holding = frozen.ask("hold", key="k", timeout=PATIENCE)  # before the time starts to run
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the want arrived")
    held = producer.put(Recipe("k").make(), ttl=0.2)
    holding.result(PATIENCE)
    before = victim.do("look", key="k")
    os.kill(victim.process.pid, signal.SIGSTOP)
    for seed in range(20):
        receipt = producer.put(Recipe("next", seed=seed).make())
        assert reader.do("get", key="next", timeout=5) == fingerprint(
            Recipe("next", seed=seed).make()
        )
        receipt.wait(timeout=5)
    assert held.state == "leased"
    os.kill(victim.process.pid, signal.SIGCONT)
    assert victim.do("look", key="k") == before
    victim.do("drop", key="k")
    held.wait(timeout=5)
    until_freed(producer)


def test_flood_at_a_frozen_reader(pooled: Field, start: Start) -> None:
    """A reader that never reads costs a bounded backlog; its wants are answered when it thaws."""
    victim = start()
    producer = pooled.serve()
    frozen = pooled.connect_at(victim)
    asked = {n: frozen.ask("get", key=f"k{n}", timeout=PATIENCE) for n in range(300)}
    until(lambda: producer.stats()["transfers"]["waiting"] == 300, "the wants arrived")
    os.kill(victim.process.pid, signal.SIGSTOP)
    receipts = [producer.put(Recipe(f"k{n}", layers=1).make()) for n in range(300)]
    os.kill(victim.process.pid, signal.SIGCONT)
    for n, get in asked.items():
        assert get.result(PATIENCE) == fingerprint(Recipe(f"k{n}", layers=1).make())
    for receipt in receipts:
        receipt.wait(timeout=5)
    until_freed(producer)


# Closed


def test_close_with_readers_waiting(field: Field, start: Start) -> None:
    victim = start()
    producer, reader = field.serve(), field.connect_at(victim)
    waiting = [reader.ask("get", key=f"k{n}", timeout=PATIENCE) for n in range(10)]
    until(lambda: producer.stats()["transfers"]["waiting"] == 10, "the wants arrived")
    producer.close()
    for get in waiting:
        expect(PeerLostError, lambda get=get: get.result(PATIENCE), within=NOTICED)  # type: ignore[misc]


def test_close_with_a_directory_gone(pooled: Field) -> None:
    producer, reader = pooled.serve(), pooled.connect()
    os.rename(pooled.options["directory"], f"{pooled.options['directory']}-gone")
    producer.close()
    os.rename(f"{pooled.options['directory']}-gone", pooled.options["directory"])
    expect(PeerLostError, lambda: reader.do("get", key="k", timeout=0.1), within=0.1 + SLACK)
