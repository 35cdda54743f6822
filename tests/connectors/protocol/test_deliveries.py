"""What a consumer reports of each get: read, unread or rejected, once, and when."""

from __future__ import annotations

import contextlib
import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch

from omni_kvlink.connectors.protocol.delivery import Delivery
from omni_kvlink.connectors.protocol.get_table import GetRequest, GetState, GetTable
from omni_kvlink.connectors.protocol.messages import (
    SLOT,
    Cancel,
    Get,
    Location,
    Message,
    Offer,
    Release,
)
from omni_kvlink.copier import TorchCopier
from omni_kvlink.errors import CapacityError, IntegrityError, SchemaError, WireError
from omni_kvlink.lowlevel import begin_get, open_stream
from omni_kvlink.memory.region import Region
from omni_kvlink.payload import header as headers
from omni_kvlink.payload.layout_cache import LayoutCache
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.system.waits import Answer, LazyEvent
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import expect, until, until_freed
from support.link.ends import end_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.connectors.protocol.messages import Outcome

# Reaches into _decode, _waiting: an interrupt, or a peer's write, comes at one line within the
# call.

T = TypeVar("T")
OFFER = Offer(1, 7, Location(0, 0, 100))
UNREAD = Release(1, 7, "unread")
Outcomes = list[tuple[str, str]]


@pytest.fixture
def outcomes() -> Outcomes:
    return []


class NotedLease:
    """Notes how it ends."""

    def __init__(self, outcomes: Outcomes):
        self._outcomes = outcomes

    def path_name(self, *, is_copy: bool) -> str:
        return "shm+inline" if is_copy else "shm"

    def release(self, outcome: Outcome, reason: str) -> None:
        self._outcomes.append((outcome, reason))

    def reject(self, reason: str) -> None:
        self._outcomes.append(("reported", reason))

    def coalesce(self, act: Callable[[], T]) -> T:
        return act()


def deliver(outcomes: Outcomes) -> Delivery:
    memory = np.zeros(100, np.uint8)
    region = Region(memory.ctypes.data, 100, memory)
    return Delivery("k", region, NotedLease(outcomes))


def view_of(delivery: Delivery) -> memoryview:
    assert delivery.region is not None
    return delivery.region.view()


def test_a_payload_that_nobody_looked_at(outcomes: Outcomes) -> None:
    delivery = deliver(outcomes)
    del delivery
    assert outcomes == [("unread", "")]


def test_a_payload_that_was_released_unseen(outcomes: Outcomes) -> None:
    """Who released it has had it: no other reader is offered it."""
    delivery = deliver(outcomes)
    delivery.release()
    assert outcomes == [("read", "")]


def test_a_payload_that_was_read(outcomes: Outcomes) -> None:
    delivery = deliver(outcomes)
    view = view_of(delivery)
    delivery.release()
    assert delivery.region is None
    assert outcomes == []
    del view
    assert outcomes == [("read", "")]


@pytest.mark.parametrize("then", ["nothing", "release", "unread"])
def test_a_rejected_payload_stays_with_its_views(outcomes: Outcomes, then: str) -> None:
    """Its memory would be reused under them; its producer is told at once, and once."""
    delivery = deliver(outcomes)
    view = view_of(delivery)
    delivery.reject("bad")
    {"nothing": lambda: None, "release": delivery.release, "unread": delivery.release_unread}[
        then
    ]()
    delivery.reject("again")
    assert outcomes == [("reported", "bad")]
    del view
    assert outcomes == [("reported", "bad"), ("rejected", "again")]
    del delivery
    assert len(outcomes) == 2


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (IntegrityError("bad"), ("rejected", "bad")),
        (WireError(), ("rejected", "WireError()")),
        (SchemaError("bad"), ("rejected", "bad")),
        (CapacityError("no memory"), ("unread", "")),
        (TimeoutError("of a signal handler"), ("unread", "")),
        (KeyboardInterrupt(), ("unread", "")),
    ],
    ids=repr,
)
def test_a_payload_whose_opening_raised(
    outcomes: Outcomes, error: BaseException, outcome: tuple[str, str]
) -> None:
    """Only its own bytes fail it for all readers; the error keeps it from none."""
    delivery = deliver(outcomes)
    view = view_of(delivery)
    delivery.end_after(error)
    assert outcomes == [outcome]
    del view
    delivery.end_after(error)
    assert outcomes == [outcome]


def test_a_rejection_at_once(outcomes: Outcomes) -> None:
    delivery = deliver(outcomes)
    view = view_of(delivery)
    delivery.reject("bad", at_once=True)
    assert outcomes == [("rejected", "bad")]
    del view, delivery
    assert len(outcomes) == 1


def test_a_payload_for_another_reader(outcomes: Outcomes) -> None:
    delivery = deliver(outcomes)
    view = view_of(delivery)
    delivery.release_unread()
    assert outcomes == []
    del view
    assert outcomes == [("unread", "")]


