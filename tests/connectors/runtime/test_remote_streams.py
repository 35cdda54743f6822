"""Streams over sockets end with every layer, however the last ones and the commit arrive."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVConsumer, KVLink, KVProducer
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.peer_harness import PATIENCE
from support.connectors.zmq_addresses import fresh_url

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

STREAMS = 30
UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is missing"),
)


@pytest.fixture(params=["tcp", "ipc", UCX])
def ends(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = fresh_url(request.param, sockets)
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as reader:
        yield producer, reader


@pytest.mark.parametrize("how", ["put", "stream_put"])
def test_many_streams(ends: tuple[KVProducer, KVConsumer], how: str) -> None:
    producer, reader = ends
    recipe = Recipe("s", layers=4, tokens=6000, heads=1, dim=32)
    data = recipe.make()
    views = layers_of(data)
    hashes = {layer: hash_tensors(tensors) for (_, layer), tensors in views.items()}
    for _ in range(STREAMS):
        if how == "put":
            receipt = producer.put(data)
            stream = reader.stream_get("s", timeout=PATIENCE)
        else:
            with producer.stream_put(data) as out:
                stream = reader.stream_get("s", timeout=PATIENCE)
                for (_, layer), tensors in views.items():
                    out.write_layer(layer, *tensors)
            assert out.receipt is not None
            receipt = out.receipt
        with stream:
            assert {one.index: hash_tensors(one.tensors) for one in stream} == hashes
            assert fingerprint(stream.wait(timeout=PATIENCE)) == fingerprint(data)
        receipt.wait(timeout=60)


def test_a_cancelled_get_whose_payload_has_arrived(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Nobody has a view of it: another get has it."""
    producer, reader = ends
    data = Recipe("k").make()
    pending = begin_get(reader, "k", timeout=60)
    receipt = producer.put(data)
    pending.future.result(PATIENCE)
    pending.cancel()
    with reader.get("k", timeout=PATIENCE) as found:
        assert fingerprint(found) == fingerprint(data)
    del found
    receipt.wait(timeout=60)
    assert producer.stats()["transfers"]["redelivered"] == 1
