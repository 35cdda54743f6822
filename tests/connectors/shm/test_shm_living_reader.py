"""A reader whose connection broke but whose process lives keeps the memory that it reads."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    CapacityError,
    ClosedError,
    KVCacheTransferData,
    KVLink,
    KVProducer,
    PeerLostError,
    TensorTransferData,
    TransferFailed,
)
from omni_kvlink.connectors.protocol.get_table import GetRequest
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.shm.consumer import ShmConsumer, ShmSession
from omni_kvlink.connectors.shm.listener import ShmListener
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import until, until_freed
from support.connectors.held_loops import loop_of
from support.faults.frozen import freeze
from support.link.ends import end_of, peers_of, session_of

if TYPE_CHECKING:
    from support.faults.harness import Field, Start


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


def disconnect_reader(producer: KVProducer, how: str = "_disconnect_in_loop") -> None:
    """Break the connection of the only reader."""
    end = end_of(producer)
    assert isinstance(end, PooledProducer)
    (listener,) = end.listeners
    assert isinstance(listener, ShmListener)
    (peer,) = peers_of(producer)
    end.loop.call(lambda: getattr(listener, how)(peer))


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
        assert isinstance(end_of(reader), ShmConsumer)
        session = session_of(reader)
        assert isinstance(session, ShmSession)
        if side == "reader":
            loop_of(session).call(session._channel.close)  # not while its thread reads
        else:
            disconnect_reader(producer)
            with pytest.raises(PeerLostError):
                session.get_table.request([GetRequest("b")])[0].wait(timeout=60)
        until(lambda: producer.stats()["readers"] == 0, "the connection is over")
        with pytest.raises(TransferFailed, match="expired"):  # a definite end, in time
            first.wait(timeout=60)
        second = producer.put(cache("c", 9))
        assert producer.stats()["transfers"]["pinned"] == 1
        assert producer.stats()["detached"] == {f"pid {os.getpid()}": first.ledger.nbytes}
        assert producer.stats()["memory"]["blocks"] == 2
        assert int(seen.min()) == int(seen.max()) == 1
        with KVLink.connect(url, timeout=60) as other, other.get("c", timeout=60) as data:
            assert int(first_tensor(data)[0, 0, 0]) == 9
        second.wait(timeout=60)
        assert producer.stats()["memory"]["blocks"] == 1
        del seen, data


def test_the_error_of_a_full_quota_names_who_was_disconnected(socket_dir: str) -> None:
    """What a process whose connection broke may read is bounded by the quota."""
    url, size = f"shm://living?directory={socket_dir}", 150_000
    with KVLink.serve(url, quota="1MiB") as producer, KVLink.connect(url, timeout=60) as reader:
        receipt = producer.put(TensorTransferData("a", {"h": torch.ones(size)}))
        with pytest.raises(CapacityError, match=r"release their payloads$"):
            producer.put(TensorTransferData("b", {"h": torch.ones(size)}), timeout=0)
        with reader.get("a", timeout=60) as data:
            seen: Any = data["h"]
        disconnect_reader(producer)
        until(lambda: producer.stats()["transfers"]["pinned"] == 1, "its memory is kept")
        producer.abort("a")
        named = rf"\(pid {os.getpid()}: {receipt.ledger.nbytes} bytes\): end those processes$"
        with pytest.raises(CapacityError, match=named):
            producer.put(TensorTransferData("b", {"h": torch.zeros(size)}), timeout=0)
        assert int(seen.min()) == int(seen.max()) == 1
        del seen, data


@pytest.mark.parametrize("side", ["reader", "producer"])
@pytest.mark.parametrize("count", [1, 5])
def test_memory_returns_when_its_last_view_is_freed(socket_dir: str, side: str, count: int) -> None:
    """Not when the reader's process ends: an ended session still sends its releases."""
    url = f"shm://living?directory={socket_dir}"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as reader:
        receipts = [producer.put(cache(f"k{number}", number)) for number in range(count)]
        seen = []
        for number in range(count):
            with reader.get(f"k{number}", timeout=60) as data:
                seen.append(first_tensor(data))
        del data
        assert isinstance(end_of(reader), ShmConsumer)
        session = session_of(reader)
        assert isinstance(session, ShmSession)
        if side == "reader":
            # What the session does when it cannot map an arena, at a moment when nothing else is
            # wrong.
            loop_of(session).call(lambda: session._end_gets_in_loop(CapacityError("out of memory")))
        else:
            disconnect_reader(producer, how="_finish_in_loop")
        until(lambda: session.is_closed, "the session ended")
        with KVLink.connect(url, timeout=60) as other:  # nothing is reused for it
            theirs = producer.put(cache("other", 99))
            with other.get("other", timeout=60) as data:
                assert int(first_tensor(data).min()) == 99
            del data
            theirs.wait(timeout=60)
        for number, tensor in enumerate(seen):
            assert int(tensor.min()) == int(tensor.max()) == number
        key = "leased" if side == "reader" else "pinned"
        assert producer.stats()["transfers"][key] == count
        del tensor
        seen.pop()
        until(lambda: producer.stats()["transfers"][key] == count - 1, f"one less is {key}")
        seen.clear()
        for receipt in receipts:
            if side == "producer":  # they are for another reader: this one was lost
                assert receipt.state == "committed"
                producer.abort(receipt.key)
            else:
                receipt.wait(timeout=60)
        until_freed(producer)
        assert producer.stats()["transfers"]["pinned"] == 0


@pytest.mark.usefixtures("leaves_nothing")  # set up before `pooled`
def test_a_reader_that_did_not_read_releases_what_it_holds(pooled: Field, start: Start) -> None:
    """It was disconnected while it was stopped, since messages for it piled up."""
    target = start()
    producer = pooled.serve()
    slow = pooled.connect_at(target)
    receipt = producer.put(Recipe("k").make(), ttl=3600)
    slow.call("hold", key="k", timeout=60)
    held = slow.peer.call("hash_held", key="k")
    slow.submit("get", key="never", timeout=PATIENCE)
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
    freeze(target.process.pid)
    assert isinstance(end_of(producer), PooledProducer)
    plan = TensorTransferData("never", {"h": torch.empty(1)})
    while not producer.stats()["refused"]:
        producer.allocate(plan).release()  # tells the reader so
    assert producer.stats()["refused"] == {"too slow": 1}
    until(lambda: producer.stats()["transfers"]["pinned"] == 1, "its memory is kept")
    os.kill(target.process.pid, signal.SIGCONT)
    assert slow.peer.call("hash_held", key="k") == held
    assert producer.stats()["transfers"]["pinned"] == 1
    slow.peer.call("release", key="k")
    until(lambda: producer.stats()["transfers"]["pinned"] == 0, "it was released")
    assert receipt.state == "committed"
    assert pooled.connect().call("get", key="k", timeout=60) == fingerprint(Recipe("k").make())
    receipt.wait(timeout=60)
    until_freed(producer)


def test_an_offer_to_a_reader_that_closes_takes_no_memory(socket_dir: str) -> None:
    url = f"shm://living?directory={socket_dir}"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as other:
        reader, busy = KVLink.connect(url, timeout=60), threading.Event()
        pending = begin_get(reader, "a", timeout=60)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        assert isinstance(end_of(producer), PooledProducer)
        end_of(producer).loop.call(partial(wait, busy))
        reader.close()
        receipt = producer.put(cache("a", 1))  # offered before its Cancel was read
        busy.set()
        other.get("a", timeout=60).release()
        receipt.wait(timeout=60)
        until_freed(producer)
        with pytest.raises(ClosedError):
            pending.wait(timeout=60)


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
