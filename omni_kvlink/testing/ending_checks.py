"""Checks of transfers that fail, are aborted or expire, and of links that are closed."""

from __future__ import annotations

from typing import Any

from omni_kvlink.errors import (
    BusyError,
    ClosedError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import (
    Rig,
    aborts,
    deliver,
    expect,
    hold,
    request,
    until_disconnected,
    until_freed,
    until_requested,
)


def check_fail_before_get(rig: Rig) -> None:
    """A get after a failure raises at once, with the reason; the key can be put again."""
    producer, reader = rig.serve(), rig.connect()
    producer.fail("f", "out of luck")
    get = reader.submit("get", key="f", timeout=60)
    error = expect(TransferFailed, get.result, PATIENCE, mentions=("'f'",))
    assert (error.key, error.reason) == ("f", "out of luck")
    deliver(producer, reader, Recipe("f").make())


def check_end_wakes_a_waiting_get(rig: Rig) -> None:
    """A waiting get raises as soon as its key fails, or is aborted by either side."""
    producer, reader = rig.serve(), rig.connect()
    for number, end in enumerate((producer.fail, *aborts(producer, reader))):
        get = request(reader, producer, f"k{number}")
        end(f"k{number}", "out of luck")
        mentions = ("aborted",) if number else ()
        error = expect(TransferFailed, get.result, PATIENCE, mentions=mentions)
        assert error.reason == "out of luck"


def check_end_of_a_committed_payload(rig: Rig) -> None:
    """After `fail` or an abort the receipt fails, the memory is free, and later gets raise."""
    producer, reader = rig.serve(), rig.connect()
    for end in (producer.fail, *aborts(producer, reader)):
        receipt = producer.put(Recipe("k").make())
        end("k", "out of luck")
        error = expect(TransferFailed, receipt.wait, timeout=60)
        assert error.reason == "out of luck"
        assert receipt.state == "failed"
        until_freed(producer)
        expect(TransferFailed, reader.call, "get", key="k", timeout=60)


def check_fail_while_read(rig: Rig) -> None:
    """The receipt fails at once, but the memory is kept until its reader releases it."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("f").make())
    digest = hold(reader, "f")
    producer.fail("f", "too late")
    expect(TransferFailed, receipt.wait, timeout=60)
    producer.put(Recipe("g", seed=5).make())
    assert reader.peer.call("hash_held", key="f") == digest
    assert producer.stats()["memory"]["blocks"] == 2
    reader.peer.call("release", key="f")
    reader.call("get", key="g", timeout=60)


def check_ttl(rig: Rig) -> None:
    """Without readers the receipt expires, the memory is free, and later gets raise."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("t").make(), ttl=0.2)
    error = expect(TransferFailed, receipt.wait, timeout=60, mentions=("expired",))
    assert "time to live" in error.reason
    assert receipt.state == "expired"
    until_freed(producer)
    get = reader.submit("get", key="t", timeout=60)
    expect(TransferFailed, get.result, PATIENCE, mentions=("expired",))
    for ttl in (1e7, 1e12, float("inf")):  # also beyond any clock
        deliver(producer, reader, Recipe("t").make(), ttl=ttl)


def check_ttl_while_it_is_read(rig: Rig) -> None:
    """A payload that every declared reader has does not expire.

    One that a reader is missing for does, but the others keep it until they release it.
    """
    producer, reader = rig.serve(), rig.connect()

    def put_for_a_reader_that_waits(**options: Any) -> Any:
        getting = request(reader, producer, "t", command="hold")  # before the time starts to run
        receipt = producer.put(Recipe("t").make(), **options)
        getting.result(PATIENCE)
        return receipt

    receipt = put_for_a_reader_that_waits(readers=1, ttl=0.1)
    expect(TransferTimeout, receipt.wait, timeout=0.4, mentions=("leased",))
    reader.peer.call("release", key="t")
    receipt.wait(timeout=60)
    receipt = put_for_a_reader_that_waits(readers=2, ttl=0.3)
    digest = reader.peer.call("hash_held", key="t")
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("1 readers",))
    assert producer.stats()["memory"]["used"] > 0
    assert reader.peer.call("hash_held", key="t") == digest


