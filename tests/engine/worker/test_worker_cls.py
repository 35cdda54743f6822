"""A worker class of one's own, by `worker_cls`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from omni_kvlink.engine import AREngine, DiffusionEngine, OmniARConfig, OmniDiffusionConfig
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.executor.distributed import MultiprocExecutor
from omni_kvlink.engine.worker import GPUARWorker, GPUDiffusionWorker, worker_class
from support import FOLDER
from support.engine.fixtures import WAIT, alone, checkpoint, config, request
from support.engine.multiproc import engine_with_ranks

OWN = "support.engine.workers:CountingWorker"


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes find the module of the class, too."""
    found = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))


def test_a_worker_of_ones_own_in_this_process() -> None:
    engine = DiffusionEngine(config(None, stage="all", worker_cls=OWN))
    try:
        output = engine.submit(request("r", need_kv_receive=False)).result(WAIT)
        assert torch.equal(output.result()[0], alone())
        assert engine.executor.collective_rpc("requests_run") == [(os.getpid(), 0, 1)]
    finally:
        engine.close()


@pytest.mark.usefixtures("_importable")
def test_workers_of_ones_own_in_processes(sockets: str) -> None:
    with engine_with_ranks(sockets, 2, worker_cls=OWN) as stage:
        for name in ("a", "b", "c"):
            stage.send(name)
            stage.submit(name).result(WAIT).result()
        found = stage.executor.collective_rpc("requests_run")
    assert [rank for _, rank, _ in found] == [0, 1]
    assert sum(count for *_, count in found) == 3
    assert os.getpid() not in [pid for pid, *_ in found]


def test_a_worker_of_an_ar_stage() -> None:
    engine = AREngine(
        OmniARConfig(
            checkpoint(),
            dtype="float32",
            num_blocks=8,
            kv=KVConfig(sinks=("shm://own-worker",)),
            worker_cls="support.engine.workers:NamedARWorker",
        )
    )
    try:
        assert engine.executor.collective_rpc("worker_name") == ["NamedARWorker 0"]
    finally:
        engine.close()


def test_the_default_is_the_worker_of_the_kind_of_stage() -> None:
    assert worker_class(OmniDiffusionConfig("x")) is GPUDiffusionWorker
    assert worker_class(OmniARConfig("x")) is GPUARWorker


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("support.engine.workers:NoWorker", ValueError, "is no WorkerBase"),
        ("support.engine.workers:os", ValueError, "is no WorkerBase"),
        ("support.engine.workers:NamedARWorker", ValueError, "is the worker of an AR stage"),
        ("support.engine.workers:Missing", AttributeError, "Missing"),
        ("no_such_module:Worker", ModuleNotFoundError, "no_such_module"),
    ],
)
def test_what_is_no_worker_is_refused_before_a_process_starts(
    name: str, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    # That no process was started: a started one would end too soon to be seen.
    monkeypatch.setattr(MultiprocExecutor, "_start_workers", lambda own: started.append(own))
    how: dict[str, Any] = {"stage": "all", "worker_cls": name}
    for backend in ("uni", "mp"):
        with pytest.raises(error, match=match):
            DiffusionEngine(config(None, distributed_executor_backend=backend, **how))
    assert not started


def test_a_name_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker_cls 'vllm\.Worker': name a WorkerBase"):
        OmniDiffusionConfig("x", worker_cls="vllm.Worker")


def test_where_there_is_no_worker_its_class_is_refused() -> None:
    with pytest.raises(EngineError, match="no use for worker_cls"):
        DiffusionEngine(config(None, distributed_executor_backend="diffusers", worker_cls=OWN))
