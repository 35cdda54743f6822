"""Sleeping returns the weights' memory to the system; measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_kvlink.models.bagel import LanguageConfig, make_tiny_checkpoint
from omni_kvlink.models.bagel.tiny import tiny_config

SCRIPT = """
import gc, json, sys, torch
sys.path.insert(0, sys.argv[3])
from omni_kvlink.engine import OmniDiffusionConfig, OmniDiffusionRequest
from omni_kvlink.engine import OmniDiffusionSamplingParams
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.engine.worker.offload import weights_nbytes

torch.set_num_threads(1)

def resident():
    gc.collect()
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

def generate(worker):
    params = OmniDiffusionSamplingParams(height=8, width=8, num_inference_steps=3, seed=1)
    output = worker.execute_model([OmniDiffusionRequest("a fox", params, "r")])
    return output.runner_outputs[0].result.result()

worker = GPUDiffusionWorker(0, 0, OmniDiffusionConfig(sys.argv[1], stage="all", dtype="float32"))
worker.init_device()
before = generate(worker)
weights, awake = weights_nbytes(worker.runner.utility.modules()), resident()
worker.sleep(int(sys.argv[2]))
asleep = resident()
worker.wake_up()
again = resident()
print(json.dumps({"weights": weights, "awake": awake, "asleep": asleep, "again": again,
                  "same": torch.equal(before, generate(worker))}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 130 MB of float32 weights, so that they can be seen."""
    llm = LanguageConfig(
        hidden_size=768,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=288,
    )
    config = msgspec.structs.replace(tiny_config(), llm=llm)
    return make_tiny_checkpoint(tmp_path_factory.mktemp("large"), config=config)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_returns_the_weights_memory(checkpoint: Path, level: int) -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint), str(level), root],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["weights"] > 100 << 20
    assert found["awake"] - found["asleep"] >= 0.9 * found["weights"], found
    assert found["again"] - found["asleep"] >= 0.9 * found["weights"], found
    assert found["same"]
