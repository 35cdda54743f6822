"""Chrome traces of what workers compute: in this process, in others, and of all stages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import (
    DiffusionEngine,
    EngineError,
    OmniDiffusion,
    OmniDiffusionConfig,
    ProfilerConfig,
    StageEngine,
)
from support.engine.fixtures import WAIT, alone, checkpoint, request
from support.engine.multiproc import engine_with_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

ATTENTION = "aten::scaled_dot_product_attention"


def operators(path: str) -> set[str]:
    events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "cpu_op"}


@pytest.fixture(scope="module")
def engine() -> Iterator[StageEngine[Any]]:
    how: dict[str, Any] = {"stage": "all", "dtype": "float32", "num_threads": 1}
    with DiffusionEngine(OmniDiffusionConfig(checkpoint(), **how)) as made:
        yield made


def run(engine: StageEngine[Any], name: str) -> torch.Tensor:
    return engine.submit(request(name, seed=1, need_kv_receive=False)).result(WAIT).result()


def test_what_ran_meanwhile_is_in_the_trace(engine: StageEngine[Any], tmp_path: Path) -> None:
    directory = tmp_path / "new" / "traces"
    engine.start_profile(str(directory))
    image = run(engine, "a")
    (path,) = engine.stop_profile()
    assert Path(path) == directory / "all-rank0.trace.json"
    assert ATTENTION in operators(path)
    assert torch.equal(image[0], alone(seed=1))


def test_what_ran_before_and_after_is_not(engine: StageEngine[Any], tmp_path: Path) -> None:
    run(engine, "a")
    engine.start_profile(str(tmp_path))
    (path,) = engine.stop_profile()
    assert ATTENTION not in operators(path)
    written = Path(path).read_bytes()
    run(engine, "b")
    assert Path(path).read_bytes() == written


def test_start_and_stop_alternate(engine: StageEngine[Any], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="start_profile"):
        engine.stop_profile()
    engine.start_profile(str(tmp_path))
    with pytest.raises(EngineError, match="stop_profile"):
        engine.start_profile(str(tmp_path))
    engine.stop_profile()
    engine.start_profile(str(tmp_path))
    engine.stop_profile()


def test_a_directory_that_cannot_be_made(engine: StageEngine[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        engine.start_profile(str(tmp_path / "file"))
    engine.start_profile(str(tmp_path))
    engine.stop_profile()


def test_an_engine_that_closes_meanwhile(engine: StageEngine[Any], tmp_path: Path) -> None:
    with DiffusionEngine(engine.config) as other:
        other.start_profile(str(tmp_path))
        run(other, "a")
    assert not list(tmp_path.iterdir())
    engine.start_profile(str(tmp_path))  # nothing of the other is left
    run(engine, "b")
    assert ATTENTION in operators(engine.stop_profile()[0])


def test_what_the_configuration_says_is_recorded(tmp_path: Path) -> None:
    names = ("record_shapes", "with_memory", "use_gzip")
    what: dict[str, Any] = {f"torch_profiler_{name}": True for name in names}
    config = ProfilerConfig(torch_profiler_dir=str(tmp_path), **what)
    how: dict[str, Any] = {"stage": "all", "dtype": "float32", "profiler_config": config}
    with DiffusionEngine(OmniDiffusionConfig(checkpoint(), **how)) as engine:
        engine.start_profile()
        run(engine, "a")
        (path,) = engine.stop_profile()
    assert Path(path) == tmp_path / "all-rank0.trace.json.gz"
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    (shapes, *_) = [e["args"]["Input Dims"] for e in events if e.get("name") == ATTENTION]
    assert len(shapes[0]) == 4
    assert "[memory]" in {event.get("name") for event in events}


def test_without_a_directory_there_is_no_profile(engine: StageEngine[Any]) -> None:
    with pytest.raises(EngineError, match="torch_profiler_dir"):
        engine.start_profile()
    with pytest.raises(EngineError, match="start_profile"):
        engine.stop_profile()


def test_each_rank_has_a_trace(sockets: str, tmp_path: Path) -> None:
    with engine_with_ranks(sockets, 2) as stage:
        stage.engine.start_profile(str(tmp_path))
        futures = [stage.submit(f"r{seed}", seed=seed) for seed in range(4)]
        for seed in range(4):
            stage.send(f"r{seed}", seed=seed)
        for future in futures:
            future.result(WAIT).result()
        paths = stage.engine.stop_profile()
        assert [Path(path).name for path in paths] == [
            "dit-rank0.trace.json",
            "dit-rank1.trace.json",
        ]
        assert all(ATTENTION in operators(path) for path in paths)


def deployment(sockets: str) -> dict[str, Any]:
    return {
        "pipeline": "bagel",
        "stages": [
            {"stage_id": 0, "own_process": True},
            {"stage_id": 1, "input_connectors": {"from_stage_0": "wire"}},
        ],
        "connectors": {"wire": {"name": "SharedMemoryConnector", "extra": {"directory": sockets}}},
    }


SMALL = {"height": 16, "width": 24, "num_inference_steps": 3}


def test_every_stage_of_a_deployment(sockets: str, tmp_path: Path) -> None:
    with OmniDiffusion(checkpoint(), deployment(sockets), dtype="float32") as omni:
        omni.start_profile(tmp_path)
        omni.generate("a fox", SMALL, timeout=WAIT)
        paths = omni.stop_profile()
    assert [Path(path).relative_to(tmp_path) for stage in paths for path in stage] == [
        Path("stage-0/ar-rank0.trace.json"),
        Path("stage-1/dit-rank0.trace.json"),
    ]
    assert all(ATTENTION in operators(path) for stage in paths for path in stage)


def test_a_deployment_says_where_traces_are_written(sockets: str, tmp_path: Path) -> None:
    stages = deployment(sockets)
    for number, stage in enumerate(stages["stages"]):
        stage["profiler_config"] = {"torch_profiler_dir": str(tmp_path / str(number))}
    with OmniDiffusion(checkpoint(), stages, dtype="float32") as omni:
        omni.start_profile()
        omni.generate("a fox", SMALL, timeout=WAIT)
        (first,), (second,) = omni.stop_profile()
    assert Path(first) == tmp_path / "0" / "ar-rank0.trace.json"
    assert Path(second) == tmp_path / "1" / "dit-rank0.trace.json"


def test_two_workers_of_one_process(engine: StageEngine[Any], sockets: str, tmp_path: Path) -> None:
    """Torch has one recording in a process: the second would end the first without a word."""
    engine.start_profile(str(tmp_path / "first"))
    with OmniDiffusion(checkpoint(), deployment(sockets), dtype="float32") as omni:
        with pytest.raises(EngineError, match="own_process"):
            omni.start_profile(tmp_path)
        with pytest.raises(EngineError, match="start_profile"):
            omni.stages[0].stop_profile()  # it had started, and is stopped again
        omni.stages[0].start_profile(str(tmp_path / "second"))
        with pytest.raises(EngineError, match="dit-rank0 is not being profiled"):
            omni.stop_profile()
        assert (tmp_path / "second" / "ar-rank0.trace.json").is_file()
    run(engine, "a")
    assert ATTENTION in operators(engine.stop_profile()[0])
