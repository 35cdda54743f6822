"""Compiled layers and warm-up: the same images, and nothing left to compile for a first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from omni_kvlink import SchemaError
from omni_kvlink.engine import (
    AREngine,
    CompilationConfig,
    DiffusionEngine,
    DiffusionParallelConfig,
    KVConfig,
    OmniARConfig,
)
from omni_kvlink.engine.executor.multiproc import MultiprocExecutor
from omni_kvlink.engine.outputs import DiffusionSchedulerOutput
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.models.bagel import BagelPipeline, DenoiseParams
from support.engine.fixtures import (
    SHAPE,
    WAIT,
    alone,
    bundle,
    checkpoint,
    config,
    link,
    request,
    url,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.models.bagel import BagelContexts

TRACED: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": CompilationConfig(backend="eager"),
}


def counters() -> Any:
    """Dynamo's; its import takes seconds, which no other test file shall wait for."""
    from torch._dynamo import utils

    return utils.counters


@pytest.fixture(autouse=True)
def compiled_code() -> Iterator[None]:
    """What a test compiles ends with it."""
    torch._dynamo.reset()
    counters().clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs that were compiled so far; none may be broken in two."""
    assert dict(counters()["graph_break"]) == {}
    return int(counters()["stats"]["unique_graphs"])


def own(name: str, **fields: Any) -> Any:
    return request(name, need_kv_receive=False, **fields)


def image_of(worker: GPUDiffusionWorker, *names: str) -> list[torch.Tensor]:
    outputs = worker.execute_model([own(name) for name in names]).runner_outputs
    return [output.result.result()[0] for output in outputs]


@pytest.mark.parametrize("offloads", [False, True])
def test_after_a_warm_up_requests_compile_nothing(offloads: bool) -> None:
    """One piece of code serves all layers, sizes and batches, also after a sleep."""
    how = {**TRACED, "enable_layerwise_offload": offloads}
    worker = GPUDiffusionWorker(
        0, 0, config(None, stage="all", warmup_sizes=((8, 16),), max_num_seqs=2, **how)
    )
    worker.init_device()
    assert worker.compile_or_warm_up_model() > 0
    # Before and after attention: of texts, and of latents alone and in a batch.
    assert graphs() == 6
    expected = alone()
    assert image_of(worker, "a")[0].equal(expected)
    for image in image_of(worker, "a", "b", "c"):
        assert (image.int() - expected.int()).abs().max() <= 1
    worker.sleep(1)
    worker.wake_up()
    assert image_of(worker, "a")[0].equal(expected)
    assert graphs() == 6
    worker.shutdown()


def test_a_stage_that_receives_warms_up_at_its_start(sockets: str) -> None:
    with link(sockets) as source:
        how = config(source, sockets, warmup_sizes=(SHAPE,), **TRACED)
        with DiffusionEngine(how) as engine:
            assert graphs() == 2
            source.put(bundle("r"))
            (output,) = engine.generate([request("r")], timeout=WAIT)
            assert output.result()[0].equal(alone())
        assert graphs() == 2


def test_an_ar_stage_warms_up_at_its_start(sockets: str) -> None:
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    how = OmniARConfig(
        checkpoint(), kv=kv, dtype="float32", think=True, max_num_seqs=2, warmup_sizes=(SHAPE,)
    )
    with AREngine(how) as engine:
        expected = engine.generate([own("a", max_tokens=4), own("b", max_tokens=5)], timeout=WAIT)
    with AREngine(OmniARConfig(**{**vars(how), **TRACED})) as engine:
        assert (before := graphs()) > 0
        found = engine.generate([own("a", max_tokens=4), own("b", max_tokens=5)], timeout=WAIT)
        assert graphs() == before
    assert [one.text for one in found] == [one.text for one in expected]


@pytest.mark.parametrize("size", [(10, 16), (16, 4096)])
def test_a_size_that_the_model_has_not_ends_the_start(size: tuple[int, int]) -> None:
    with pytest.raises(SchemaError, match="image_shape"):
        DiffusionEngine(config(None, stage="all", warmup_sizes=(size,)))


def test_a_warm_up_changes_no_image() -> None:
    with DiffusionEngine(config(None, stage="all", warmup_sizes=(SHAPE, (8, 8)))) as engine:
        assert graphs() == 0
        (output,) = engine.generate([own("r")], timeout=WAIT)
    assert output.result()[0].equal(alone())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, of inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_latents_are_those_of_eager_layers(backend: str) -> None:
    """In float32, up to rounding; the contexts are read by eager layers."""
    eager = BagelPipeline.from_pretrained(checkpoint(), dtype=torch.float32)
    compiled = BagelPipeline.from_pretrained(checkpoint(), dtype=torch.float32)
    compiled.model.compile_layers(**CompilationConfig.read({"backend": backend}).options())
    contexts: BagelContexts = eager.prefill("a fox", image_shape=SHAPE)
    noise = eager.initial_noise(SHAPE, torch.Generator().manual_seed(1))
    how = DenoiseParams(num_timesteps=4)
    expected, found = (one.denoise(contexts, noise, how) for one in (eager, compiled))
    assert graphs() == 2
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["SDPA_MATH", "SDPA_FLASH"])
def test_compiled_layers_attend_by_the_backend_that_is_set(name: str) -> None:
    how = config(None, stage="all", warmup_sizes=(SHAPE,), attention_backend=name, **TRACED)
    worker = GPUDiffusionWorker(0, 0, how)
    worker.init_device()
    worker.compile_or_warm_up_model()
    before = graphs()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        (image,) = image_of(worker, "a")
    kernel = {"SDPA_MATH": "attention_math", "SDPA_FLASH": "flash_attention_for_cpu"}[name]
    assert f"aten::_scaled_dot_product_{kernel}" in {one.key for one in recorded.key_averages()}
    assert (image.int() - alone().int()).abs().max() <= 1
    assert graphs() == before > 0
    worker.shutdown()


@pytest.mark.slow  # two processes, which import torch's compiler
def test_tensor_ranks_compile_around_their_sums() -> None:
    """Latents differ from those of one process by rounding, as without a compiler."""
    ranks = DiffusionParallelConfig(tensor_parallel_size=2)
    how = config(None, stage="all", parallel_config=ranks, warmup_sizes=(SHAPE,), **TRACED)
    executor = MultiprocExecutor(how)
    try:
        assert len(executor.compile_or_warm_up_model()) == 2
        batch = executor.execute_batch(DiffusionSchedulerOutput([own("r")]))
        image = batch.runner_outputs[0].result.result()[0]
    finally:
        executor.shutdown()
    assert (image.int() - alone().int()).abs().max() <= 1
