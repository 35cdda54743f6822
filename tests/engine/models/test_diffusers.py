"""A real pipeline of diffusers behind the engine: a tiny Stable Diffusion 3 of random weights."""

from __future__ import annotations

import gc
import runpy
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.engine.diffusers_requests import (
    EXAMPLE,
    SIZE,
    WAIT,
    alone,
    config,
    executor,
    request,
    result,
    run,
)
from support.engine.fixtures import close_to

pytest.importorskip("diffusers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("transformers", reason="needs `pip install 'omni-kvlink[diffusers]'`")

from diffusers import DDIMScheduler, DiffusionPipeline, DiTPipeline, StableDiffusion3Pipeline

from omni_kvlink import SchemaError
from omni_kvlink.engine import (
    DiffusionEngine,
    DiffusionParallelConfig,
    EngineAsleepError,
    EngineDeadError,
    EngineError,
    KVConfig,
    NoWorkersError,
    OmniDiffusion,
    RequestAborted,
    RequestFailed,
)
from omni_kvlink.engine.models.diffusers_executor import DiffusersPipelineExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    return str(runpy.run_path(str(EXAMPLE))["make_tiny_pipeline"](directory))


@pytest.fixture(scope="module")
def pipe(checkpoint: str) -> Any:
    """The pipeline itself: what everything is compared with."""
    loaded = DiffusionPipeline.from_pretrained(checkpoint, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def shared(checkpoint: str) -> Iterator[Any]:
    made = executor(checkpoint)
    yield made
    made.shutdown()


def test_requests_through_the_engine(checkpoint: str, pipe: Any) -> None:
    requests = [request(f"r{seed}", f"fox {'and ' * seed}", seed) for seed in range(6)]
    with DiffusionEngine(config(checkpoint)) as engine:
        outputs = engine.generate(requests, timeout=WAIT)
    for seed, output in enumerate(outputs):
        assert output.result().shape == (1, *SIZE, 3)
        assert torch.equal(output.result()[0], alone(pipe, f"fox {'and ' * seed}", seed))
        assert output.seconds["execute"] > 0


def test_a_batch_is_what_its_requests_are_alone(checkpoint: str, pipe: Any) -> None:
    calls = count_calls(made := executor(checkpoint, max_num_seqs=4))
    assert made.supports_request_batch
    prompts = ["a fox", "an owl, and a longer text", "", "a fox"]
    batch = run(made, *(request(str(n), prompt, seed=n) for n, prompt in enumerate(prompts)))
    assert calls == [4]
    for seed, (prompt, output) in enumerate(zip(prompts, batch, strict=True)):
        assert close_to(output.result()[0], alone(pipe, prompt, seed))
    assert not close_to(batch[0].result()[0], batch[3].result()[0])
    made.shutdown()


def count_calls(executor: Any) -> list[int]:
    """How many prompts each call of the pipeline had."""
    calls: list[int] = []

    class Counting(type(executor.pipeline.pipe)):  # type: ignore[misc]
        def __call__(self, prompt: Any, **how: Any) -> Any:
            calls.append(len(prompt))
            return super().__call__(prompt, **how)

    executor.pipeline.pipe.__class__ = Counting
    return calls


def test_several_images_of_one_request(shared: Any, pipe: Any) -> None:
    """Their noise is the same, whoever else is in the batch."""
    single = run(shared, request("a", seed=1, num_outputs_per_prompt=3))[0].result()
    params = {"num_outputs_per_prompt": 3}
    _, other = run(shared, request("b", "owl", 2, **params), request("a", seed=1, **params))
    assert single.shape == (3, *SIZE, 3)
    assert not close_to(single[0], single[1])
    assert close_to(single[0], alone(pipe, "a fox", 1))
    assert all(map(close_to, other.result(), single))


def test_a_generator_of_ones_own_is_not_consumed(shared: Any, pipe: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    images = [result(shared, request("a", seed=1, generator=generator)) for _ in range(2)]
    assert torch.equal(images[0], images[1])
    assert torch.equal(images[0], alone(pipe, "a fox", 7))


@pytest.mark.parametrize("need", ["need_kv_receive", "need_kv_transfer"])
def test_a_request_that_needs_kv_gets_no_image_without_it(
    checkpoint: str, shared: Any, need: str
) -> None:
    calls = count_calls(shared)
    other, refused = run(shared, request("other"), request("a", **{need: True}))
    assert calls == [1]
    assert other.output is not None
    assert refused.output is None
    with pytest.raises(EngineError, match="needs KV"):
        refused.result()
    with (
        DiffusionEngine(config(checkpoint)) as engine,
        pytest.raises(EngineError, match="needs KV"),
    ):
        engine.submit(request("a", **{need: True}))


@pytest.mark.parametrize(
    ("wrong", "kind", "word"),
    [
        ({"prompt": ["a", torch.zeros(4, 4, 3, dtype=torch.uint8)]}, SchemaError, "one text"),
        ({"prompt": torch.zeros(4, 4, 3, dtype=torch.uint8)}, SchemaError, "one text"),
        ({"height": 33}, RequestFailed, "divisible"),
        ({"cfg_renorm_type": "global"}, EngineError, "cfg_renorm_type"),
        ({"lora_int_id": 1}, EngineError, "lora_int_id 1 is not loaded here"),
    ],
)
def test_a_wrong_request_has_its_own_error(
    shared: Any, pipe: Any, wrong: Any, kind: type[Exception], word: str
) -> None:
    outputs = [run(shared, request("wrong", **wrong))[0], run(shared, request("right"))[0]]
    with pytest.raises(kind, match=word):
        outputs[0].result()
    assert torch.equal(outputs[1].result()[0], alone(pipe, "a fox", 0))


def test_an_error_in_a_batch_finds_its_owner(shared: Any, pipe: Any) -> None:
    """A batch that fails is run again one by one, from the same noise."""
    encode = shared.pipeline.pipe.encode_prompt

    def fail(prompt: Any, *args: Any, **how: Any) -> Any:
        if any("poison" in text for text in prompt):
            raise ZeroDivisionError("poison")
        return encode(prompt, *args, **how)

    shared.pipeline.pipe.encode_prompt = fail
    outputs = run(shared, request("a", seed=3), request("b", "poison"), request("c", "an owl"))
    del shared.pipeline.pipe.encode_prompt
    assert torch.equal(outputs[0].result()[0], alone(pipe, "a fox", 3))
    assert torch.equal(outputs[2].result()[0], alone(pipe, "an owl", 0))
    with pytest.raises(RequestFailed, match="poison") as caught:
        outputs[1].result()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_nan_is_no_image(checkpoint: str) -> None:
    made = executor(checkpoint)
    made.pipeline.pipe.vae.decoder.conv_out.bias.data.fill_(float("nan"))
    with pytest.raises(RequestFailed, match="NaN"):
        run(made, request("a"))[0].result()
    made.shutdown()


# ---- aborts


def after_step(executor: Any, step: int, act: Callable[[], None]) -> list[int]:
    """Act once a step is done; the steps that were computed."""
    scheduler, steps = executor.pipeline.pipe.scheduler, list[int]()
    compute = scheduler.step

    def counting(*args: Any, **how: Any) -> Any:
        steps.append(len(steps))
        if steps[-1] == step:
            act()
        return compute(*args, **how)

    scheduler.step = counting
    return steps


def test_an_aborted_request_ends_at_its_next_step(checkpoint: str, pipe: Any) -> None:
    made = executor(checkpoint)
    steps = after_step(made, 2, partial(made.abort, "a"))
    with pytest.raises(RequestAborted):
        run(made, request("a", num_inference_steps=50))[0].result()
    assert len(steps) == 3
    assert torch.equal(result(made, request("a")), alone(pipe, "a fox", 0))
    made.shutdown()


def test_an_aborted_request_changes_no_other_image(checkpoint: str, pipe: Any) -> None:
    made = executor(checkpoint)
    steps = after_step(made, 1, partial(made.abort, "a"))
    gone, stays = run(made, request("a"), request("b", seed=1))
    assert len(steps) == 3
    assert isinstance(gone.error, RequestAborted)
    assert close_to(stays.result()[0], alone(pipe, "a fox", 1))
    made.shutdown()


def test_abort_through_the_engine(checkpoint: str, pipe: Any) -> None:
    entered, may_continue = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert may_continue.wait(WAIT)

    with DiffusionEngine(config(checkpoint)) as engine:
        steps = after_step(engine.executor, 1, hold)
        future = engine.submit(request("a", num_inference_steps=50))
        assert entered.wait(WAIT)
        engine.abort("a")
        may_continue.set()
        with pytest.raises(RequestAborted):
            future.result(WAIT).result()
        assert len(steps) == 2
        after = engine.generate([request("b")], timeout=WAIT)[0]
    assert torch.equal(after.result()[0], alone(pipe, "a fox", 0))


# ---- life


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_weights_back(checkpoint: str, pipe: Any, level: int) -> None:
    with DiffusionEngine(config(checkpoint)) as engine:
        before = weights(engine.executor)
        assert engine.sleep(level)
        assert not engine.sleep(level)
        gc.collect()
        assert weights(engine.executor) <= before // 10
        with pytest.raises(EngineAsleepError):
            engine.generate([request("a")], timeout=WAIT)[0].result()
        assert engine.executor.sleeping_tags == {"weights"}
        assert not engine.wake_up(["kv_cache"])
        assert engine.wake_up()
        assert not engine.wake_up()
        image = engine.generate([request("b")], timeout=WAIT)[0].result()[0]
    assert torch.equal(image, alone(pipe, "a fox", 0))


def weights(executor: Any) -> int:
    """Bytes of the weights that the executor holds."""
    if executor.pipeline is None:
        return 0
    modules = executor.pipeline.modules().values()
    return sum(weight.nbytes for module in modules for weight in module.parameters())


def test_a_trace_of_the_pipeline(shared: Any, tmp_path: Path) -> None:
    assert shared.profile(str(tmp_path)) == []
    run(shared, request("a"))
    (path,) = shared.profile(None)
    assert "aten::scaled_dot_product_attention" in Path(path).read_text()
    with pytest.raises(EngineError, match="start_profile"):
        shared.profile(None)


def test_there_are_no_workers(shared: Any) -> None:
    with pytest.raises(NoWorkersError, match="without workers") as caught:
        shared.collective_rpc("sleep", args=(1,))
    assert isinstance(caught.value, EngineError)
    assert isinstance(caught.value, NotImplementedError)
    shared.initialize_from_config([])
    shared.check_health(timeout=0.0)


def test_health_and_shutdown(checkpoint: str) -> None:
    made = executor(checkpoint)
    made.check_health(timeout=1)
    assert made.determine_available_memory()[0] > 0
    made.shutdown()
    made.shutdown()
    with pytest.raises(EngineDeadError):
        made.check_health(timeout=1)
    with pytest.raises(EngineDeadError):
        run(made, request("a"))


# ---- settings


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"kv": KVConfig(sources=("shm://x",))}, "kv.sources"),
        ({"kv": KVConfig(sinks=("shm://x",))}, "kv.sinks"),
        ({"cache_backend": "tea"}, "cache_backend"),
        ({"vae_dtype": "float16"}, "vae_dtype"),
        ({"enforce_eager": False}, "enforce_eager: false"),
        ({"warmup_sizes": ((16, 16),)}, "warmup_sizes"),
        ({"enable_cpu_offload": True}, "enable_cpu_offload"),
        ({"enable_layerwise_offload": True}, "enable_layerwise_offload"),
        ({"parallel_config": DiffusionParallelConfig(data_parallel_size=2)}, "parallel_config"),
        ({"parallel_config": DiffusionParallelConfig(tensor_parallel_size=2)}, "parallel_config"),
    ],
)
def test_a_useless_setting_is_refused(checkpoint: str, fields: Any, word: str) -> None:
    with pytest.raises(EngineError, match=word):
        executor(checkpoint, **fields)


