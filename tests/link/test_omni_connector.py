"""The RFC's connector: one end of a link, with `put` and `get`."""

from __future__ import annotations

import pytest
import torch

from omni_kvlink import ClosedError, KVCacheTransferData, SchemaError
from omni_kvlink.connectors import (
    OmniConnector,
    SharedMemoryConnector,
    UCXConnector,
    ZMQConnector,
)

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def cache(request_id: str) -> KVCacheTransferData:
    layers = {name: [torch.randn(8, 2, 64)] * 2 for name in ("key_cache", "value_cache")}
    about = {"kv_lens": [8], "ropes": [8], "num_layers": 2}
    return KVCacheTransferData(request_id, layers, metadata=about)


def same_bytes(received: KVCacheTransferData, sent: KVCacheTransferData) -> bool:
    pairs = zip(received.tensors(), sent.tensors(), strict=True)
    return all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs)


@pytest.mark.parametrize("kind", ["shm", "zmq", "any"])
def test_a_cache_is_put_and_got(kind: str, sockets: str) -> None:
    classes = {"shm": SharedMemoryConnector, "zmq": ZMQConnector, "any": OmniConnector}
    url = f"zmq+ipc://{sockets}/a.sock" if kind == "zmq" else "shm://a"
    options = {} if kind == "zmq" else {"directory": sockets}
    sent = cache("r")
    with (
        classes[kind](url, "producer", **options) as producer,
        classes[kind](producer.link.url, "consumer", timeout=60, **options) as consumer,
    ):
        receipt = producer.put(sent)
        with consumer.get("r", timeout=60) as data:
            assert same_bytes(data, sent)
        receipt.wait(timeout=60)
    with pytest.raises(ClosedError):
        producer.put(sent)


def test_a_connector_says_what_it_is_not(sockets: str) -> None:
    with pytest.raises(SchemaError, match=r"ZMQConnector: .* begins with zmq"):
        ZMQConnector("shm://a", "producer")
    with pytest.raises(SchemaError, match=r"UCXConnector: .* begins with ucx://"):
        UCXConnector("shm://a", "producer")
    with pytest.raises(SchemaError, match="role='both': 'producer' or 'consumer'"):
        SharedMemoryConnector("shm://a", "both")
    with SharedMemoryConnector("shm://a", "producer", directory=sockets) as producer:
        with pytest.raises(SchemaError, match="a consumer has it"):
            producer.get("r", timeout=0)
        consumer = SharedMemoryConnector("shm://a", "consumer", timeout=60, directory=sockets)
        with consumer, pytest.raises(SchemaError, match="receives; the producer has it"):
            consumer.put(cache("r"))
