"""Real processes, killed and frozen: each survivor gets a payload or a typed error."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial

import pytest

from omni_kvlink import KVLink, PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE, PeerExited
from omni_kvlink.testing.rig import expect, until, until_freed
from support.faults.frozen import freeze
from support.faults.harness import Field, Start, expect_reason, kill

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# The producer dies


@pytest.mark.parametrize("point", ["put.reserved", "put.copied", "put.encoded", "publish.before"])
def test_producer_killed_before_commit(pooled: Field, start: Start, point: str) -> None:
    target = start({point: "kill"})
    producer, reader = pooled.serve_at(target), pooled.connect()
    waiting = reader.submit("get", key="k", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    dying = producer.submit("put", recipe=Recipe("k").to_dict())
    target.process.wait(PATIENCE)
    expect(PeerLostError, lambda: waiting.result(PATIENCE), mentions=("'k'",))
    expect(PeerExited, lambda: dying.result(PATIENCE))
    # No producer answers at that name: the timeout is kept.
    expect(PeerLostError, lambda: reader.call("get", key="k", timeout=0.2))


def test_producer_killed_after_commit(field: Field, start: Start) -> None:
    """The payload that was offered arrives whole, or the get raises PeerLostError."""
    target = start({"publish.after": "kill"})
    producer, reader = field.serve_at(target), field.connect()
    waiting = reader.submit("get", key="k", timeout=PATIENCE, verify="full")
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    producer.submit("put", recipe=Recipe("k").to_dict())
    target.process.wait(PATIENCE)
    with contextlib.suppress(PeerLostError):
        assert waiting.result(PATIENCE) == fingerprint(Recipe("k").make())


def test_producer_killed_between_commit_and_fetch(pooled: Field, start: Start) -> None:
    target = start()
    producer, reader = pooled.serve_at(target), pooled.connect()
    producer.call("put", recipe=Recipe("k").to_dict())
    waiting = reader.submit("get", key="other", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    kill(target)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    expect(PeerLostError, lambda: reader.call("get", key="k", timeout=0.2))


def test_producer_killed_while_offering(pooled: Field, start: Start) -> None:
    """A get issued while the producer is killed never hangs and never returns wrong bytes."""
    target = start()
    producer, reader = pooled.serve_at(target), pooled.connect()
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        producer.call("put", recipe=Recipe(key).to_dict())
    early = [reader.submit("get", key=key, timeout=60, verify="full") for key in keys[:20]]
    kill(target)
    late = [reader.submit("get", key=key, timeout=0.2) for key in keys[20:]]
    for key, get in zip(keys, [*early, *late], strict=True):
        with contextlib.suppress(PeerLostError, TransferTimeout if get in late else PeerLostError):
            assert get.result(PATIENCE) == fingerprint(Recipe(key).make())


def test_producer_killed_while_leased(field: Field, start: Start) -> None:
    """A lease stays readable after its producer's death, and can be released."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    producer.call("put", recipe=Recipe("k").to_dict())
    reader.call("hold", key="k", timeout=60)
    before = field.here.call("hash_held", key="k")
    waiting = reader.submit("get", key="other", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    kill(target)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    assert field.here.call("hash_held", key="k") == before
    field.here.call("release", key="k")


def test_producer_returns_under_its_name(pooled: Field, start: Start) -> None:
    """After a restart, a waiting reader gets the next payload as soon as it is put."""
    target, successor = start(), start()
    producer, reader = pooled.serve_at(target), pooled.connect()
    producer.call("put", recipe=Recipe("old").to_dict())
    reader.call("get", key="old", timeout=60)
    producer.call("put", recipe=Recipe("lost").to_dict())
    kill(target)
    until(lambda: not reader.call("stats")["connected"], "the reader noticed")
    waiting = reader.submit("get", key="new", timeout=PATIENCE)
    again = pooled.serve_at(successor)
    again.call("put", recipe=Recipe("new", seed=9).to_dict())
    assert waiting.result(PATIENCE) == fingerprint(Recipe("new", seed=9).make())
    expect(
        TransferTimeout,
        lambda: reader.call("get", key="lost", timeout=0.1),
        mentions=("not announced",),
    )
    assert reader.call("stats")["sessions"] == 2


# A reader dies


def test_reader_killed_while_waiting(pooled: Field, start: Start) -> None:
    target = start()
    producer = pooled.serve()
    dying, reader = pooled.connect_at(target), pooled.connect()
    dying.submit("get", key="k", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")

    def is_noticed() -> bool:
        stats = producer.stats()  # the connection is counted first, then its gets
        return bool(stats["readers"] == 1 and stats["transfers"]["waiting"] == 0)

    kill(target)
    until(is_noticed, "the producer noticed")
    receipt = producer.put(Recipe("k").make())
    assert reader.call("get", key="k", timeout=60) == fingerprint(Recipe("k").make())
    receipt.wait(timeout=60)
    until_freed(producer)


@pytest.mark.parametrize("how", ["hold", "open", "get.offered", "get.mapped"])
def test_reader_killed_while_leased(field: Field, start: Start, how: str) -> None:
    """A killed reader's payload is delivered to the next reader, which may be waiting already."""
    target = start({how: "kill"} if "." in how else None)
    producer = field.serve()
    dying, reader = field.connect_at(target), field.connect()
    receipt = producer.put(Recipe("k").make())
    taken = dying.submit("get" if "." in how else how, key="k", timeout=60)
    if "." in how:
        target.process.wait(PATIENCE)
    else:
        taken.result(PATIENCE)
        assert receipt.state == "leased"
        waiting = reader.submit("get", key="k", timeout=PATIENCE)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        kill(target)
    if "." in how:
        waiting = reader.submit("get", key="k", timeout=PATIENCE)
    assert waiting.result(PATIENCE) == fingerprint(Recipe("k").make())
    receipt.wait(timeout=60)
    assert producer.stats()["transfers"]["redelivered"] == 1
    until_freed(producer)


def test_reader_killed_without_another_one(pooled: Field, start: Start) -> None:
    target = start()
    producer = pooled.serve()
    dying = pooled.connect_at(target)
    hold = dying.submit("hold", key="k", timeout=PATIENCE)  # before the time starts to run
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
    receipt = producer.put(Recipe("k").make(), ttl=0.1)
    hold.result(PATIENCE)
    time.sleep(0.1)  # the time to live passes while it is read, which is no fault
    assert (receipt.state, receipt.lost_readers) == ("leased", 0)
    kill(target)
    lost = "1 readers missing (1 came and left it unread)"
    expect(TransferFailed, lambda: receipt.wait(timeout=60), mentions=("expired", lost))
    assert receipt.lost_readers == 1
    until_freed(producer)


def test_both_killed(pooled: Field, start: Start) -> None:
    """The next producer of the name has no state of the killed one."""
    one, two = start(), start()
    producer, reader = pooled.serve_at(one), pooled.connect_at(two)
    producer.call("put", recipe=Recipe("k").to_dict())
    reader.call("hold", key="k", timeout=60)
    kill(one)
    kill(two)
    again, here = pooled.serve(), pooled.connect()
    expect(
        TransferTimeout, lambda: here.call("get", key="k", timeout=0.1), mentions=("not announced",)
    )
    receipt = again.put(Recipe("k", seed=4).make())
    assert here.call("get", key="k", timeout=60) == fingerprint(Recipe("k", seed=4).make())
    receipt.wait(timeout=60)


# Frozen


def test_frozen_producer(pooled: Field, start: Start) -> None:
    """No call exceeds its timeout, and the link works again when the producer continues."""
    target = start()
    producer, reader = pooled.serve_at(target), pooled.connect()
    freeze(target.process.pid)
    expect(TransferTimeout, lambda: reader.call("get", key="k", timeout=0.3))
    expect_reason(
        TransferTimeout,
        "does not answer",
        lambda timeout: KVLink.connect("shm://field", timeout=timeout, **pooled.options),
    )
    waiting = reader.submit("get", key="k", timeout=PATIENCE)
    os.kill(target.process.pid, signal.SIGCONT)
    producer.call("put", recipe=Recipe("k").to_dict())
    assert waiting.result(PATIENCE) == fingerprint(Recipe("k").make())


def test_frozen_reader(pooled: Field, start: Start) -> None:
    """A frozen reader's leases are not reused; other readers are not affected."""
    target = start()
    producer = pooled.serve()
    frozen, reader = pooled.connect_at(target), pooled.connect()
    hold = frozen.submit("hold", key="k", timeout=PATIENCE)  # before the time starts to run
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
    leased = producer.put(Recipe("k").make(), ttl=0.2)
    hold.result(PATIENCE)
    before = target.call("hash_held", key="k")
    freeze(target.process.pid)
    for seed in range(20):
        receipt = producer.put(Recipe("next", seed=seed).make())
        assert reader.call("get", key="next", timeout=60) == fingerprint(
            Recipe("next", seed=seed).make()
        )
        receipt.wait(timeout=60)
    assert leased.state == "leased"
    os.kill(target.process.pid, signal.SIGCONT)
    assert target.call("hash_held", key="k") == before
    target.call("release", key="k")
    leased.wait(timeout=60)
    until_freed(producer)


def test_flood_at_a_frozen_reader(pooled: Field, start: Start) -> None:
    """The backlog of a frozen reader is bounded; its gets are answered when it continues."""
    target = start()
    producer = pooled.serve()
    frozen = pooled.connect_at(target)
    gets = {n: frozen.submit("get", key=f"k{n}", timeout=PATIENCE) for n in range(300)}
    until(lambda: producer.stats()["transfers"]["waiting"] == 300, "the gets arrived")
    freeze(target.process.pid)
    receipts = [producer.put(Recipe(f"k{n}", layers=1).make()) for n in range(300)]
    os.kill(target.process.pid, signal.SIGCONT)
    for n, get in gets.items():
        assert get.result(PATIENCE) == fingerprint(Recipe(f"k{n}", layers=1).make())
    for receipt in receipts:
        receipt.wait(timeout=60)
    until_freed(producer)


# Closed


def test_close_with_readers_waiting(field: Field, start: Start) -> None:
    target = start()
    producer, reader = field.serve(), field.connect_at(target)
    waiting = [reader.submit("get", key=f"k{n}", timeout=PATIENCE) for n in range(10)]
    until(lambda: producer.stats()["transfers"]["waiting"] == 10, "the gets arrived")
    producer.close()
    for get in waiting:
        expect(PeerLostError, partial(get.result, PATIENCE))


def test_close_with_a_removed_directory(pooled: Field) -> None:
    producer, reader = pooled.serve(), pooled.connect()
    os.rename(pooled.options["directory"], f"{pooled.options['directory']}-gone")
    producer.close()
    os.rename(f"{pooled.options['directory']}-gone", pooled.options["directory"])
    expect(PeerLostError, lambda: reader.call("get", key="k", timeout=0.1))
