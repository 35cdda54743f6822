"""LoRA adapters in BAGEL's stages: images and texts are those of a model with merged weights."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import SchemaError
from omni_kvlink.engine import (
    AREngine,
    CompilationConfig,
    DiffusionEngine,
    EngineError,
    KVConfig,
    LoRAConfig,
    LoRARequest,
    OmniARConfig,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
)
from omni_kvlink.models.bagel import DenoiseParams
from support.engine.fixtures import (
    SHAPE,
    STEPS,
    WAIT,
    alone,
    checkpoint,
    close_to,
    params,
    pipeline,
    request,
    url,
)
from support.engine.lora_adapters import (
    bagel_adapter,
    bagel_shapes,
    make_matrices,
    merged,
    write_adapter,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline

TOKENS, TWO = 12, LoRAConfig(max_loras=2)
PROMPTS = ("a fox", "two owls in the rain", "the sea")


def image_of(model: OmniBagelPipeline, text: str = "a fox", **how: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    steps = DenoiseParams(**{**vars(DenoiseParams.for_text_to_image()), "num_timesteps": STEPS})
    image = model.generate(text, steps, generator=generator, image_shape=SHAPE, **how)
    model.release_caches()
    return image


@contextmanager
def one_stage(**fields: Any) -> Iterator[Any]:
    """Both halves of the model in this process."""
    with DiffusionEngine(
        OmniDiffusionConfig(checkpoint(), stage="all", dtype="float32", **fields)
    ) as engine:
        yield engine


@contextmanager
def two_stages(
    sockets: str, lora_config: LoRAConfig = TWO, **fields: Any
) -> Iterator[tuple[Any, Any]]:
    """An AR stage that writes texts, and a diffusion stage, in this process."""
    how: dict[str, Any] = {"dtype": "float32", "lora_config": lora_config}
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    ar_fields = {"max_num_seqs": 4, "num_blocks": 4096, "think": True, **fields}
    with AREngine(OmniARConfig(checkpoint(), kv=kv, **how, **ar_fields)) as ar:
        kv = KVConfig(sources=ar.sink_urls, source_options={"directory": sockets}, timeout=WAIT)
        with DiffusionEngine(OmniDiffusionConfig(checkpoint(), kv=kv, **how)) as dit:
            yield ar, dit


def prompt(name: str, text: str = "a fox", **fields: Any) -> OmniDiffusionRequest:
    own = {"max_tokens": TOKENS, "temperature": 0.0, **fields}
    return OmniDiffusionRequest(text, params(**own), name, need_kv_transfer=True)


def run(engine: Any, name: str, **fields: Any) -> torch.Tensor:
    image: torch.Tensor = (
        engine.submit(request(name, need_kv_receive=engine.config.stage == "dit", **fields))
        .result(WAIT)
        .result()[0]
    )
    return image


@pytest.fixture
def lora(tmp_path: Path) -> LoRARequest:
    return bagel_adapter(tmp_path)


def test_an_image_is_that_of_merged_weights_and_the_model_is_as_before(
    tmp_path: Path, lora: LoRARequest
) -> None:
    with one_stage() as engine:
        before = run(engine, "a")
        image = run(engine, "b", lora_request=lora)
        assert close_to(image, image_of(merged(tmp_path, lora)))
        half = run(engine, "c", lora_request=lora, lora_scale=0.5)
        assert close_to(half, image_of(merged(tmp_path, lora, 0.5)))
        assert not close_to(image, half)
        assert before.equal(alone())
        assert not close_to(image, before)
        assert run(engine, "d").equal(before)
        assert run(engine, "e", lora_request=lora).equal(image)
        assert run(engine, "f", lora_request=lora, lora_scale=0.0).equal(before)


def test_an_adapter_acts_on_compiled_layers(lora: LoRARequest) -> None:
    """Compiled before the adapter is there, and used again after it."""
    traced = CompilationConfig(backend="eager")
    with one_stage() as engine:
        expected = run(engine, "a", lora_request=lora)
    torch._dynamo.reset()
    with one_stage(enforce_eager=False, compilation_config=traced) as engine:
        before = run(engine, "a")
        assert close_to(before, alone())
        assert close_to(run(engine, "b", lora_request=lora), expected)
        assert run(engine, "c").equal(before)
    assert not close_to(before, expected)
    torch._dynamo.reset()


def test_texts_of_two_adapters_are_written_side_by_side(sockets: str, tmp_path: Path) -> None:
    """One pass of each adapter in every step; texts and images are those of each request alone."""
    lora, other = bagel_adapter(tmp_path, 7), bagel_adapter(tmp_path, 8)  # their texts are long
    with two_stages(sockets) as (ar, dit):
        manager = ar.executor.worker.runner.lora_manager
        utility = ar.executor.worker.runner.utility
        advance, passes = utility.advance, list[tuple[Any, int]]()

        def recorded(texts: list[Any]) -> Any:
            active = manager.active
            passes.append((active and active.adapter.request.lora_int_id, len(texts)))
            return advance(texts)

        utility.advance = recorded
        adapters: list[LoRARequest | None] = [lora, None, other, lora]
        batch = [
            prompt(str(at), PROMPTS[at % 3], lora_request=one) for at, one in enumerate(adapters)
        ]
        outputs = ar.generate(batch, timeout=WAIT)
        models: dict[Any, Any] = {one: merged(tmp_path, one) for one in (lora, other)}
        models[None] = pipeline()
        for at, (one, output) in enumerate(zip(adapters, outputs, strict=True)):
            assert output.error is None
            model, text = models[one], PROMPTS[at % 3]
            image = run(dit, str(at), prompt=text, lora_request=one)
            assert close_to(image, image_of(model, text, think=True, max_think_tokens=TOKENS))
            assert output.text == thought(model, text)
        assert {(7, 2), (None, 1), (8, 1)} <= set(passes)


def thought(model: OmniBagelPipeline, text: str) -> str | None:
    generator = torch.Generator().manual_seed(0)
    contexts = model.prefill(
        text, think=True, image_shape=SHAPE, generator=generator, max_think_tokens=TOKENS
    )
    model.release_caches()
    return contexts.text


def test_as_many_adapters_run_together_as_are_held(
    sockets: str, tmp_path: Path, lora: LoRARequest
) -> None:
    other = bagel_adapter(tmp_path, 2)
    with two_stages(sockets, LoRAConfig(max_loras=1)) as (ar, _):
        manager = ar.executor.worker.runner.lora_manager
        together = list[set[Any]]()
        steps = type(ar.executor.worker).execute_model

        def recorded(output: Any) -> Any:
            by_id = {one.request_id: one for one in batch}
            running = [by_id[key].sampling_params.lora_int_id for key in output.request_ids]
            together.append(set(running) - {None})
            return steps(ar.executor.worker, output)

        ar.executor.worker.execute_model = recorded
        adapters = [lora, lora, other, None]
        batch = [prompt(str(at), lora_request=one) for at, one in enumerate(adapters)]
        for output in ar.generate(batch, timeout=WAIT):
            assert output.error is None
            ar.fail_kv(output.request_id, "not needed")
        assert {1} in together
        assert max(map(len, together)) == 1
        assert manager.list_adapters() == [2]


def test_kv_of_another_adapter_is_refused(sockets: str, tmp_path: Path, lora: LoRARequest) -> None:
    """By name, number, scale, and by what its files say, even if the name is the same."""
    other = bagel_adapter(tmp_path, 2)
    twin = write_adapter(tmp_path / "b" / "style-1", make_matrices(bagel_shapes(), seed=9))
    with two_stages(sockets, LoRAConfig(max_loras=4), think=False) as (ar, dit):
        sent: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({"lora_request": lora}, {}, r"with adapter 'style-1' \(id 1, scale 1.0.* no LoRA"),
            ({}, {"lora_request": lora}, r"with no LoRA adapter.* 'style-1' \(id 1"),
            ({"lora_request": lora}, {"lora_request": other}, "'style-1'.*'style-2'"),
            ({"lora_request": lora}, {"lora_request": lora, "lora_scale": 0.5}, "scale 0.5"),
        ]
        for at, (first, second, text) in enumerate(sent):
            ar.generate([prompt(str(at), **first)], timeout=WAIT)[0]
            with pytest.raises(SchemaError, match=f"(?s){text}"):
                run(dit, str(at), **second)
        assert dit.remove_lora(1)
        assert dit.add_lora(twin)
        for name, one in (("r", lora), ("s", None)):
            assert ar.generate([prompt(name, lora_request=one)], timeout=WAIT)[0].error is None
        with pytest.raises(SchemaError, match="SHA-256"):
            run(dit, "r", lora_int_id=1)
        assert run(dit, "s").equal(alone())


def test_a_missing_or_damaged_adapter_is_an_error_of_its_requests(
    sockets: str, tmp_path: Path, lora: LoRARequest
) -> None:
    missing = LoRARequest("gone", 7, str(tmp_path / "gone"))
    damaged = bagel_adapter(tmp_path, 8)
    file = Path(damaged.lora_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with two_stages(sockets) as (ar, dit):
        batch = [
            prompt(str(at), lora_request=one)
            for at, one in enumerate((lora, missing, damaged, None))
        ]
        outputs = ar.generate(batch, timeout=WAIT)
        assert [output.error is None for output in outputs] == [True, False, False, True]
        with pytest.raises(EngineError, match=r"gone: adapter_config.json cannot be read"):
            outputs[1].result()
        with pytest.raises(SchemaError, match="damaged"):
            outputs[2].result()
        futures = {
            str(at): dit.submit(request(str(at), lora_request=one))
            for at, one in ((0, lora), (3, missing))
        }
        assert futures["0"].result(WAIT).error is None
        with pytest.raises(EngineError, match="gone"):
            futures["3"].result(WAIT).result()
        assert ar.stats()["free_blocks"] == 4096


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_sleep_and_wake_with_the_model(
    tmp_path: Path, lora: LoRARequest, level: int
) -> None:
    with one_stage(lora_config=LoRAConfig(max_loras=2)) as engine:
        image, other = run(engine, "a", lora_request=lora), bagel_adapter(tmp_path, 2)
        second = run(engine, "b", lora_request=other)
        adapter = engine.executor.worker.runner.lora_manager.modules()["lora:1"]
        assert engine.sleep(level)
        assert not sum(tensor.numel() for tensor in adapter.parameters()) or level == 2
        with pytest.raises(EngineError, match="asleep"):
            engine.add_lora(other)
        shutil.rmtree(other.lora_path)
        assert engine.wake_up()
        assert run(engine, "c", lora_int_id=1).equal(image)
        assert engine.list_loras() == ([1, 2] if level == 1 else [1])
        if level == 1:
            assert run(engine, "d", lora_request=other).equal(second)
        else:
            with pytest.raises(EngineError, match="style-2"):
                run(engine, "d", lora_request=other)
        assert run(engine, "e").equal(alone())


def test_calls_of_an_engine(tmp_path: Path, lora: LoRARequest) -> None:
    two, three = bagel_adapter(tmp_path, 2), bagel_adapter(tmp_path, 3)
    with one_stage(lora_config=LoRAConfig(max_loras=2)) as engine:
        assert engine.add_lora(lora)
        assert not engine.add_lora(lora)
        image = run(engine, "a", lora_int_id=1)
        assert engine.pin_lora(1)
        assert not engine.pin_lora(9)
        for one in (two, three):
            assert engine.add_lora(one)
        assert engine.list_loras() == [1, 3]
        with pytest.raises(EngineError, match="lora_int_id 2 is not loaded here"):
            run(engine, "b", lora_int_id=2)
        assert engine.pin_lora(3)
        with pytest.raises(EngineError, match="all 2 adapters are pinned"):
            run(engine, "c", lora_request=two)
        with pytest.raises(EngineError, match="lora_int_id 1 is 'style-1'"):
            engine.add_lora(LoRARequest("another", 1, two.lora_path))
        assert run(engine, "d", lora_request=lora).equal(image)
        assert engine.remove_lora(1)
        assert not engine.remove_lora(1)
        assert engine.list_loras() == [3]
        assert run(engine, "e").equal(alone())
        engine.restart()
        assert engine.list_loras() == []
        assert run(engine, "f", lora_request=lora).equal(image)


def test_the_stages_own_adapter(tmp_path: Path, lora: LoRARequest) -> None:
    """It acts on requests that name none, and makes place for none of theirs."""
    other = bagel_adapter(tmp_path, 2)
    own = LoRAConfig(lora_path=lora.lora_path, lora_scale=0.5)
    with one_stage(lora_config=own) as engine:
        image = run(engine, "a")
        assert close_to(image, image_of(merged(tmp_path, lora, 0.5)))
        assert not run(engine, "b", lora_request=other).equal(image)
        assert run(engine, "c").equal(image)
        assert len(engine.list_loras()) == 2
        with pytest.raises(SchemaError, match=r"lora_scale 0\.7 without a lora_request"):
            run(engine, "d", lora_scale=0.7)
        with pytest.raises(EngineError, match="the stage's own"):
            engine.remove_lora(max(engine.list_loras()))
    with one_stage(lora_config=LoRAConfig(enable_lora=False)) as engine:
        with pytest.raises(EngineError, match="enable_lora: false"):
            run(engine, "a", lora_request=lora)
        assert run(engine, "b").equal(alone())