def check_producer_closes(rig: Rig) -> None:
    """Waiting gets raise, receipts fail, and tensors that are held keep their bytes."""
    producer, reader = rig.serve(), rig.connect()
    held = producer.put(Recipe("held").make())
    digest = hold(reader, "held")
    unread = producer.put(Recipe("unread").make())
    waiting = request(reader, producer, "w", requests=2)
    producer.close()
    expect(PeerLostError, waiting.result, PATIENCE, mentions=("'w'",))
    for receipt in (held, unread):
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("closed",))
    assert reader.peer.call("hash_held", key="held") == digest
    expect(PeerLostError, reader.call, "get", key="w", timeout=0.2)


def check_reader_closes(rig: Rig) -> None:
    """Its waiting gets raise, and the payload is left to another reader.

    Tensors that outlive their link keep their bytes: the memory is not reused.
    """
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    receipt = producer.put(Recipe("kept").make())
    digest = hold(reader, "kept")
    waiting = request(reader, producer, "w0", requests=2)
    reader.call("close")
    expect(ClosedError, waiting.result, PATIENCE)
    for number in range(3):
        deliver(producer, other, Recipe(f"w{number}", seed=number + 1).make())
    assert reader.peer.call("hash_held", key="kept") == digest, "reused under a reader"
    reader.peer.call("release", key="kept")
    receipt.wait(timeout=60)


def check_use_after_close(rig: Rig) -> None:
    """Every verb raises ClosedError; closing again does nothing."""
    producer, consumer, reader = rig.serve(), rig.connect_here(), rig.connect()
    for link in (producer, consumer):
        link.close()
        link.close()
        expect(ClosedError, link.abort, "c")
        assert link.stats()["closed"]
    expect(ClosedError, producer.put, Recipe("c").make())
    expect(ClosedError, producer.fail, "c", "x")
    expect(ClosedError, consumer.get, "c", timeout=1)
    reader.call("close")
    expect(ClosedError, reader.call, "get", key="c", timeout=1)


def check_producer_restarts(rig: Rig) -> None:
    """A reader connects to a restarted producer, and finds nothing of the previous one."""
    producer, reader = rig.serve(), rig.connect()
    producer.put(Recipe("r", seed=1).make())
    producer.close()
    until_disconnected(reader)
    waiting = reader.submit("get", key="s", timeout=PATIENCE)
    expect(TimeoutError, waiting.result, 0.1)
    producer = rig.serve()
    until_requested(producer, 1)
    expect(TransferTimeout, reader.call, "get", key="r", timeout=0.1, mentions=("not announced",))
    data = Recipe("s", seed=2).make()
    receipt = producer.put(data)
    assert waiting.result(PATIENCE) == fingerprint(data)
    receipt.wait(timeout=60)


def check_deadline_while_reconnecting(rig: Rig) -> None:
    """While the reader reconnects, each get keeps its own deadline, and `close` wakes them all."""
    producer, reader = rig.serve(), rig.connect()
    producer.close()
    until_disconnected(reader)
    patient = reader.submit("get", key="p", timeout=PATIENCE)
    expect(TimeoutError, patient.result, 0.1)
    expect(PeerLostError, reader.call, "get", key="q", timeout=0.2)
    reader.submit("close").result(PATIENCE)
    expect(ClosedError, patient.result, PATIENCE)


def check_deadline_across_a_restart(rig: Rig) -> None:
    """A get that waits while the producer restarts ends at its deadline."""
    producer, reader = rig.serve(), rig.connect()
    producer.close()
    until_disconnected(reader)
    waiting = reader.submit("get", key="x", timeout=0.5)
    expect(TimeoutError, waiting.result, 0.1)
    rig.serve()
    error = waiting.exception(PATIENCE)
    assert isinstance(error, (TransferTimeout, PeerLostError)), error


def check_busy_name(rig: Rig) -> None:
    """A second producer of a URL is refused at once, and the first goes on."""
    producer, reader = rig.serve(), rig.connect()
    expect(BusyError, rig.serve)
    deliver(producer, reader, Recipe("b").make())