def test_a_directory_without_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model_index\.json"):
        executor(str(tmp_path))


def test_a_pipeline_without_a_prompt_is_refused(checkpoint: str, pipe: Any) -> None:
    DiTPipeline(pipe.transformer, pipe.vae, DDIMScheduler()).save_pretrained(
        other := Path(checkpoint).parent / "dit"
    )
    with pytest.raises(EngineError, match="prompt"):
        executor(str(other))


class OneByOne(StableDiffusion3Pipeline):  # type: ignore[misc] # diffusers may be absent
    """Takes one text, and knows one size."""

    def __call__(
        self,
        prompt: str,
        generator: torch.Generator,
        output_type: str,
        height: int = SIZE[0],
        width: int = SIZE[1],
        num_inference_steps: int = 3,
    ) -> Any:
        assert isinstance(prompt, str)
        how = {"num_inference_steps": num_inference_steps, "output_type": output_type}
        return super().__call__(prompt, generator=generator, height=SIZE[0], width=SIZE[1], **how)


class OneByOneExecutor(DiffusersPipelineExecutor):
    def load_pipeline(self) -> Any:
        return OneByOne(**DiffusionPipeline.from_pretrained(self.config.model).components)


def test_a_pipeline_of_ones_own_that_takes_no_lists(checkpoint: str, pipe: Any) -> None:
    name = f"{__name__}:OneByOneExecutor"
    made = executor(checkpoint, max_num_seqs=4, distributed_executor_backend=name)
    assert not made.supports_request_batch
    for seed, output in enumerate(run(made, request("a"), request("b", seed=1))):
        assert torch.equal(output.result()[0], alone(pipe, "a fox", seed))
    with pytest.raises(RequestFailed, match=r"makes \(32, 48\), not \(64, 64\)"):
        run(made, request("c", height=64, width=64))[0].result()
    with pytest.raises(EngineError, match="no guidance_scale"):
        run(made, request("d", guidance_scale=2.0))[0].result()
    made.shutdown()


