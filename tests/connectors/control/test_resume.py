"""A payload whose connections are all cut: what has come does not cross again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch

from omni_kvlink import (
    KVConsumer,
    KVLink,
    KVProducer,
    TensorTransferData,
)
from omni_kvlink.connectors.control import lane as lane_module
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
from omni_kvlink.testing.caches import hash_tensors
from omni_kvlink.testing.peer_harness import PATIENCE
from support.network.cut_relay import CutRelay

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], **serving: Any
) -> Iterator[Relayed]:
    monkeypatch.setattr(ControlSession, "fetch_limits", LIMITS)
    with KVLink.serve("zmq+tcp://127.0.0.1:0", **options, **serving) as producer:
        relay = CutRelay(urlsplit(producer.url).port or 0)
        ends = Relayed(producer, relay, monkeypatch, options)
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


def check_get(ends: Relayed, sent: TensorTransferData, **options: Any) -> None:
    """Receive a payload, and compare every byte."""
    with ends.reader.get(sent.request_id, timeout=PATIENCE, **options) as received:
        assert hash_tensors(received.tensors()) == hash_tensors(sent.tensors())


@pytest.mark.parametrize("percent", [25, 50, 75])
def test_all_connections_are_cut(ends: Relayed, percent: int) -> None:
    sent = payload("k")
    receipt = ends.producer.put(sent)
    ends.relay.cuts = [NBYTES * percent // 100]
    check_get(ends, sent)
    receipt.wait(timeout=PATIENCE)
    assert not ends.relay.cuts
    resumed = ends.resumed()
    print(ends.relay.passed / NBYTES, resumed, ends.reader.stats())
    assert resumed["payloads"] == 1
    assert resumed["again_nbytes"] <= LIMITS.window + MIB // 2
    assert NBYTES <= ends.relay.passed <= 1.05 * NBYTES + resumed["again_nbytes"]
    assert ends.reader.stats()["verification"] == {
        "verified": 1,
        "unverified": 0,
        "refetched": 0,
        "rejected": 0,
    }
