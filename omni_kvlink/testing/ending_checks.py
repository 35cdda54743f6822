"""Checks of transfers that fail, are aborted or expire, and of links that are closed."""

from __future__ import annotations

import time
from functools import partial

from omni_kvlink.errors import (
    BusyError,
    ClosedError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import SLACK, Rig, expect, until, until_disconnected, until_freed


def check_fail_before_get(rig: Rig) -> None:
    """A get after a failure raises at once, with the reason."""
    producer, reader = rig.serve(), rig.connect()
    producer.fail("f", "out of luck")
    error = expect(
        TransferFailed,
        lambda: reader.call("get", key="f", timeout=5),
        within=SLACK,
        mentions=("'f'",),
    )
    assert error.reason == "out of luck"
    assert error.key == "f"


def check_fail_wakes_a_waiting_get(rig: Rig) -> None:
    """A waiting get raises as soon as its key fails."""
    producer, reader = rig.serve(), rig.connect()
    waiting = reader.submit("get", key="f", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the request arrived")
    producer.fail("f", "out of luck")
    error = expect(TransferFailed, lambda: waiting.result(PATIENCE), within=SLACK)
    assert error.reason == "out of luck"


def check_fail_of_a_committed_payload(rig: Rig) -> None:
    """The receipt fails, the memory is free, and later gets raise."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("f").make())
    producer.fail("f", "changed my mind")
    error = expect(TransferFailed, lambda: receipt.wait(timeout=5), within=SLACK)
    assert error.reason == "changed my mind"
    assert receipt.state == "failed"
    until_freed(producer)
    expect(TransferFailed, lambda: reader.call("get", key="f", timeout=5), within=SLACK)


def check_fail_while_read(rig: Rig) -> None:
    """The receipt fails at once, but the memory is kept until its reader releases it."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("f").make())
    reader.call("hold", key="f", timeout=5)
    before = reader.peer.call("hash_held", key="f")
    producer.fail("f", "too late")
    expect(TransferFailed, lambda: receipt.wait(timeout=5), within=SLACK)
    producer.put(Recipe("g", seed=5).make())
    assert reader.peer.call("hash_held", key="f") == before
    assert producer.stats()["memory"]["blocks"] == 2
    reader.peer.call("release", key="f")
    reader.call("get", key="g", timeout=5)
    until_freed(producer)


def check_put_after_fail(rig: Rig) -> None:
    """A failed key can be put again."""
    producer, reader = rig.serve(), rig.connect()
    producer.fail("f", "once")
    data = Recipe("f").make()
    receipt = producer.put(data)
    assert reader.call("get", key="f", timeout=5) == fingerprint(data)
    receipt.wait(timeout=5)


def check_abort_by_the_producer(rig: Rig) -> None:
    """A waiting get raises as soon as its key is aborted."""
    producer, reader = rig.serve(), rig.connect()
    waiting = reader.submit("get", key="a", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the request arrived")
    producer.abort("a", "no longer needed")
    error = expect(
        TransferFailed, lambda: waiting.result(PATIENCE), within=SLACK, mentions=("aborted",)
    )
    assert error.reason == "no longer needed"


def check_abort_by_the_reader(rig: Rig) -> None:
    """The reader's waiting get raises, the receipt fails, the memory is free."""
    producer, reader = rig.serve(), rig.connect()
    waiting = reader.submit("get", key="a", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the request arrived")
    reader.call("abort", key="a", reason="the user left")
    error = expect(
        TransferFailed, lambda: waiting.result(PATIENCE), within=SLACK, mentions=("aborted",)
    )
    assert error.reason == "the user left"
    receipt = producer.put(Recipe("b").make())
    reader.call("abort", key="b", reason="that too")
    error = expect(TransferFailed, lambda: receipt.wait(timeout=5), within=SLACK)
    assert error.reason == "that too"
    until_freed(producer)


def check_ttl(rig: Rig) -> None:
    """Without readers the receipt expires, the memory is free, and later gets raise."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("t").make(), ttl=0.2)
    error = expect(
        TransferFailed, lambda: receipt.wait(timeout=5), within=0.2 + SLACK, mentions=("expired",)
    )
    assert "time to live" in error.reason
    assert receipt.state == "expired"
    until_freed(producer)
    expect(
        TransferFailed,
        lambda: reader.call("get", key="t", timeout=5),
        within=SLACK,
        mentions=("expired",),
    )
    again = producer.put(Recipe("t").make())
    reader.call("get", key="t", timeout=5)
    again.wait(timeout=5)


def check_ttl_with_one_reader_missing(rig: Rig) -> None:
    """A reader keeps an expired payload until it releases it."""
    producer, reader = rig.serve(), rig.connect()
    getting = reader.submit("hold", key="t", timeout=PATIENCE)  # before the time starts to run
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the request arrived")
    receipt = producer.put(Recipe("t").make(), readers=2, ttl=0.3)
    getting.result(PATIENCE)
    before = reader.peer.call("hash_held", key="t")
    expect(
        TransferFailed, lambda: receipt.wait(timeout=5), within=0.3 + SLACK, mentions=("1 readers",)
    )
    assert producer.stats()["memory"]["used"] > 0
    assert reader.peer.call("hash_held", key="t") == before
    reader.peer.call("release", key="t")
    until_freed(producer)


def check_ttl_spares_a_slow_reader(rig: Rig) -> None:
    """A payload that every declared reader has does not expire."""
    producer, reader = rig.serve(), rig.connect()
    getting = reader.submit("hold", key="t", timeout=PATIENCE)  # before the time starts to run
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the request arrived")
    receipt = producer.put(Recipe("t").make(), ttl=0.1)
    getting.result(PATIENCE)
    expect(
        TransferTimeout, lambda: receipt.wait(timeout=0.4), within=0.4 + SLACK, mentions=("leased",)
    )
    reader.peer.call("release", key="t")
    receipt.wait(timeout=5)


def check_endless_ttl(rig: Rig) -> None:
    """A time to live beyond any clock is accepted, infinity too."""
    producer, reader = rig.serve(), rig.connect()
    for number, ttl in enumerate((1e7, 1e12, float("inf"))):
        receipt = producer.put(Recipe(f"t{number}").make(), ttl=ttl)
        reader.call("get", key=f"t{number}", timeout=5)
        receipt.wait(timeout=5)


def check_producer_closes(rig: Rig) -> None:
    """Waiting gets raise, receipts fail, and tensors that are held keep their bytes."""
    producer, reader = rig.serve(), rig.connect()
    held = producer.put(Recipe("held").make())
    reader.call("hold", key="held", timeout=5)
    before = reader.peer.call("hash_held", key="held")
    unread = producer.put(Recipe("unread").make())
    waiting = reader.submit("get", key="w", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the request arrived")
    producer.close()
    expect(PeerLostError, lambda: waiting.result(PATIENCE), within=SLACK, mentions=("'w'",))
    for receipt in (held, unread):
        waiting_for_end = partial(receipt.wait, timeout=5)
        expect(TransferFailed, waiting_for_end, within=SLACK, mentions=("closed",))
    assert reader.peer.call("hash_held", key="held") == before
    reader.peer.call("release", key="held")
    expect(PeerLostError, lambda: reader.call("get", key="w", timeout=0.2), within=0.2 + SLACK)


def check_reader_closes(rig: Rig) -> None:
    """Its waiting gets raise, and the payload is left to another reader."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    waiting = reader.submit("get", key="w", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the request arrived")
    reader.call("close")
    expect(ClosedError, lambda: waiting.result(PATIENCE), within=SLACK)
    receipt = producer.put(Recipe("w").make())
    assert other.call("get", key="w", timeout=5) == fingerprint(Recipe("w").make())
    receipt.wait(timeout=5)


def check_reader_closes_while_reading(rig: Rig) -> None:
    """Tensors that outlive their link keep their bytes: the memory is not reused."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    receipt = producer.put(Recipe("kept").make())
    reader.call("hold", key="kept", timeout=5)
    before = reader.peer.call("hash_held", key="kept")
    reader.call("close")
    for number in range(3):
        producer.put(Recipe(f"next-{number}", seed=number + 1).make())
        other.call("get", key=f"next-{number}", timeout=5)
    assert reader.peer.call("hash_held", key="kept") == before, "reused under a reader"
    reader.peer.call("release", key="kept")
    receipt.wait(timeout=5)
    until_freed(producer)


def check_use_after_close(rig: Rig) -> None:
    """Every verb raises ClosedError; closing again does nothing."""
    producer, here, reader = rig.serve(), rig.connect_here(), rig.connect()
    data = Recipe("c").make()
    for link in (producer, here):
        link.close()
        link.close()
        expect(ClosedError, lambda link=link: link.abort("c"))  # type: ignore[misc]
        assert link.stats()["closed"]
    expect(ClosedError, lambda: producer.put(data))
    expect(ClosedError, lambda: producer.fail("c", "x"))
    expect(ClosedError, lambda: here.get("c", timeout=1), within=SLACK)
    reader.call("close")
    expect(ClosedError, lambda: reader.call("get", key="c", timeout=1), within=SLACK)


def check_producer_restarts(rig: Rig) -> None:
    """A reader connects to a restarted producer, and finds nothing of the previous one."""
    producer, reader = rig.serve(), rig.connect()
    producer.put(Recipe("r", seed=1).make())
    producer.close()
    until_disconnected(reader)
    waiting = reader.submit("get", key="s", timeout=PATIENCE)
    expect(TimeoutError, lambda: waiting.result(0.1))
    producer = rig.serve()
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the reader reconnected")
    expect(TransferTimeout, lambda: reader.call("get", key="r", timeout=0.1), mentions=("never",))
    receipt = producer.put(Recipe("s", seed=2).make())
    assert waiting.result(PATIENCE) == fingerprint(Recipe("s", seed=2).make())
    receipt.wait(timeout=5)


def check_deadline_while_reconnecting(rig: Rig) -> None:
    """While the reader reconnects, each get keeps its own deadline, and `close` wakes them all."""
    producer, reader = rig.serve(), rig.connect()
    producer.close()
    until_disconnected(reader)
    patient = reader.submit("get", key="p", timeout=PATIENCE)
    expect(TimeoutError, lambda: patient.result(0.1))
    expect(PeerLostError, lambda: reader.call("get", key="q", timeout=0.2), within=0.2 + SLACK)
    closing = reader.submit("close")
    closing.result(SLACK)
    expect(ClosedError, lambda: patient.result(PATIENCE), within=SLACK)


def check_deadline_across_a_restart(rig: Rig) -> None:
    """The time that a reconnection takes counts toward the deadline of a get."""
    producer, reader = rig.serve(), rig.connect()
    producer.close()
    until_disconnected(reader)
    called = time.monotonic()
    waiting = reader.submit("get", key="x", timeout=1.5)
    expect(TimeoutError, lambda: waiting.result(0.6))
    rig.serve()
    expect(TransferTimeout, lambda: waiting.result(PATIENCE))
    assert time.monotonic() - called < 1.5 + SLACK, "the deadline began anew"


def check_busy_name(rig: Rig) -> None:
    """A second producer of a URL is refused at once, and the first goes on."""
    producer, reader = rig.serve(), rig.connect()
    expect(BusyError, rig.serve, within=2.0)
    receipt = producer.put(Recipe("b").make())
    reader.call("get", key="b", timeout=5)
    receipt.wait(timeout=5)
