"""A store that starts while its clients wait for it, or is stopped: none of them waits in vain."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.kept import PayloadStore, StoreClient
from omni_kvlink.kept import store as store_module
from omni_kvlink.link import set_backing
from omni_kvlink.testing.rig import until
from support.kept.store_process import STORE, is_stopped, program, until_reachable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVProducer

STOPS = 5


@pytest.fixture
def root() -> Iterator[str]:
    """A directory of sockets, which processes may leave there when they are killed."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as root:
        yield root


def test_a_client_that_asks_before_the_store_is_ready(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its place among those that wait when the link learns of the store behind it."""

    def set_late(link: KVProducer, backing: Any) -> None:
        until(lambda: link.stats()["transfers"]["waiting"], "the client waits")
        set_backing(link, backing)

    monkeypatch.setattr(store_module, "set_backing", set_late)
    with (
        StoreClient("shm://w", stores=["shm://s"], directory=root) as writer,
        PayloadStore("shm://s", budget="8MiB", directory=root),
    ):
        writer.put("a", {"x": torch.ones(1000)})
        assert writer.drain(timeout=30)


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
            os.kill(worker, signal.SIGSTOP)
            until(lambda: is_stopped(worker), "it is stopped")
            os.kill(worker, signal.SIGCONT)
            with StoreClient("shm://w", stores=["shm://s"], directory=root) as client:
                until_reachable(client)
        store.send_signal(signal.SIGTERM)
        assert store.wait() == 0
