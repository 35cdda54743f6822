"""Bytes that are damaged on their way are fetched once more, or the get raises; none is used."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from omni_kvlink import IntegrityError, KVConsumer, KVLink, KVProducer, TransferFailed, WireError
from omni_kvlink.connectors.control.listener import ControlListener
from omni_kvlink.connectors.protocol.messages import Message, Offer
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.link import put_operation as sending
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import expect, until, until_freed, until_requested
from support.connectors.zmq_addresses import fresh_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.connectors.protocol.transfer import Transfer

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

MIB = 1 << 20
BIG = Recipe("k", layers=4, tokens=1300, heads=4, dim=256, dtype="uint8")
"""Eight tensors of 1.3 MiB: chunks of digests and those of the transport overlap everywhere."""
SMALL = Recipe("k", layers=4, tokens=3)
"""It travels with its offer."""
POSITIONS = {"header": 300, "first byte": 0, "last byte": 0, "middle": 5 * MIB + 77}
"""Where a byte is damaged; the first and the last one are of the tensors."""

UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is missing"),
)


class Line:
    """Damages one byte of what producers of this process send, the next `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.at, self.times = 0, 0
        self.may_end = threading.Event()  # the last damage waits for it
        self.may_end.set()
        # Between a message and the socket: bytes that change there are those that a cable damages.
        send, frames, line = PooledProducer.piece, ControlListener._frames, self

        def piece(self: PooledProducer, transfer: Transfer, start: int, stop: int) -> Region:
            region = send(self, transfer, start, stop)
            damaged = line.damaged(region.view(), start)
            return Region(damaged.ctypes.data, damaged.nbytes, damaged)

        def with_inline(self: ControlListener, peer: Any, message: Message) -> list[Any]:
            found = frames(self, peer, message)
            if isinstance(message, Offer) and message.inline:
                found[1] = line.damaged(message.inline, 0).data
            return found

        monkeypatch.setattr(PooledProducer, "piece", piece)
        # As above.
        monkeypatch.setattr(ControlListener, "_frames", with_inline)

    def damaged(self, data: memoryview, start: int) -> np.ndarray[Any, Any]:
        """A copy of the bytes from `start` on, one of them damaged if it is among them."""
        found = np.array(data, np.uint8)
        if self.times > 0 and start <= self.at < start + len(found):
            if self.times == 1:
                assert self.may_end.wait(PATIENCE)
            self.times -= 1
            found[self.at - start] ^= 1 << self.times
        return found

    def damage(self, recipe: Recipe, position: str, times: int) -> None:
        plan = recipe.make().plan(digests=True)
        data = plan.header_nbytes
        found = {"first byte": data, "last byte": plan.nbytes - 1, "draft": plan.nbytes + 300}
        self.at, self.times = found.get(position) or POSITIONS[position], times


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(monkeypatch)


@pytest.fixture(params=["tcp", "tcp-beside", "ipc", UCX])
def ends(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    transport, _, beside = request.param.partition("-")
    url = fresh_url(transport, sockets)
    # A small payload of the link's own memory travels beside its offer, too.
    options: dict[str, Any] = {"inline": 0} if beside else {}
    with KVLink.serve(url, **options) as producer, KVLink.connect(url, timeout=60) as reader:
        yield producer, reader


Ends = tuple[KVProducer, KVConsumer]


def counts(reader: KVConsumer) -> dict[str, int]:
    found: dict[str, int] = reader.stats()["verification"]
    return {name: count for name, count in found.items() if count}


CASES = [
    (recipe, position)
    for recipe in (SMALL, BIG)
    for position in POSITIONS
    if recipe is BIG or position != "middle"
]
EACH = pytest.mark.parametrize(
    ("recipe", "position"), CASES, ids=[f"{'big' if r is BIG else 'small'}-{p}" for r, p in CASES]
)


@EACH
def test_a_damaged_byte_is_fetched_again(
    ends: Ends, line: Line, recipe: Recipe, position: str
) -> None:
    producer, reader = ends
    line.damage(recipe, position, times=1)
    receipt = producer.put(recipe.make())
    with reader.get("k", timeout=PATIENCE) as found:
        assert fingerprint(found) == fingerprint(recipe.make())
    assert line.times == 0
    assert counts(reader) == {"verified": 1, "refetched": 1}
    del found
    receipt.wait(timeout=60)


@EACH
def test_a_byte_that_is_damaged_twice(
    ends: Ends, line: Line, recipe: Recipe, position: str
) -> None:
    """The get raises, the producer's receipt says why, and no memory is kept."""
    producer, reader = ends
    line.damage(recipe, position, times=2)
    receipt = producer.put(recipe.make())
    kind = WireError if position == "header" else IntegrityError
    with pytest.raises(kind) as raised:
        reader.get("k", timeout=PATIENCE)
    if position != "header":
        assert type(raised.value) is IntegrityError
        assert "layer" in str(raised.value)
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected",))
    assert counts(reader) == {"refetched": 1, "rejected": 1}
    until_freed(producer)
    until(lambda: reader.stats()["memory"]["used"] == 0, "the reader's memory is free")


def test_nothing_is_checked_on_request(ends: Ends, line: Line) -> None:
    """With `verify="off"` a damaged byte is handed out, and counted."""
    producer, reader = ends
    line.damage(BIG, "middle", times=1)
    producer.put(BIG.make())
    received = reader.get("k", timeout=PATIENCE, verify="off")
    assert fingerprint(received.data) != fingerprint(BIG.make())
    assert counts(reader) == {"unverified": 1}
    expect(IntegrityError, received.verify, mentions=("layer",))
    received.release()


def test_a_payload_without_digests_is_counted(ends: Ends) -> None:
    """Its producer chose that no byte can be checked."""
    producer, reader = ends
    producer.put(BIG.make(), digests=False)
    reader.get("k", timeout=PATIENCE).release()
    assert counts(reader) == {"unverified": 1}


@pytest.mark.parametrize("position", ["draft", "header", "first byte", "last byte"])
def test_a_put_that_is_taken_while_it_is_written(
    ends: Ends, line: Line, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draft and its layers arrive before its header."""
    producer, reader = ends
    monkeypatch.setattr(sending, "FIRST_STEP_NBYTES", MIB)
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(reader.get, "k", timeout=PATIENCE)
        until_requested(producer, 1)
        line.damage(BIG, position, times=1)
        producer.put(BIG.make())
        with getting.result(PATIENCE) as found:
            assert fingerprint(found) == fingerprint(BIG.make())
        del found, getting
        until_freed(producer)
        getting = pool.submit(reader.get, "k", timeout=PATIENCE)
        until_requested(producer, 1)
        line.damage(BIG, position, times=2)

        def put_and_wait() -> None:
            producer.put(BIG.make()).wait(timeout=60)

        expect(TransferFailed, put_and_wait, mentions=("rejected",))
        kind = WireError if position in ("draft", "header") else IntegrityError
        assert isinstance(getting.exception(PATIENCE), kind)
    assert counts(reader) == {"verified": 1, "refetched": 2, "rejected": 1}
    until_freed(producer)


@pytest.mark.parametrize("position", ["draft", "middle"])
@pytest.mark.parametrize("how", ["put", "stream"])
def test_a_damaged_layer_of_a_stream(ends: Ends, line: Line, how: str, position: str) -> None:
    """It comes only when it is right."""
    producer, reader = ends
    views = layers_of(BIG.make())
    line.damage(BIG, "header" if how == "put" and position == "draft" else position, times=1)
    if how == "put":
        producer.put(BIG.make())
        stream = reader.stream_get("k", timeout=PATIENCE)
    else:
        out = producer.stream_put(BIG.make())
        stream = reader.stream_get("k", timeout=PATIENCE)
        for (_, layer), tensors in views.items():
            out.write_layer(layer, *tensors)
        out.commit()
    for found in stream:
        assert hash_tensors(found.tensors) == hash_tensors(views["kv", found.index])
    stream.wait(timeout=PATIENCE).close()
    assert line.times == 0
    assert counts(reader) == {"verified": 1, "refetched": 1}
    del found
    stream.release()
    until_freed(producer)


@pytest.mark.parametrize("how", ["put", "stream"])
def test_a_layer_that_is_damaged_twice(ends: Ends, line: Line, how: str) -> None:
    """The stream fails; the layers that were handed out stay as they are."""
    producer, reader = ends
    views = layers_of(BIG.make())
    line.damage(BIG, "last byte", times=2)
    line.may_end.clear()  # else a busy machine has refused it before its first layer is asked for
    out = producer.stream_put(BIG.make())
    if how == "put":
        for (_, layer), tensors in views.items():
            out.write_layer(layer, *tensors)
        out.commit()
    stream = reader.stream_get("k", timeout=PATIENCE)
    if how == "stream":
        for layer in range(3):
            out.write_layer(layer, *views["kv", layer])
    kept = dense(stream.wait_for_layer(0).key)
    line.may_end.set()
    if how == "stream":  # not committed: that would race with the reader's rejection
        out.write_layer(3, *views["kv", 3])
    expect(IntegrityError, stream.wait_for_layer, 3, timeout=PATIENCE, mentions=("layer 3", "V"))
    expect(IntegrityError, stream.wait, timeout=PATIENCE)
    stream.release()
    producer.put(Recipe("other", layers=4, tokens=1300, heads=4, dim=256, dtype="uint8").make())
    reader.get("other", timeout=PATIENCE).release()
    assert hash_tensors([kept]) == hash_tensors([views["kv", 0][0]]), "reused under a view"
    del kept
    wait = lambda: out.commit().wait(timeout=60)  # noqa: E731
    expect(TransferFailed, wait, mentions=("rejected", "layer 3"))
    until_freed(producer)


def test_a_rejected_stream_is_not_reported_as_read(ends: Ends, line: Line) -> None:
    """Also if its reader never waits for the layer that was damaged, and keeps the others."""
    producer, reader = ends
    views = layers_of(BIG.make())
    line.damage(BIG, "last byte", times=2)
    out = producer.stream_put(BIG.make())
    stream = reader.stream_get("k", timeout=PATIENCE)

    def write_and_wait() -> None:
        for (_, layer), tensors in views.items():
            out.write_layer(layer, *tensors)
        out.commit().wait(timeout=60)

    expect(TransferFailed, write_and_wait, mentions=("rejected", "layer 3"))
    assert counts(reader)["rejected"] == 1
    stream.release()


def test_a_direct_put_is_not_fetched_again(ends: Ends, line: Line) -> None:
    """Its tensors may be the caller's again: the get raises, and the put or its receipt."""
    producer, reader = ends
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(reader.get, "k", timeout=PATIENCE)
        until_requested(producer, 1)
        line.damage(BIG, "middle", times=1)

        def put_and_wait() -> None:
            producer.put(BIG.make(), direct=True, timeout=PATIENCE).wait(timeout=60)

        expect(TransferFailed, put_and_wait, mentions=("rejected",))
        assert isinstance(getting.exception(PATIENCE), IntegrityError)
    assert counts(reader) == {"rejected": 1}
    until_freed(producer)
