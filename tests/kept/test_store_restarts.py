"""A store that starts while its clients wait for it, or is stopped: none of them waits in vain."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVLink, KVLinkError
from omni_kvlink.connectors.base import Producer
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.kept import PayloadStore, StoreClient
from omni_kvlink.kept import store as store_module
from omni_kvlink.kept.store_writer import StoreWriter
from omni_kvlink.link import open_producer
from omni_kvlink.testing.rig import until
from support.faults.frozen import freeze
from support.kept.store_process import STORE, program, until_reachable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.kept.store_messages import KeptOffer

# Reaches into _take: where a store is when the client that it fetches from ends.

STOPS = 5


@pytest.fixture
def root() -> Iterator[str]:
    """A directory of sockets, which processes may leave there when they are killed."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as root:
        yield root


def test_a_client_that_asks_while_the_store_opens(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a file is there from the first get on that the store's link answers."""
    sent, found = torch.ones(1000), list[torch.Tensor]()
    where: dict[str, Any] = {"budget": "8MiB", "files": Path(root) / "files", "directory": root}
    with (
        PayloadStore("shm://s", **where),
        StoreClient("shm://w", stores=["shm://s"], directory=root) as writer,
    ):
        writer.put("a", {"x": sent})
        assert writer.drain(timeout=30)

    def open_slowly(*arguments: Any, **options: Any) -> KVProducer:
        link = open_producer(*arguments, **options)
        thread.start()
        until(
            lambda: link.stats()["transfers"]["waiting"] or not thread.is_alive(),
            "the client waits, or has its answer",
        )
        return link

    def read() -> None:
        with (
            KVLink.connect("shm://s", timeout=30, directory=root) as reader,
            reader.get("a", timeout=30, wait=False) as data,
        ):
            [tensor] = data.tensors()
            assert isinstance(tensor, torch.Tensor)
            found.append(tensor.clone())

    thread = threading.Thread(target=read)
    monkeypatch.setattr(store_module, "open_producer", open_slowly)
    with PayloadStore("shm://s", **where):
        thread.join()
    assert torch.equal(found[0], sent)


def test_a_connector_that_keeps_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store over it is refused at once, and leaves neither its name nor its directory taken."""
    where: dict[str, Any] = {"budget": "8MiB", "files": Path(root) / "files", "directory": root}
    with monkeypatch.context() as patch:
        patch.setattr(PooledProducer, "kept", Producer.kept)
        with pytest.raises(KVLinkError, match="keeps no payloads"):
            PayloadStore("shm://s", **where)
    PayloadStore("shm://s", **where).close()


def test_a_store_that_is_stopped_goes_on(root: str) -> None:
    """Stopped for longer than it waits for its signal until it prints a line."""
    where = f"?directory={root}"
    arguments = "store", f"shm://s{where}", "--budget", "8MiB", "--stats-seconds", "0.001"
    with program(STORE, *arguments) as store:
        assert store.stdout is not None
        assert store.stdout.readline().startswith("serving ")
        children = Path(f"/proc/{store.pid}/task/{store.pid}/children")
        worker = int(children.read_text())
        for _ in range(STOPS):
            freeze(worker)
            os.kill(worker, signal.SIGCONT)
            with StoreClient("shm://w", stores=["shm://s"], directory=root) as client:
                until_reachable(client)
        store.send_signal(signal.SIGTERM)
        assert store.wait() == 0


def test_a_client_succeeds_another_at_its_url_while_that_one_is_fetched_from(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store does not wait at the new client for offers of the old one."""
    taking, goes_on, take = threading.Event(), threading.Event(), StoreWriter._take

    def take_late(self: StoreWriter, consumer: KVConsumer, offer: KeptOffer) -> None:
        taking.set()
        assert goes_on.wait(60)
        take(self, consumer, offer)

    with PayloadStore("shm://s", budget="8MiB", directory=root) as store:
        with StoreClient("shm://w", stores=["shm://s"], directory=root) as first:
            monkeypatch.setattr(StoreWriter, "_take", take_late)
            first.put("a", {"x": torch.ones(1000)})
            assert taking.wait(60)
        with StoreClient("shm://w", stores=["shm://s"], directory=root) as second:
            until(lambda: waiting(store), "it has asked the store to fetch from it")
            goes_on.set()
            second.put("b", {"x": torch.ones(1000)})
            assert second.drain(timeout=60)
            until(lambda: len(store.stats()["writers"]) == 1, "the store has left the first one")


def waiting(store: PayloadStore) -> bool:
    """Whether a get waits at the store's link."""
    return bool(store.stats()["link"]["transfers"]["waiting"])