class Video(StableDiffusion3Pipeline):  # type: ignore[misc] # diffusers may be absent
    gives = "latents"

    def __call__(self, prompt: str, generator: torch.Generator, output_type: str) -> Any:
        made = super().__call__(
            prompt, generator=generator, output_type=output_type, height=32, num_inference_steps=1
        )
        return SimpleNamespace(**{self.gives: made.images}, audio=made.images)


class VideoExecutor(DiffusersPipelineExecutor):
    def load_pipeline(self) -> Any:
        return Video(**DiffusionPipeline.from_pretrained(self.config.model).components)


def test_a_pipeline_that_makes_no_images(checkpoint: str) -> None:
    made = executor(checkpoint, distributed_executor_backend=f"{__name__}:VideoExecutor")
    open_sizes: dict[str, Any] = {"height": None, "width": None, "num_inference_steps": None}
    with pytest.raises(EngineError, match="Video gives no images and no frames"):
        run(made, request("a", **open_sizes))[0].result()
    made.pipeline.pipe.gives = "frames"
    with pytest.raises(EngineError, match="Video gives audio, too"):
        run(made, request("a", **open_sizes))[0].result()
    made.shutdown()


def test_a_deploy_file_names_it(checkpoint: str, pipe: Any) -> None:
    stage = {"stage_id": 0, "distributed_executor_backend": "diffusers"}
    how = {"pipeline": "bagel_single_stage", "stages": [stage]}
    params = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 3, "seed": 0}
    with OmniDiffusion(checkpoint, how, dtype="float32") as omni:
        images = omni.generate(["a fox"], params, timeout=WAIT, output_type="pt")
    assert torch.equal(images[0][0], alone(pipe, "a fox", 0))


def test_the_example_says_that_it_is_right(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--requests", "5", "--steps", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same seeds, same images: True" in done.stdout
    assert (tmp_path / "out" / "diffusers.png").exists()
