"""A reader whose connection broke but whose process lives keeps the memory that it reads."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

from omni_kvlink import KVCacheTransferData, KVLink, KVProducer, PeerLostError, TransferFailed
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.shm.transport import ShmConsumer, ShmListener, ShmSession
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.testing.rig import until, until_freed


def cache(key: str, value: int) -> KVCacheTransferData:
    layers = [torch.full((64, 2, 16), value, dtype=torch.uint8) for _ in range(2)]
    return KVCacheTransferData(
        key,
        {"key_cache": layers, "value_cache": layers},
        metadata={"kv_lens": [64], "ropes": [64], "num_layers": 2},
    )


def first_tensor(data: object) -> torch.Tensor:
    assert isinstance(data, KVCacheTransferData)
    tensor = data.layer_blocks["key_cache"][0]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def wait(event: threading.Event) -> None:
    event.wait(60)


def disconnect_reader(producer: KVProducer) -> None:
    """Break the connection of the only reader."""
    end = producer._end
    assert isinstance(end, PooledProducer)
    (listener,) = end.listeners
    assert isinstance(listener, ShmListener)
    (peer,) = listener._peers
    end.loop.call(lambda: listener._disconnect(peer))


@pytest.mark.parametrize("side", ["reader", "producer"])
def test_a_broken_connection_does_not_free_what_is_being_read(socket_dir: str, side: str) -> None:
    url = f"shm://living?directory={socket_dir}"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as reader:
        pending = begin_get(reader, "a", timeout=60)  # before the time starts to run
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        first = producer.put(cache("a", 1), ttl=0.3)
        delivery = pending.wait(timeout=60)
        with open_delivery(reader, delivery, started=time.perf_counter(), verify="auto") as data:
            seen = first_tensor(data)
        assert isinstance(reader._end, ShmConsumer)
        session = reader._end._session
        assert isinstance(session, ShmSession)
        if side == "reader":
            session._loop.call(session._channel.close)  # not while its thread reads
        else:
            disconnect_reader(producer)
            with pytest.raises(PeerLostError):
                session.get_table.request("b").future.result(60)
        until(lambda: producer.stats()["readers"] == 0, "the connection is over")
        with pytest.raises(TransferFailed, match="expired"):  # a definite end, in time
            first.wait(timeout=60)
        second = producer.put(cache("c", 9))
        assert producer.stats()["transfers"]["pinned"] == 1
        assert producer.stats()["memory"]["blocks"] == 2
        assert int(seen.min()) == int(seen.max()) == 1
        with KVLink.connect(url, timeout=60) as other, other.get("c", timeout=60) as data:
            assert int(first_tensor(data)[0, 0, 0]) == 9
        second.wait(timeout=60)
        assert producer.stats()["memory"]["blocks"] == 1
        del seen, data


def test_an_offer_to_a_reader_that_closes_takes_no_memory(socket_dir: str) -> None:
    url = f"shm://living?directory={socket_dir}"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as other:
        reader, busy = KVLink.connect(url, timeout=60), threading.Event()
        begin_get(reader, "a", timeout=60)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        assert isinstance(producer._end, PooledProducer)
        producer._end.loop.call(partial(wait, busy))
        reader.close()
        receipt = producer.put(cache("a", 1))  # offered before its Cancel was read
        busy.set()
        other.get("a", timeout=60).release()
        receipt.wait(timeout=60)
        until_freed(producer)


def test_another_reader_gets_what_a_disconnected_one_still_reads(socket_dir: str) -> None:
    url = f"shm://living?directory={socket_dir}"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as reader:
        receipt = producer.put(cache("a", 1))
        with reader.get("a", timeout=60) as data:
            seen = first_tensor(data)
        disconnect_reader(producer)
        with KVLink.connect(url, timeout=60) as other, other.get("a", timeout=60) as data:
            assert int(first_tensor(data).max()) == 1
        receipt.wait(timeout=60)
        assert producer.stats()["memory"]["blocks"] == 1
        assert int(seen.max()) == 1
        del seen, data
