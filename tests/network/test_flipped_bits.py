"""One bit that flips on an unencrypted network never reaches the reader's tensors."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import IntegrityError, KVConsumer, KVLink, KVLinkError, KVProducer, TransferFailed
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import expect
from support.connectors.zmq_addresses import free_port
from support.network.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

MIB = 1 << 20
RECIPE = Recipe("k", layers=4, tokens=1024, heads=4, dim=256, dtype="uint8")
"""Eight tensors of 1 MiB; with its header, two chunks of the transport and a little more."""
FIRST, AGAIN = 3 * MIB, 8 * MIB + MIB // 2
"""A byte of the payload, and one of the MiB that is fetched again behind it."""
Ends = tuple[KVProducer, KVConsumer, Proxy]


@pytest.fixture
def ends() -> Iterator[Ends]:
    port = free_port()
    with KVLink.serve(f"zmq+tcp://127.0.0.1:{port}", insecure=True) as producer:
        proxy = Proxy(port)
        url = f"zmq+tcp://127.0.0.1:{proxy.port}"
        with KVLink.connect(url, timeout=PATIENCE, insecure=True) as reader:
            yield producer, reader, proxy
        proxy.close()


def test_one_flip(ends: Ends) -> None:
    """A default `get` fetches the MiB again."""
    producer, reader, proxy = ends
    producer.put(RECIPE.make())
    proxy.flip_at(FIRST)
    with reader.get("k", timeout=PATIENCE) as found:
        assert fingerprint(found) == fingerprint(RECIPE.make())
    assert proxy.counts["bit"] == 1
    assert reader.stats()["verification"]["refetched"] == 1


def test_two_flips_of_one_mib(ends: Ends) -> None:
    producer, reader, proxy = ends
    receipt = producer.put(RECIPE.make())
    proxy.flip_at(FIRST, AGAIN)
    expect(IntegrityError, reader.get, "k", timeout=PATIENCE, mentions=("layer",))
    assert proxy.counts["bit"] == 2
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected",))


def test_one_flip_in_a_stream(ends: Ends) -> None:
    producer, reader, proxy = ends
    views = layers_of(RECIPE.make())
    with producer.stream_put(RECIPE.make()) as out:
        stream = reader.stream_get("k", timeout=PATIENCE)
        proxy.flip_at(FIRST)
        for (_, layer), tensors in views.items():
            out.write_layer(layer, *tensors)
    found = {layer.index: hash_tensors(layer.tensors) for layer in stream}
    assert found == {layer: hash_tensors(tensors) for (_, layer), tensors in views.items()}
    assert proxy.counts["bit"] == 1
    stream.release()


@pytest.mark.parametrize("seed", range(12))
def test_a_flip_anywhere(ends: Ends, seed: int) -> None:
    """The payload, or an error: also where the bit is one of a message, or of a frame's length."""
    producer, reader, proxy = ends
    producer.put(RECIPE.make())
    chance, is_message = random.Random(seed), bool(seed % 2)
    proxy.flip_at(chance.randrange(100) if is_message else chance.randrange(8 * MIB))
    try:
        # A message that was lost is never answered.
        with reader.get("k", timeout=2.0 if is_message else PATIENCE) as found:
            assert fingerprint(found) == fingerprint(RECIPE.make())
    except KVLinkError:
        assert is_message, "bytes of the payload are fetched again"
