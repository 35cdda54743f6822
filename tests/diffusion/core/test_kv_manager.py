"""The KV manager: what comes is held until it is freed, once; what does not come is an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from engine_fixtures import WAIT, bundle, link, request

from omni_kvlink import (
    CapacityError,
    ClosedError,
    IntegrityError,
    KVCacheBundle,
    KVLink,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.engine import DiffusionKVManager, EngineError, KVConfig, KVState


class Bed:
    """A producer here, a manager, and a count of what it told."""

    def __init__(self, producer: KVLink, consumer: KVLink, manager: DiffusionKVManager):
        self.producer, self.consumer, self.manager = producer, consumer, manager
        self._told = threading.Condition()
        manager.listen(self._on_told)

    def _on_told(self) -> None:
        with self._told:
            self._told.notify_all()

    def until(self, name: str, *states: KVState) -> KVState:
        with self._told:
            assert self._told.wait_for(lambda: self.manager.state(name) in states, WAIT)
        return self.manager.state(name)

    def begin(self, name: str, **fields: object) -> None:
        self.manager.allocate(request(name, **fields))
        self.manager.prefetch(request(name, **fields))


@pytest.fixture(params=["shm", "zmq"])
def bed(request: pytest.FixtureRequest, sockets: str) -> Iterator[Bed]:
    with (
        link(sockets, request.param) as producer,
        KVLink.connect(producer.url, timeout=5, directory=sockets) as consumer,
    ):
        manager = DiffusionKVManager(consumer, KVConfig(budget=1 << 20, timeout=WAIT))
        yield Bed(producer, consumer, manager)
        manager.close()


def test_kv_manager_data_handling(bed: Bed) -> None:
    sent = bundle("r")
    receipt = bed.producer.put(sent)
    manager, wanted = bed.manager, request("r")
    with pytest.raises(EngineError, match="absent"):
        manager.get_kv_cache("r")

    manager.receive_from_connector(bed.consumer, wanted, timeout=WAIT)
    held = manager.get_kv_cache("r")
    assert isinstance(held, KVCacheBundle)
    assert held.difference(sent) == ""
    assert manager.get_kv_cache("r") is held
    assert manager.stats()["charged"] == receipt.ledger.nbytes
    assert not receipt.done

    manager.free(wanted)
    receipt.wait(timeout=WAIT)
    assert manager.state("r") is KVState.ABSENT
    assert manager.stats()["charged"] == 0
    with pytest.raises(ClosedError):
        held["gen"].layer_blocks  # noqa: B018 - its memory is gone
    with pytest.raises(EngineError, match="absent"):
        manager.get_kv_cache("r")


def test_a_lease_is_given_back_once(bed: Bed) -> None:
    receipt = bed.producer.put(bundle("r"), readers=2)
    bed.manager.receive_from_connector(bed.consumer, request("r"))
    for _ in range(3):
        bed.manager.free(request("r"))
    with pytest.raises(TransferTimeout, match="1 readers missing"):
        receipt.wait(timeout=0.2)
    assert bed.manager.stats()["freed"] == 1
    with bed.consumer.get("r", timeout=WAIT):
        pass
    receipt.wait(timeout=WAIT)


def test_a_prefetch_returns_at_once_and_ends_in_a_call(bed: Bed) -> None:
    bed.begin("r")
    assert bed.manager.state("r") is KVState.RECEIVING
    with pytest.raises(EngineError, match="receiving"):
        bed.manager.get_kv_cache("r")
    bed.producer.put(bundle("r"))
    assert bed.until("r", KVState.READY, KVState.FAILED) is KVState.READY
    bed.manager.free(request("r"))


def test_kv_that_does_not_come_is_a_timeout_at_its_deadline(bed: Bed) -> None:
    started = time.monotonic()
    bed.begin("r", kv_timeout=0.3)
    assert bed.until("r", KVState.FAILED) is KVState.FAILED
    assert 0.3 <= time.monotonic() - started < 0.55
    with pytest.raises(TransferTimeout) as caught:
        bed.manager.get_kv_cache("r")
    assert (caught.value.key, caught.value.waited) == ("r", 0.3)
    bed.manager.free(request("r"))


def test_kv_that_comes_too_late_is_nobodys(bed: Bed) -> None:
    bed.begin("r", kv_timeout=0.1)
    bed.until("r", KVState.FAILED)
    with pytest.raises(TransferFailed, match="time to live"):
        bed.producer.put(bundle("r"), ttl=0.2).wait(timeout=WAIT)
    assert bed.manager.state("r") is KVState.FAILED
    bed.manager.free(request("r"))


def test_a_producer_that_fails_is_heard_at_once(bed: Bed) -> None:
    bed.begin("r")
    bed.producer.fail("r", "out of memory")
    bed.until("r", KVState.FAILED)
    with pytest.raises(TransferFailed, match="out of memory"):
        bed.manager.get_kv_cache("r")
    bed.manager.free(request("r"))


def test_a_producer_that_is_gone_is_heard_at_once(sockets: str) -> None:
    with (
        link(sockets) as producer,
        KVLink.connect(producer.url, timeout=5, directory=sockets) as consumer,
    ):
        manager = DiffusionKVManager(consumer, KVConfig(timeout=WAIT))
        bed = Bed(producer, consumer, manager)
        bed.begin("r")
        producer.close()
        bed.until("r", KVState.FAILED)
        with pytest.raises(PeerLostError):
            manager.get_kv_cache("r")
        manager.close()


def test_a_changed_byte_is_an_error(sockets: str) -> None:
    with (
        link(sockets) as producer,
        KVLink.connect(producer.url, timeout=5, directory=sockets) as consumer,
    ):
        manager = DiffusionKVManager(consumer, KVConfig(timeout=WAIT))
        capacity = producer.allocate(bundle("r"))
        for target, source in zip(capacity.data.tensors(), bundle("r").tensors(), strict=True):
            target.copy_(source)
        spoiled = capacity.data["gen"].layer_blocks["value_cache"][1]
        receipt = producer.put(capacity.data)
        spoiled.view(-1)[3] += 1  # behind the digests' back
        with pytest.raises(IntegrityError, match="layer 1, V"):
            manager.receive_from_connector(consumer, request("r"))
        with pytest.raises(TransferFailed):
            receipt.wait(timeout=WAIT)
        assert manager.stats()["charged"] == 0
        manager.close()
        del target, source, spoiled, capacity


def test_the_budget_is_kept(sockets: str) -> None:
    with (
        link(sockets) as producer,
        KVLink.connect(producer.url, timeout=5, directory=sockets) as consumer,
    ):
        nbytes = producer.put(bundle("a")).ledger.nbytes
        producer.put(bundle("b"))
        manager = DiffusionKVManager(consumer, KVConfig(budget=nbytes + 100, timeout=WAIT))
        first, second = request("a", kv_nbytes=nbytes), request("b", kv_nbytes=nbytes)
        manager.receive_from_connector(consumer, first)
        assert not manager.can_allocate(second)
        with pytest.raises(CapacityError) as caught:
            manager.allocate(second)
        assert (caught.value.asked, caught.value.free) == (nbytes, 100)
        manager.free(first)
        assert manager.can_allocate(second)
        manager.receive_from_connector(consumer, second)
        manager.free(second)
        manager.close()


def test_kv_larger_than_it_was_said_to_be_is_given_back(bed: Bed) -> None:
    manager = DiffusionKVManager(bed.consumer, KVConfig(budget=1000, timeout=WAIT))
    receipt = bed.producer.put(bundle("r"))
    with pytest.raises(CapacityError, match=r"raise kv\.budget"):
        manager.receive_from_connector(bed.consumer, request("r", kv_nbytes=10))
    receipt.wait(timeout=WAIT)
    assert manager.stats()["charged"] == 0
    manager.close()


@pytest.mark.parametrize("sent", [True, False], ids=["ready", "receiving"])
def test_freeing_early_gives_everything_back(bed: Bed, sent: bool) -> None:
    if sent:
        receipt = bed.producer.put(bundle("r"))
    bed.begin("r")
    if sent:
        bed.until("r", KVState.READY)
    bed.manager.free(request("r"))
    if sent:
        receipt.wait(timeout=WAIT)
    assert bed.manager.stats()["charged"] == 0
    assert bed.consumer.stats()["waiting"] == 0


def test_closing_gives_everything_back(bed: Bed) -> None:
    receipts = [bed.producer.put(bundle(name)) for name in "abc"]
    for name in "abc":
        bed.begin(name)
        bed.until(name, KVState.READY)
    bed.begin("never")
    bed.manager.close()
    for receipt in receipts:
        receipt.wait(timeout=WAIT)
    with pytest.raises(ClosedError):
        bed.manager.allocate(request("d"))


def test_one_request_has_one_room(bed: Bed) -> None:
    bed.manager.allocate(request("r"))
    with pytest.raises(EngineError, match="holds KV already"):
        bed.manager.allocate(request("r"))
    with pytest.raises(EngineError, match="allocate it first"):
        bed.manager.prefetch(request("other"))
    bed.manager.prefetch(request("r"))
    with pytest.raises(EngineError, match="receiving already"):
        bed.manager.prefetch(request("r"))
    bed.manager.free(request("r"))
