"""`put_many` and `get_many` between real processes that are killed: all, or a typed error."""

from __future__ import annotations

import pytest

from omni_kvlink import PeerLostError
from omni_kvlink.testing.batch_checks import KEYS, RECIPES, make_all
from omni_kvlink.testing.caches import fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE, PeerExited
from omni_kvlink.testing.rig import expect, until, until_freed, until_requested, wait_all
from support.faults.every_connector import field as field
from support.faults.harness import Field, Start, kill

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

EXPECTED = list(map(fingerprint, make_all()))


@pytest.mark.parametrize("point", ["get.offered", "get.mapped"])
def test_a_reader_is_killed_in_a_get_many(field: Field, start: Start, point: str) -> None:
    """Another one receives all of them."""
    target = start({point: "kill"})
    producer, dying, reader = field.serve(), field.connect_at(target), field.connect()
    taken = dying.submit("get_many", keys=[*KEYS, "missing"], timeout=PATIENCE)
    until_requested(producer, len(KEYS) + 1)
    receipts = producer.put_many(make_all())
    target.process.wait(PATIENCE)
    expect(PeerExited, taken.result, PATIENCE)
    assert reader.call("get_many", keys=KEYS, timeout=60) == EXPECTED
    wait_all(receipts)
    until_freed(producer)


def test_a_reader_is_killed_while_it_waits_for_the_last(field: Field, start: Start) -> None:
    """What it had received goes to another one."""
    target = start()
    producer, dying, reader = field.serve(), field.connect_at(target), field.connect()
    taken = dying.submit("get_many", keys=[*KEYS, "missing"], timeout=PATIENCE)
    receipts = producer.put_many(make_all())
    until(lambda: producer.stats()["transfers"]["leased"] == len(KEYS), "it has the others")
    kill(target)
    expect(PeerExited, taken.result, PATIENCE)
    assert reader.call("get_many", keys=KEYS, timeout=60) == EXPECTED
    wait_all(receipts)
    until_freed(producer)


@pytest.mark.parametrize("point", ["put.reserved", "put.copied"])
def test_a_producer_is_killed_in_a_put_many(field: Field, start: Start, point: str) -> None:
    """Its readers have none of the payloads, and know that."""
    target = start({point: "kill"})
    producer, reader = field.serve_at(target), field.connect()
    waiting = reader.submit("get_many", keys=KEYS, timeout=PATIENCE)
    dying = producer.submit("put_many", recipes=[recipe.to_dict() for recipe in RECIPES])
    target.process.wait(PATIENCE)
    expect(PeerExited, dying.result, PATIENCE)
    expect(PeerLostError, waiting.result, PATIENCE)