class Table(GetTable[GetState]):
    """A table that keeps what it sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        sends = self.sent.append, self.sent.append, self.sent.extend
        super().__init__(partial(GetState, None), *sends)


def test_an_offer_that_comes_after_its_get_was_cancelled() -> None:
    table = Table()
    [get_state] = table.request([GetRequest("k")])
    assert table.cancel(get_state)
    table.on_message(OFFER)
    assert table.sent == [Get(1, "k"), Cancel(1), UNREAD]


def test_an_offer_that_comes_after_the_timeout() -> None:
    table = Table()
    [get_state] = table.request([GetRequest("k")])
    expect(type(get_state.timeout_error()), table.wait, get_state, 0.0)
    table.on_message(OFFER)
    assert table.sent == [Get(1, "k"), Cancel(1), UNREAD]


@pytest.mark.parametrize("offered", [False, True])
def test_an_interrupted_wait(offered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offer that came meanwhile is released."""
    table = Table()
    [get_state] = table.request([GetRequest("k")])

    def interrupt(answer: Answer[Offer], timeout: float) -> Any:
        monkeypatch.undo()
        if offered:
            table.on_message(OFFER)
        raise KeyboardInterrupt

    monkeypatch.setattr(Answer, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        table.wait(get_state, 60.0)
    assert table.sent == [Get(1, "k"), UNREAD if offered else Cancel(1)]


def test_an_offer_at_the_very_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken."""
    table = Table()
    [get_state] = table.request([GetRequest("k")])

    def time_out(answer: Answer[Offer], timeout: float) -> bool:
        monkeypatch.undo()
        table.on_message(OFFER)
        return False

    monkeypatch.setattr(Answer, "wait", time_out)
    assert table.wait(get_state, 60.0) == OFFER
    assert table.sent == [Get(1, "k")]


def test_a_draft_is_copied_before_it_is_decoded(ends: tuple[KVProducer, KVConsumer]) -> None:
    """What its producer writes to the memory later changes nothing."""
    producer, reader = ends
    recipe = Recipe("k", layers=2)
    out = producer.stream_put(recipe.make())
    pending: Any = begin_get(reader, "k", timeout=60, streamed=True)
    delivery = pending.wait(timeout=60)
    offer: Offer = pending.answer.result()
    pool = end_of(producer).pool
    memory = pool.mapping(offer.location.arena).region
    at = memory.address + offer.location.offset + SLOT + offer.location.nbytes
    ctypes.memset(at, ord("x"), offer.draft)
    with open_stream(reader, delivery, started=0.0, timeout=60) as stream:
        assert len(stream) == 2
    del pending, delivery
    out.fail("enough")
    until_freed(producer)


@pytest.mark.parametrize("known", [False, True])
def test_another_payload_than_was_requested(outcomes: Outcomes, known: bool) -> None:
    other = TensorTransferData("other", {"a": torch.zeros(3)})
    payload = TorchCopier().pack(other.tensors(), other.plan())
    region = Region.copy_of(memoryview(payload))
    delivery = Delivery("k", region, NotedLease(outcomes))
    layouts = LayoutCache()
    if known:
        layouts.decode(payload)
    with pytest.raises(WireError, match="requested 'k', the payload says it is 'other'"):
        delivery.open_header(region, layouts)


def test_a_header_is_copied_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its producer, which can write to the memory, overwrites it after the first look."""
    plan = Recipe("k").make().plan()
    peer_memory = bytearray(plan.encode())
    decode, looks = headers._decode, list[int]()

    def overwrite_first(text: bytes, decoder: Any) -> Any:
        looks.append(len(text))
        peer_memory[:] = b"x" * len(peer_memory)
        return decode(text, decoder)

    monkeypatch.setattr(headers, "_decode", overwrite_first)
    assert Manifest.decode(memoryview(peer_memory), plan.nbytes) == plan
    assert looks


class Interrupted(list[Any]):
    """A list whose method `name` is interrupted, once, when it has done its work."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != "_name" and name == self._name:

            def interrupted(*arguments: Any) -> None:
                self._name = ""
                found(*arguments)
                raise KeyboardInterrupt

            return interrupted
        return found


@pytest.mark.parametrize("name", ["pop", "remove"])
def test_an_interrupted_set_loses_nobody_who_waits(name: str) -> None:
    event = LazyEvent()
    event._waiting = Interrupted(name)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(event.wait, PATIENCE) for _ in range(2)]
        until(lambda: len(event._waiting or ()) == 2, "they wait")
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                event.set()
        for one in both:
            assert one.result(PATIENCE)


def test_a_late_set_ends_no_wait_that_began_after_it() -> None:
    """It set the event, which was cleared since, and only now wakes those who wait."""
    event = LazyEvent()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(event.wait, PATIENCE)
        until(lambda: bool(event._waiting), "it waits")
        event._waiting.pop().release()  # type: ignore[union-attr] # as the late `set` does
        until(lambda: waiting.done() or bool(event._waiting), "it was woken")
        event.set()
        assert waiting.result(PATIENCE)
    assert not event._waiting
