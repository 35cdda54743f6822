"""A prompt that was offloaded, evicted and loaded again gives the same tokens, in real engines."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from support.kept.store_process import store_process
from support.vllm.engine_process import BLOCK, EngineProcess, prompt
from support.vllm.tiers import offloading, tier

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]
pytest.importorskip("vllm.v1.kv_offload.tiering.async_lookup", reason="these are tiers of 0.32")

BLOCK_BYTES = 1 << 16
"""Bytes of a block of the model in float32: two layers, K and V, two heads of 64."""

LENGTH = 5 * BLOCK + 9
WHOLE = 5 * BLOCK
Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def start_tier(model: Path, directory: Path) -> Iterator[Start]:
    """`start_tier(name, …)`: an engine that serves `name`, with 12 chunks before its tier."""
    with ExitStack() as engines:

        def start_tier(name: str, dtype: str = "float32", **settings: Any) -> EngineProcess:
            entry = tier(f"shm://{name}", link={"directory": str(directory)}, **settings)
            config = offloading(entry)
            config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 12 * BLOCK_BYTES
            log = directory / f"{name}.log"
            engine = EngineProcess(model, log, config, dtype=dtype)
            engines.callback(engine.close)
            return engine

        yield start_tier


def compute(engine: EngineProcess, seed: int) -> dict[str, Any]:
    """Compute a prompt to its end, its offloading too; the engine's own blocks are empty then."""
    answer = engine.generate(prompt(LENGTH, seed=seed))
    assert engine.call("settle") >= 0
    assert engine.call("forget")
    return answer


def test_evicted_and_loaded_again(start_tier: Start) -> None:
    engine = start_tier("a")
    first = compute(engine, seed=0)
    assert first["cached"] == 0
    for seed in (1, 2, 3):
        compute(engine, seed=seed)
    again = compute(engine, seed=0)
    assert again["cached"] == WHOLE
    assert again["tokens"] == first["tokens"]
    assert max(abs(a - b) for a, b in zip(again["logprobs"], first["logprobs"], strict=True)) < 1e-4
    assert engine.count("tier_loaded") == WHOLE // BLOCK


def test_of_an_engine_that_was_killed(start_tier: Start, directory: Path) -> None:
    """A store has its chunks; without one they are computed."""
    where = f"shm://store?directory={directory}"
    with store_process(where, "--budget", "64MiB") as store:
        one = start_tier("b", stores=["shm://store"])
        first = compute(one, seed=0)
        other = start_tier("c", stores=["shm://store"], peers=["shm://b"])
        assert other.call("wait_connected")
        compute(one, seed=1)
        assert one.call("wait_connected")
        assert one.call("drain")
        one.kill()
        loaded = compute(other, seed=0)
        assert (loaded["cached"], loaded["tokens"]) == (WHOLE, first["tokens"])
        store.kill()
        store.wait()
        assert compute(other, seed=1)["cached"] == 0
