"""The KV manager holds each KV until it is freed, and reports each that does not come."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import (
    CapacityError,
    ClosedError,
    IntegrityError,
    KVCacheBundle,
    KVConsumer,
    KVLink,
    KVProducer,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.engine import DiffusionKVManager
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_state import KVState
from support.engine.fixtures import WAIT, allocate_copy, bundle, link, request

if TYPE_CHECKING:
    from collections.abc import Iterator


class ManagerFixture:
    """A producer and a KV manager in this process."""

    def __init__(self, producer: KVProducer, consumer: KVConsumer, manager: DiffusionKVManager):
        self.producer, self.consumer, self.manager = producer, consumer, manager
        self._changed = threading.Condition()
        manager.listen(self._on_changed)

    def _on_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def until(self, name: str, *states: KVState) -> KVState:
        with self._changed:
            assert self._changed.wait_for(lambda: self.manager.state(name) in states, WAIT)
        return self.manager.state(name)

    def begin(self, name: str, **fields: Any) -> None:
        self.manager.allocate(request(name, **fields))
        self.manager.prefetch(request(name, **fields))


@pytest.fixture(params=["shm", "zmq"])
def fixture(request: pytest.FixtureRequest, sockets: str) -> Iterator[ManagerFixture]:
    with (
        link(sockets, request.param) as producer,
        KVLink.connect(producer.url, timeout=WAIT, directory=sockets) as consumer,
    ):
        manager = DiffusionKVManager(consumer, KVConfig(budget=1 << 20, timeout=WAIT))
        yield ManagerFixture(producer, consumer, manager)
        manager.close()


def test_kv_manager_data_handling(fixture: ManagerFixture) -> None:
    sent = bundle("r")
    receipt = fixture.producer.put(sent)
    manager, expected = fixture.manager, request("r")
    with pytest.raises(EngineError, match="absent: it was freed"):
        manager.get_kv_cache("r")

    manager.receive_from_connector(fixture.consumer, expected, timeout=WAIT)
    held = manager.get_kv_cache("r")
    assert isinstance(held, KVCacheBundle)
    assert held.difference(sent) == ""
    assert manager.get_kv_cache("r") is held
    assert manager.stats()["charged"] == receipt.ledger.nbytes
    assert not receipt.done

    manager.free(expected)
    receipt.wait(timeout=WAIT)
    assert manager.state("r") is KVState.ABSENT
    assert manager.stats()["charged"] == 0
    with pytest.raises(ClosedError):
        held["gen"].layer_blocks  # noqa: B018 - its memory is gone
    with pytest.raises(EngineError, match="absent"):
        manager.get_kv_cache("r")


def test_a_lease_is_released_once(fixture: ManagerFixture) -> None:
    receipt = fixture.producer.put(bundle("r"), readers=2)
    fixture.manager.receive_from_connector(fixture.consumer, request("r"))
    for _ in range(3):
        fixture.manager.free(request("r"))
    with pytest.raises(TransferTimeout, match="1 readers missing"):
        receipt.wait(timeout=0.2)
    assert fixture.manager.stats()["freed"] == 1
    with fixture.consumer.get("r", timeout=WAIT):
        pass
    receipt.wait(timeout=WAIT)


def test_a_prefetch_returns_at_once_and_ends_in_a_call(fixture: ManagerFixture) -> None:
    fixture.begin("r")
    assert fixture.manager.state("r") is KVState.RECEIVING
    with pytest.raises(EngineError, match="receiving"):
        fixture.manager.get_kv_cache("r")
    fixture.producer.put(bundle("r"))
    assert fixture.until("r", KVState.READY, KVState.FAILED) is KVState.READY
    fixture.manager.free(request("r"))


def test_kv_that_does_not_come_is_a_timeout_at_its_deadline(fixture: ManagerFixture) -> None:
    started = time.monotonic()
    fixture.begin("r", kv_timeout=0.3)
    assert fixture.until("r", KVState.FAILED) is KVState.FAILED
    assert time.monotonic() - started >= 0.3
    with pytest.raises(TransferTimeout) as caught:
        fixture.manager.get_kv_cache("r")
    assert (caught.value.key, caught.value.waited) == ("r", 0.3)
    fixture.manager.free(request("r"))


def test_a_receive_without_a_deadline_that_is_freed_is_aborted(
    fixture: ManagerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[tuple[str, str]] = []
    monkeypatch.setattr(fixture.manager.connector, "abort", lambda *call: aborted.append(call))
    fixture.begin("r", kv_timeout=math.inf)
    fixture.manager.free(request("r"))
    assert aborted == [("r", "the request has ended")]


def test_kv_of_another_sender_is_an_error_at_once(fixture: ManagerFixture) -> None:
    """A request names who sent its KV; a stage that does not receive from there does not wait."""
    sources = (fixture.producer.url,)
    manager = DiffusionKVManager(fixture.consumer, KVConfig(sources=sources, timeout=WAIT))
    one = request("r", kv_sender_info=sources)
    other = request("s", kv_sender_info=("shm://elsewhere",))
    for each in (one, other):
        manager.allocate(each)
    manager.prefetch(one)
    assert manager.state("r") is KVState.RECEIVING
    with pytest.raises(EngineError, match="'s' was sent at shm://elsewhere"):
        manager.prefetch(other)
    manager.close()


def test_kv_that_comes_too_late_is_not_received(fixture: ManagerFixture) -> None:
    fixture.begin("r", kv_timeout=0.1)
    fixture.until("r", KVState.FAILED)
    with pytest.raises(TransferFailed, match=r"time to live|its deadline passed"):
        fixture.producer.put(bundle("r"), ttl=0.2).wait(timeout=WAIT)
    assert fixture.manager.state("r") is KVState.FAILED
    fixture.manager.free(request("r"))


def test_a_producer_failure_is_reported_at_once(fixture: ManagerFixture) -> None:
    fixture.begin("r")
    fixture.producer.fail("r", "out of memory")
    fixture.until("r", KVState.FAILED)
    with pytest.raises(TransferFailed, match="out of memory"):
        fixture.manager.get_kv_cache("r")
    fixture.manager.free(request("r"))


def test_a_lost_producer_is_reported_at_once(sockets: str) -> None:
    with (
        link(sockets) as producer,
        KVLink.connect(producer.url, timeout=WAIT, directory=sockets) as consumer,
    ):
        manager = DiffusionKVManager(consumer, KVConfig(timeout=WAIT))
        fixture = ManagerFixture(producer, consumer, manager)
        fixture.begin("r")
        producer.close()
        fixture.until("r", KVState.FAILED)
        with pytest.raises(PeerLostError):
            manager.get_kv_cache("r")
        manager.close()


def test_a_changed_byte_is_an_error(sockets: str) -> None:
    with (
        link(sockets) as producer,
        KVLink.connect(producer.url, timeout=WAIT, directory=sockets) as consumer,
    ):
        manager = DiffusionKVManager(consumer, KVConfig(timeout=WAIT))
        data, changed = allocate_copy(producer, "r", "value_cache", layer=1)
        receipt = producer.put(data)
        changed.view(-1)[3] += 1  # after its digest was taken
        with pytest.raises(IntegrityError, match="layer 1, V"):
            manager.receive_from_connector(consumer, request("r"))
        with pytest.raises(TransferFailed):
            receipt.wait(timeout=WAIT)
        assert manager.stats()["charged"] == 0
        manager.close()
        del data, changed


def test_the_budget_is_kept(sockets: str) -> None:
    with (
        link(sockets) as producer,
        KVLink.connect(producer.url, timeout=WAIT, directory=sockets) as consumer,
    ):
        nbytes = producer.put(bundle("a")).ledger.nbytes
        producer.put(bundle("b"))
        manager = DiffusionKVManager(consumer, KVConfig(budget=nbytes + 100, timeout=WAIT))
        first, second = request("a", kv_nbytes=nbytes), request("b", kv_nbytes=nbytes)
        manager.receive_from_connector(consumer, first)
        assert not manager.can_allocate(second)
        with pytest.raises(CapacityError) as caught:
            manager.allocate(second)
        assert (caught.value.requested, caught.value.free) == (nbytes, 100)
        manager.free(first)
        assert manager.can_allocate(second)
        manager.receive_from_connector(consumer, second)
        manager.free(second)
        manager.close()


def test_kv_larger_than_announced_is_released(fixture: ManagerFixture) -> None:
    manager = DiffusionKVManager(fixture.consumer, KVConfig(budget=1000, timeout=WAIT))
    receipt = fixture.producer.put(bundle("r"))
    with pytest.raises(CapacityError, match=r"raise kv\.budget"):
        manager.receive_from_connector(fixture.consumer, request("r", kv_nbytes=10))
    with pytest.raises(TransferFailed, match="its request failed"):
        receipt.wait(timeout=WAIT)
    assert manager.stats()["charged"] == 0
    manager.close()


@pytest.mark.parametrize("sent", [True, False], ids=["ready", "receiving"])
def test_freeing_early_releases_everything(fixture: ManagerFixture, sent: bool) -> None:
    if sent:
        receipt = fixture.producer.put(bundle("r"))
    fixture.begin("r")
    if sent:
        fixture.until("r", KVState.READY)
    fixture.manager.free(request("r"))
    if sent:
        receipt.wait(timeout=WAIT)
    assert fixture.manager.stats()["charged"] == 0
    assert fixture.consumer.stats()["waiting"] == 0


def test_closing_releases_everything(fixture: ManagerFixture) -> None:
    receipts = [fixture.producer.put(bundle(name)) for name in "abc"]
    for name in "abc":
        fixture.begin(name)
        fixture.until(name, KVState.READY)
    fixture.begin("never")
    fixture.manager.close()
    for receipt in receipts:
        receipt.wait(timeout=WAIT)
    with pytest.raises(ClosedError):
        fixture.manager.allocate(request("d"))


def test_a_request_has_one_reservation(fixture: ManagerFixture) -> None:
    fixture.manager.allocate(request("r"))
    with pytest.raises(EngineError, match="holds KV already"):
        fixture.manager.allocate(request("r"))
    with pytest.raises(EngineError, match="allocate it first"):
        fixture.manager.prefetch(request("other"))
    fixture.manager.prefetch(request("r"))
    with pytest.raises(EngineError, match="receiving already"):
        fixture.manager.prefetch(request("r"))
    fixture.manager.free(request("r"))
