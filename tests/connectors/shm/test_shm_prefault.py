"""A reader maps the producer's memory ahead, and its first transfer maps nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVLink, TensorTransferData, TransferFailed
from omni_kvlink.memory.arena import MIN_ARENA
from omni_kvlink.testing.rig import until
from support.link.ends import end_of

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer

MIB = 1 << 20
PREFAULT = 96 * MIB  # more than a step, so that a thread touches the pages


def mapped(consumer: KVConsumer) -> Any:
    return consumer.stats()["mapped"]


def transfer(producer: Any, consumer: KVConsumer, key: str) -> None:
    """A payload that fills the memory that was mapped ahead."""
    data = TensorTransferData(key, {"x": torch.arange(PREFAULT // 8)})
    receipt = producer.put(data)
    with consumer.get(key, timeout=60) as found:
        assert isinstance(found, TensorTransferData)
        assert torch.equal(found["x"], data["x"])
        del found
    receipt.wait(timeout=60)


def until_passed(producer: Any, consumer: KVConsumer) -> None:
    """Wait until what the producer had to send before is handled: messages keep their order."""

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    until(lambda: "kvlink-memory" not in threads(), "the memory is mapped")
    was_sent = threading.Event()
    end_of(producer).loop.call(was_sent.set)
    assert was_sent.wait(60)
    producer.fail("none", "there is none")
    with pytest.raises(TransferFailed):
        consumer.get("none", timeout=60)


@pytest.mark.parametrize("connects", ["before", "after"])
def test_it_is_mapped_before_the_first_payload(connects: str, sockets: str) -> None:
    with KVLink.serve("shm://ahead", directory=sockets, prefault=PREFAULT) as producer:
        if connects == "after":
            until(lambda: bool(producer.stats()["memory"]["arenas"]), "memory is mapped")
        with KVLink.connect("shm://ahead", directory=sockets, timeout=60) as consumer:
            until_passed(producer, consumer)
            assert mapped(consumer)["nbytes"] >= PREFAULT
            until(lambda: mapped(consumer)["touched"] >= PREFAULT, "all is touched")
            before = mapped(consumer)
            transfer(producer, consumer, "first")
            assert mapped(consumer) == before
            assert producer.stats()["memory"]["arenas"] == 1


@pytest.mark.parametrize("url", ["shm://unasked", "auto://unasked"])
def test_a_first_arena_is_mapped_unasked(url: str, sockets: str) -> None:
    """The first transfer maps nothing, on both sides."""
    with (
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(url, directory=sockets, timeout=60) as consumer,
    ):
        until(lambda: producer.stats()["memory"]["arenas"] == 1, "memory is mapped")
        until_passed(producer, consumer)
        until(lambda: mapped(consumer)["touched"] == MIN_ARENA, "all is touched")
        before = mapped(consumer)
        producer.put(TensorTransferData("first", {"x": torch.ones(MIB)}))
        consumer.get("first", timeout=60).release()
        memory: Any = producer.stats()["memory"]
        assert (memory["mapped"], memory["prefault"]["mapped"]) == (MIN_ARENA, MIN_ARENA)
        assert mapped(consumer) == before


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("shm://none", {"prefault": 0}),
        ("shm://none", {"mode": "sealed"}),
        ("shm://none", {"quota": 8 * MIN_ARENA - 1}),
        ("inproc://none", {}),
        ("zmq+tcp://127.0.0.1:0", {"insecure": True}),
    ],
)
def test_links_of_which_nothing_is_mapped_unasked(
    url: str, options: dict[str, Any], sockets: str
) -> None:
    with KVLink.serve(url, directory=sockets, **options) as producer:
        memory: Any = producer.stats()["memory"]
        assert (memory["prefault"]["requested"], memory["mapped"]) == (0, 0)


def test_a_payload_that_comes_first_waits_for_it(sockets: str) -> None:
    with (
        KVLink.serve("shm://early", directory=sockets, prefault=PREFAULT) as producer,
        KVLink.connect("shm://early", directory=sockets, timeout=60) as consumer,
    ):
        transfer(producer, consumer, "first")
        assert producer.stats()["memory"]["arenas"] == 1
        until(lambda: mapped(consumer)["touched"] == mapped(consumer)["nbytes"], "all is touched")


def test_in_mode_sealed_nothing_is_passed_before_an_offer(sockets: str) -> None:
    """A reader sees the memory of what it was offered only."""
    how: Any = {"directory": sockets, "mode": "sealed", "prefault": PREFAULT}
    with (
        KVLink.serve("shm://sealed", **how) as producer,
        KVLink.connect("shm://sealed", directory=sockets, timeout=60) as consumer,
    ):
        assert producer.stats()["memory"]["prefault"]["requested"] == 0
        transfer(producer, consumer, "first")
        until(lambda: not mapped(consumer)["arenas"], "the arena is unmapped")


def test_a_reader_over_a_network_maps_its_own_ahead() -> None:
    how: Any = {"insecure": True, "prefault": PREFAULT}
    with (
        KVLink.serve("zmq+tcp://127.0.0.1:0", **how) as producer,
        KVLink.connect(producer.url, timeout=60, **how) as consumer,
    ):
        transfer(producer, consumer, "first")
        for end in (producer, consumer):
            memory: Any = end.stats()["memory"]
            assert memory["arenas"] == 1
            assert memory["prefault"]["mapped"] >= PREFAULT
            assert memory["prefault"]["error"] == ""


def test_without_a_thread_pages_are_touched_by_their_readers(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that can start no more threads receives all the same."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvlink-memory":
            raise RuntimeError("can't start new thread")
        start(thread)

    with (
        KVLink.serve("shm://bare", directory=sockets) as producer,
        KVLink.connect("shm://bare", directory=sockets, timeout=60) as consumer,
    ):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        transfer(producer, consumer, "first")
        assert mapped(consumer)["touched"] < PREFAULT <= mapped(consumer)["nbytes"]


def test_what_is_kept_is_mapped_before_a_new_reader_asks(sockets: str) -> None:
    with KVLink.serve("shm://kept-first", directory=sockets) as producer:
        data = TensorTransferData("k", {"x": torch.arange(PREFAULT // 8)})
        producer.put(data, readers=None)
        with KVLink.connect("shm://kept-first", directory=sockets, timeout=60) as consumer:
            until_passed(producer, consumer)
            before = mapped(consumer)
            assert before["nbytes"] >= PREFAULT
            with consumer.get("k", timeout=60, wait=False) as found:
                assert isinstance(found, TensorTransferData)
                assert torch.equal(found["x"], data["x"])
            assert mapped(consumer)["arenas"] == before["arenas"]
