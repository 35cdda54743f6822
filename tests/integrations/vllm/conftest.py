"""A model made once, short paths for sockets, and engines that are closed again."""

from __future__ import annotations

import os
import runpy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.processes import fork_server
from support.vllm.engine_process import EngineProcess, transfer

# Importing vLLM takes ten seconds of a core, for each of fifty engines.
os.environ["HF_HUB_OFFLINE"] = "1"  # which is read at import
fork_server.preload(
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.blip2",
    "omni_kvlink.integrations.vllm",
)

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "pd_vllm.py"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    runpy.run_path(str(EXAMPLE))["make_model"](path)
    return path


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blip2")
    runpy.run_path(str(EXAMPLE.with_name("epd_vllm.py")))["make_model"](path)
    return path


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """For sockets and logs."""
    path = tempfile.mkdtemp(prefix="kvl-")
    yield Path(path)
    shutil.rmtree(path)


TTL = 3600
"""Blocks that come back by themselves would come back after an hour."""


@pytest.fixture
def engine(model: Path, sockets: str) -> Iterator[Callable[..., Any]]:
    """`engine(role, …)`: the stepped engine `p`, or one that reads from it; see `SteppedEngine`."""
    from support.vllm.steps import SteppedEngine  # not where vLLM is absent

    opened = []

    def engine(
        role: str, policy: str = "fail", caching: bool = True, steps: Any = None, **extra: Any
    ) -> Any:
        directory, settings = {"directory": sockets}, {"ttl": TTL, **extra}
        if role != "consumer":
            settings = {"url": "shm://p", "serve": directory, **settings}
        if role != "producer":
            settings = {"peers": ["shm://p"], "connect": directory, "timeout": 60, **settings}
        configured = transfer(role, policy, **settings)
        made = SteppedEngine(str(model), configured, caching=caching, **(steps or {}))
        opened.append(made)
        return made

    yield engine
    for made in reversed(opened):
        made.close()


@pytest.fixture
def tier_engine(model: Path, sockets: str) -> Iterator[Callable[..., Any]]:
    """`tier_engine(url, …)`: a stepped engine with a tier; `steps` are `SteppedEngine`'s."""
    from support.vllm.steps import SteppedEngine
    from support.vllm.tiers import offloading, tier

    with ExitStack() as engines:

        def tier_engine(
            url: str, *, chunks: int = 6, steps: Any = None, extra: Any = None, **settings: Any
        ) -> Any:
            entry = tier(url, **{"link": {"directory": sockets}, **settings})
            configured = offloading(entry, chunks=chunks, **(extra or {}))
            made = SteppedEngine(str(model), configured, **(steps or {}))
            engines.callback(made.close)
            return made

        yield tier_engine


Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def start(model: Path, directory: Path) -> Iterator[Start]:
    """`start(name, role, …)`: an engine; of one name there is one at a time."""
    with ExitStack() as engines:

        def start(
            name: str, role: str = "", *, policy: str = "fail", extra: Any = None, **config: Any
        ) -> EngineProcess:
            options = {"directory": str(directory)}
            given = dict(extra or {})
            if role in ("producer", "both"):
                given = {"url": f"shm://{name}", "serve": options, **given}
            if role in ("consumer", "both"):
                given = {"peers": ["shm://p"], "connect": options, **given}
            configured = transfer(role, policy, **given) if role else None
            log = directory / f"{name}.log"
            engine = EngineProcess(config.pop("model", model), log, configured, **config)
            engines.callback(engine.close)
            return engine

        yield start
