"""A payload whose connections are all cut: what has come does not cross again."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch

from omni_kvlink import (
    KVConsumer,
    KVLink,
    KVProducer,
    PeerLostError,
    TensorTransferData,
    TransferFailed,
)
from omni_kvlink.aio import AsyncKVConsumer
from omni_kvlink.connectors.control import lane as lane_module
from omni_kvlink.connectors.control.kept_bytes import KeptBytes, TransferIdentity
from omni_kvlink.connectors.control.receive_pool import ReceivePool
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits, FetchPlan
from omni_kvlink.lowlevel import begin_get, can_retry
from omni_kvlink.testing.caches import Recipe, hash_tensors, layers_of
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import until
from support.network.cut_relay import CutRelay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVLinkError
    from omni_kvlink.payload.bundle import Payload

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
MIB = 1 << 20
NBYTES = 64 * MIB
LIMITS = FetchLimits(MIB // 4, MIB)
OPTIONS: dict[str, dict[str, Any]] = {
    "keys": {},
    "no keys": {"insecure": True},
    "no keys, lanes": {"insecure": True, "lanes": 2},
}


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "keys" and lane_module.lanes_refusal(1, is_encrypted=True):
        pytest.skip("cryptography is not installed")
    return OPTIONS[request.param]


class Relayed:
    """A producer, and a reader whose connections all pass through a relay."""

    def __init__(
        self, producer: KVProducer, relay: CutRelay, monkeypatch: pytest.MonkeyPatch, options: Any
    ):
        self.producer, self.relay = producer, relay
        relay.carry_lanes(monkeypatch)
        url = f"zmq+tcp://127.0.0.1:{relay.port}"
        self.reader: KVConsumer = KVLink.connect(url, timeout=PATIENCE, **options)

    def resumed(self) -> dict[str, int]:
        return dict(self.reader.stats()["resumed"])


@contextlib.contextmanager
def relayed(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    connecting: dict[str, Any] | None = None,
    **serving: Any,
) -> Iterator[Relayed]:
    monkeypatch.setattr(ControlSession, "fetch_limits", LIMITS)
    with KVLink.serve("zmq+tcp://127.0.0.1:0", **options, **serving) as producer:
        relay = CutRelay(urlsplit(producer.url).port or 0)
        ends = Relayed(producer, relay, monkeypatch, {**options, **(connecting or {})})
        try:
            yield ends
        finally:
            ends.reader.close()
            relay.close()


@pytest.fixture
def ends(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Relayed]:
    with relayed(monkeypatch, options) as ends:
        yield ends


def payload(key: str, nbytes: int = NBYTES, seed: int = 0) -> TensorTransferData:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return TensorTransferData(key, {"values": values})


def check_get(ends: Relayed, sent: Payload, **options: Any) -> None:
    """Receive a payload, and compare every byte."""
    with ends.reader.get(sent.request_id, timeout=PATIENCE, **options) as received:
        assert hash_tensors(received.tensors()) == hash_tensors(sent.tensors())


def check_resumed(ends: Relayed, times: int = 1) -> None:
    """Check that one payload crossed once, but for what was in flight at the cuts."""
    assert not ends.relay.cuts
    resumed = ends.resumed()
    assert resumed["payloads"] == times
    assert resumed["again_nbytes"] <= times * (LIMITS.window + LIMITS.chunk)
    assert NBYTES <= ends.relay.passed <= 1.05 * NBYTES + resumed["again_nbytes"]
    verification = ends.reader.stats()["verification"]
    assert (verification["refetched"], verification["rejected"]) == (0, 0)


@pytest.mark.parametrize("percent", [25, 50, 75])
def test_all_connections_are_cut(ends: Relayed, percent: int) -> None:
    sent = payload("k")
    receipt = ends.producer.put(sent)
    ends.relay.cuts = [NBYTES * percent // 100]
    check_get(ends, sent)
    receipt.wait(timeout=PATIENCE)
    check_resumed(ends)
    assert ends.reader.stats()["verification"]["verified"] == 1
    assert ends.resumed()["kept_nbytes"] >= NBYTES * percent // 100 - LIMITS.window - MIB


def test_three_cuts(ends: Relayed) -> None:
    sent = payload("k")
    ends.producer.put(sent)
    ends.relay.cuts = [NBYTES * percent // 100 for percent in (20, 50, 80)]
    check_get(ends, sent)
    check_resumed(ends, times=3)


def test_without_digests(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with relayed(monkeypatch, options, digests=False) as ends:
        sent = payload("k")
        ends.producer.put(sent)
        ends.relay.cuts = [NBYTES // 2]
        check_get(ends, sent, verify="off")
        check_resumed(ends)


def test_while_it_is_written(ends: Relayed) -> None:
    """The reader waits before the put, which is announced in steps."""
    sent = payload("k")
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(check_get, ends, sent)
        until(lambda: ends.producer.stats()["transfers"]["waiting"] == 1, "the get waits")
        ends.relay.cuts = [NBYTES // 2]
        receipt = ends.producer.put(sent)
        getting.result()
    receipt.wait(timeout=PATIENCE)
    check_resumed(ends)


def test_a_stream_that_is_taken_whole(ends: Relayed) -> None:
    """It is cut amid its layers, resumed amid them, and again after its commit."""
    sent = Recipe("k", layers=8, tokens=NBYTES >> 14, heads=8, dim=64).make()
    tensors = layers_of(sent)
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(check_get, ends, sent)
        until(lambda: ends.producer.stats()["transfers"]["waiting"] == 1, "the get waits")
        ends.relay.cuts = [NBYTES // 4, 3 * NBYTES // 4]
        with ends.producer.stream_put(sent) as stream:
            for layer in range(4):
                stream.write_layer(layer, *tensors["kv", layer])
            until(lambda: len(ends.relay.cuts) == 1, "it was cut")
            until(lambda: ends.resumed()["payloads"] == 1, "it goes on")
            for layer in range(4, 8):
                stream.write_layer(layer, *tensors["kv", layer])
        getting.result()
    check_resumed(ends, times=2)


@pytest.mark.parametrize("digests", [True, False])
def test_another_payload_of_the_key(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, digests: bool
) -> None:
    """Of a payload that was put again with other bytes, every byte is fetched."""
    with relayed(monkeypatch, options, digests=digests) as ends:
        first, second = payload("k"), payload("k", seed=1)
        ends.producer.put(first)

        def replace() -> None:
            ends.producer.abort("k")
            ends.producer.put(second)

        ends.relay.before_cut = replace
        ends.relay.cuts = [NBYTES // 2]
        check_get(ends, second)
        assert ends.resumed() == {"payloads": 0, "kept_nbytes": 0, "again_nbytes": 0}
        assert ends.reader.stats()["verification"]["refetched"] == 0
        assert ends.relay.passed >= 1.5 * NBYTES
        until(lambda: not ends.reader.stats()["memory"]["used"], "its memory is free")


def test_a_producer_that_does_not_return(ends: Relayed) -> None:
    """The get fails, and has no memory any more, although its error is kept."""
    ends.producer.put(payload("k"))

    def refuse() -> None:
        ends.relay.is_open = False

    ends.relay.before_cut = refuse
    ends.relay.cuts = [NBYTES // 2]
    with pytest.raises(PeerLostError) as raised:
        check_get(ends, payload("k"))
    until(lambda: not ends.reader.stats()["memory"]["used"], "its memory is free")
    del raised


def test_a_reader_that_does_not_return(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer keeps the payload until its ttl, and no longer."""
    with relayed(monkeypatch, options) as ends:
        receipt = ends.producer.put(payload("k"), ttl=2.0)

        def refuse() -> None:
            ends.relay.is_open = False

        ends.relay.before_cut = refuse
        ends.relay.cuts = [NBYTES // 2]
        with pytest.raises((PeerLostError, TransferFailed)):  # the second if this took the ttl
            check_get(ends, payload("k"))
        with pytest.raises(TransferFailed, match="time to live"):
            receipt.wait(timeout=PATIENCE)
        until(lambda: not ends.producer.stats()["memory"]["used"], "its memory is free")


def test_a_get_that_ends_before_it_is_repeated(ends: Relayed) -> None:
    """Whoever drops a request that failed drops what has come of it."""
    ends.producer.put(payload("k"))
    ends.relay.cuts = [NBYTES // 2]
    pending = begin_get(ends.reader, "k", timeout=PATIENCE)
    with pytest.raises(PeerLostError):
        pending.wait(timeout=PATIENCE)
    assert ends.reader.stats()["memory"]["used"] >= NBYTES
    del pending
    until(lambda: not ends.reader.stats()["memory"]["used"], "its memory is free")


def test_the_memory_is_needed_for_another(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for a get that may be repeated holds up no other one."""
    with relayed(monkeypatch, options, {"quota": NBYTES + 16 * MIB}) as ends:
        ends.producer.put(payload("k"))
        ends.producer.put(payload("other", seed=1))
        ends.relay.cuts = [NBYTES // 2]
        pending = begin_get(ends.reader, "k", timeout=PATIENCE)
        with pytest.raises(PeerLostError):
            pending.wait(timeout=PATIENCE)
        check_get(ends, payload("other", seed=1))
        assert can_retry(ends.reader, pending, timeout=PATIENCE)
        check_get(ends, payload("k"))
        assert ends.resumed()["payloads"] == 0


def test_several_payloads(ends: Relayed) -> None:
    """Of those that were requested together, each goes on where it was."""
    sent = [payload(f"k{number}", NBYTES // 4, seed=number) for number in range(4)]
    for one in sent:
        ends.producer.put(one)
    ends.relay.cuts = [NBYTES // 2]
    names = [one.request_id for one in sent]
    with ends.reader.get_many(names, timeout=PATIENCE) as received:
        for one, other in zip(sent, received, strict=True):
            assert hash_tensors(one.tensors()) == hash_tensors(other.tensors())
    resumed = ends.resumed()
    assert resumed["payloads"] >= 1
    assert ends.relay.passed <= 1.05 * NBYTES + resumed["again_nbytes"]


def test_in_asyncio(ends: Relayed) -> None:
    sent = payload("k")
    ends.producer.put(sent)

    async def get() -> None:
        link = AsyncKVConsumer(ends.reader)
        with await link.get("k", timeout=PATIENCE) as got:
            assert hash_tensors(got.tensors()) == hash_tensors(sent.tensors())

    ends.relay.cuts = [NBYTES // 2]
    asyncio.run(get())
    check_resumed(ends)


def test_a_direct_put_fails(ends: Relayed) -> None:
    """Its tensors may be its caller's again: nothing of it is kept."""
    sent = payload("k")
    ends.relay.cuts = [NBYTES // 2]
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(ends.producer.put, sent, direct=True, timeout=PATIENCE)
        check_get(ends, sent)
        putting.result()
    assert ends.resumed()["payloads"] == 0
    assert ends.relay.passed >= 1.5 * NBYTES


class _Waiter:
    """Takes blocks of a `ReceivePool`."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []

    def on_allocated(self, block: object) -> None:
        self.blocks.append(block)

    def fail(self, error: KVLinkError) -> None:
        raise error


def test_a_block_that_is_written_to() -> None:
    """What a lane may still write to is not the next connection's yet."""
    loop: Any = SimpleNamespace(call=lambda do: do())
    pool = ReceivePool(4 * MIB, loop, lambda: None)
    first, second = _Waiter(), _Waiter()
    pool.allocate(MIB, first)
    until(lambda: bool(first.blocks), "there is memory")
    [block] = first.blocks
    written = pool.borrow(block, 0, 1000)
    written.view()[:4] = b"late"
    identity = TransferIdentity("run", "k", 1, MIB)
    kept = KeptBytes(identity, FetchPlan(MIB), 0, block, pool.post_free)
    pool.allocate(MIB, second, kept)
    assert not second.blocks
    del written
    assert second.blocks[0] is block
    pool.free(block)
    assert not pool.is_in_use
    pool.close()
