"""`quantization`: int8 weights, compared with plain arithmetic of torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from omni_kvlink.engine import DiffusionEngine, DiffusionParallelConfig
from omni_kvlink.engine.config import CompilationConfig
from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.engine.worker.offload import weights_nbytes
from omni_kvlink.errors import UnavailableError
from omni_kvlink.models.bagel import DenoiseParams
from support.engine.fixtures import (
    STEPS,
    WAIT,
    alone,
    checkpoint,
    close_to,
    config,
    pipeline,
    request,
)
from support.engine.lora_adapters import bagel_adapter, merged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("torchao", reason="`make test-torchao` installs it")

INT8: dict[str, Any] = {"stage": "all", "quantization": "int8_weight_only"}


@pytest.fixture
def worker() -> Iterator[GPUDiffusionWorker]:
    made = GPUDiffusionWorker(0, 0, config(None, **INT8))
    made.init_device()
    yield made
    made.shutdown()


def image_of(worker: GPUDiffusionWorker) -> torch.Tensor:
    own = request("r", need_kv_receive=False)
    worker.runner.utility.prepare(own)
    (output,) = worker.execute_model([own]).runner_outputs
    return output.result.result()[0]


def rounded() -> OmniBagelPipeline:
    """The model with weights rounded to int8, in steps of their row's largest value / 127.5."""
    made = OmniBagelPipeline.from_pretrained(checkpoint(), dtype=torch.float32)
    for layer in made.model.language_model.model.own_layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.detach().abs().amax(1, keepdim=True) / 127.5
                steps = (module.weight.detach() / scale).round().clamp(-128, 127)
                module.weight.data = steps * scale
    return made


def expected(model: OmniBagelPipeline | None = None) -> torch.Tensor:
    """The image of rounded weights, or of another model."""
    return (model or rounded()).generate(
        "a fox",
        DenoiseParams(num_timesteps=STEPS),
        generator=torch.Generator().manual_seed(0),
        image_shape=alone().shape[:2],
    )


def layers_nbytes(worker: GPUDiffusionWorker) -> int:
    layers = worker.runner.utility.layers()
    return weights_nbytes({str(number): layer for number, layer in enumerate(layers)})


def test_the_image_is_that_of_rounded_weights(worker: GPUDiffusionWorker) -> None:
    """A quarter of the memory: a byte for each value of float32, and a scale for each row."""
    image = image_of(worker)
    assert close_to(image, expected())
    assert not close_to(image, alone())
    whole = GPUDiffusionWorker(0, 0, config(None, stage="all"))
    whole.init_device()
    assert 0.25 < layers_nbytes(worker) / layers_nbytes(whole) < 0.3
    whole.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(worker: GPUDiffusionWorker, level: int) -> None:
    before, nbytes = image_of(worker), layers_nbytes(worker)
    assert worker.sleep(level)
    assert layers_nbytes(worker) < nbytes / 10
    assert worker.wake_up()
    assert layers_nbytes(worker) == nbytes
    assert image_of(worker).equal(before)


def test_compiled_layers() -> None:
    compiler = CompilationConfig(backend="aot_eager")
    how = config(None, **INT8, enforce_eager=False, compilation_config=compiler)
    made = GPUDiffusionWorker(0, 0, how)
    made.init_device()
    made.compile_or_warm_up_model()
    assert close_to(image_of(made), expected())
    made.shutdown()


def linears(model: OmniBagelPipeline) -> list[nn.Linear]:
    modules = model.model.language_model.modules()
    return [module for module in modules if isinstance(module, nn.Linear)]


def test_an_adapter_is_not_rounded(tmp_path: Path) -> None:
    """Its product is added to that of the rounded weights, which are as before without it."""
    lora, model = bagel_adapter(tmp_path), rounded()
    (tmp_path / "whole").mkdir()
    added = zip(linears(merged(tmp_path, lora)), linears(pipeline()), strict=True)
    for module, (own, base) in zip(linears(model), added, strict=True):
        module.weight.data += own.weight.data - base.weight.data
    with DiffusionEngine(config(None, **INT8)) as engine:
        batch = [
            request(name, need_kv_receive=False, lora_request=one)
            for name, one in (("a", None), ("b", lora), ("c", None))
        ]
        images = [engine.submit(one).result(WAIT).result()[0] for one in batch]
    assert close_to(images[1], expected(model))
    assert not close_to(images[1], expected(merged(tmp_path / "whole", lora)))
    assert close_to(images[0], expected())
    assert images[2].equal(images[0])


def test_two_tensor_ranks() -> None:
    """Each rank has the scales of its own part of a row."""
    parallel = DiffusionParallelConfig(tensor_parallel_size=2)
    with DiffusionEngine(config(None, **INT8, parallel_config=parallel)) as engine:
        output = engine.submit(request("r", need_kv_receive=False)).result(WAIT)
    apart = (output.result()[0].int() - alone().int()).abs().max()
    assert 1 < apart < 6  # quantized, and no other image


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UnavailableError, match=r"pip install 'omni-kvlink\[quantization\]'"):
        GPUDiffusionWorker(0, 0, config(None, **INT8)).init_device()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"quantization": "int8"}, "quantization='int8': wanted '' or 'int8_weight_only'"),
        ({**INT8, "enable_cpu_offload": True}, "choose one of them"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        config(None, **fields)
