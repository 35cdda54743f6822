"""Dtypes of a stage: of its weights, its received KV and its autoencoder."""

from __future__ import annotations

import pytest
import torch

from omni_kvlink.engine import (
    DiffusionEngine,
    KVConfig,
    OmniARConfig,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
)
from omni_kvlink.engine.worker import GPUARWorker, GPUDiffusionWorker
from omni_kvlink.models.bagel import DenoiseParams
from support.engine.fixtures import (
    SHAPE,
    STEPS,
    WAIT,
    bundle,
    checkpoint,
    config,
    link,
    params,
    pipeline,
    request,
    url,
)


def test_float16_from_stage_to_stage(sockets: str) -> None:
    """K and V arrive in float16, bit for bit: the image is that of one process."""
    with link(sockets) as source:
        how = config(source, sockets, dtype="float16")
        with DiffusionEngine(how) as engine:
            source.put(bundle("r", dtype=torch.float16))
            (output,) = engine.generate([request("r")], timeout=WAIT)
    expected = pipeline(torch.float16).generate(
        "a fox",
        DenoiseParams(num_timesteps=STEPS),
        generator=torch.Generator().manual_seed(0),
        image_shape=SHAPE,
    )
    assert output.result()[0].equal(expected)


def test_an_ar_stage_has_blocks_of_its_dtype(sockets: str) -> None:
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    worker = GPUARWorker(0, 0, OmniARConfig(checkpoint(), kv=kv, dtype="float16", num_blocks=4))
    worker.init_device()
    assert worker.runner.pools.dtype == torch.float16
    worker.shutdown()


@pytest.mark.parametrize("vae_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", [1, 2])
def test_the_autoencoder_wakes_up_in_its_dtype(level: int, vae_dtype: str) -> None:
    how = OmniDiffusionConfig(checkpoint(), stage="all", vae_dtype=vae_dtype)
    worker = GPUDiffusionWorker(0, 0, how)
    worker.init_device()

    def image() -> torch.Tensor:
        (output,) = worker.execute_model(
            [OmniDiffusionRequest("a fox", params(), "r")]
        ).runner_outputs
        return output.result.result()

    before = image()
    worker.sleep(level)
    worker.wake_up()
    modules = worker.runner.utility.modules()
    dtypes = {tensor.dtype for tensor in modules["autoencoder"].parameters()}
    assert getattr(torch, vae_dtype) in dtypes
    assert dtypes <= {getattr(torch, vae_dtype), torch.float32}
    assert {tensor.dtype for tensor in modules["model"].parameters()} == {torch.bfloat16}
    assert image().equal(before)
    worker.shutdown()
