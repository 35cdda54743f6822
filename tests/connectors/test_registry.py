"""Connectors by name: lazily imported; the error for an unknown name lists the known ones."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any, NoReturn

import pytest
import torch

from omni_kvlink import KVCacheTransferData, KVLink, UnavailableError
from omni_kvlink.connectors import registry
from omni_kvlink.connectors.base import Backend, Options
from omni_kvlink.testing.rig import until
from support.processes.absent import cure


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # `register` has no opposite: the table is copied, and the first one restored.
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))


def test_known_schemes() -> None:
    assert {"inproc", "shm"} <= set(registry.schemes())


def test_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UnavailableError, match=r"'carrier-pigeon'.*inproc.*shm"):
        KVLink.serve("carrier-pigeon://x")
    with pytest.raises(ImportError):
        KVLink.connect("carrier-pigeon://x", timeout=0.1)


@pytest.mark.parametrize("url", ["", "shm", "shm:", "shm:/x", "://x", "shm://", "bagel"])
def test_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="link URL"):
        KVLink.serve(url)


def test_missing_package_names_the_cure(rows: None) -> None:
    registry.register("rdma", "omni_kvlink_rdma:BACKEND", "pip install omni-kvlink-rdma")
    assert "rdma" in registry.schemes()
    with pytest.raises(UnavailableError, match=r"omni_kvlink_rdma.*; pip install omni-kvlink-rdma"):
        registry.backend("rdma")


@pytest.mark.parametrize("url", ["zmq+tcp://127.0.0.1:0", "zmq+ipc:///tmp/x", "auto://x?tcp=h:1"])
def test_without_pyzmq_the_cure_is_named(url: str) -> None:
    use = f"from omni_kvlink import KVLink\nKVLink.serve({url!r})"
    assert cure("zmq", use).strip().endswith("; pip install pyzmq")


def test_backend_that_cannot_run_here_says_why(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> NoReturn:
        raise AssertionError("it is not available")

    module = types.ModuleType("moon")
    vars(module)["BACKEND"] = Backend(never, never, lambda: "it needs the moon; go there")
    monkeypatch.setitem(sys.modules, "moon", module)
    registry.register("moon", "moon:BACKEND")
    with pytest.raises(UnavailableError, match="cannot run here: it needs the moon; go there"):
        KVLink.serve("moon://x")


def test_import_is_lazy() -> None:
    code = (
        "import sys, omni_kvlink; "
        "loaded = {'inproc', 'shm', 'zmq', 'ucx'} & "
        "{name.rpartition('.')[2] for name in sys.modules if 'omni_kvlink.connectors' in name}; "
        'sys.exit(", ".join(loaded) or 0)'
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "open"}, "mode='open'"),
        ({"quota": 10, "prefault": 11}, "prefault"),
        ({"prefault": -1}, "prefault"),
    ],
)
def test_bad_options(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Options(**options)


def test_memory_is_prefaulted_for_a_plan() -> None:
    about = {"kv_lens": [4096], "ropes": [4096], "num_layers": 2}
    plan = KVCacheTransferData.blank("plan", row=(4, 128), dtype=torch.bfloat16, metadata=about)
    needed = plan.plan(digests=True).nbytes
    with KVLink.serve("inproc://ahead", prefault=plan) as producer:

        def prefault() -> dict[str, Any]:
            found: dict[str, Any] = producer.stats()["memory"]["prefault"]
            return found

        until(lambda: prefault()["mapped"] or prefault()["error"], "memory is mapped")
        assert prefault()["mapped"] >= needed
        before = producer.stats()["memory"]["mapped"]
        allocation = producer.allocate(plan)
        assert producer.stats()["memory"]["mapped"] == before
        allocation.release()
    with pytest.raises(ValueError, match="not within the quota 100"):
        KVLink.serve("inproc://ahead", prefault=plan, quota=100)


def test_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"quoat: no such setting; did you mean quota\? There are quota, mode"
    ):
        KVLink.serve("inproc://x", quoat=5)  # type: ignore[call-arg]  # on purpose
    with pytest.raises(ValueError, match="speed: no such setting; there are quota"):
        KVLink.serve("inproc://x?speed=9")
