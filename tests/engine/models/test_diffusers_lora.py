"""LoRA adapters on a real pipeline of diffusers: images are those of PEFT and of diffusers."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import SchemaError
from omni_kvlink.engine import (
    DiffusionEngine,
    EngineAsleepError,
    EngineError,
    LoRAConfig,
    LoRARequest,
)
from support.engine.diffusers_requests import (
    EXAMPLE,
    WAIT,
    alone,
    config,
    executor,
    request,
    result,
    run,
)
from support.engine.fixtures import close_to

peft = pytest.importorskip("peft", reason="`make test-diffusers` installs it")
diffusers = pytest.importorskip("diffusers", reason="`make test-diffusers` installs it")

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "proj_out"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    return str(runpy.run_path(str(EXAMPLE))["make_tiny_pipeline"](directory))


def load(checkpoint: str) -> Any:
    loaded = diffusers.DiffusionPipeline.from_pretrained(checkpoint, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def make(checkpoint: str, directory: Path, number: int, **fields: Any) -> LoRARequest:
    """Let PEFT write an adapter of random matrices for the pipeline's transformer."""
    how = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **fields}
    made = peft.get_peft_model(load(checkpoint).transformer, peft.LoraConfig(**how))
    torch.manual_seed(number)
    for name, tensor in made.named_parameters():
        if "lora_" in name:
            tensor.data = torch.randn(tensor.shape) * 0.2
    made.save_pretrained(directory / str(number))
    return LoRARequest(f"style-{number}", number, str(directory / str(number)))


@pytest.fixture(scope="module")
def adapters(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    directory = tmp_path_factory.mktemp("adapters")
    patterns = {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_k": 32}, "use_rslora": True}
    return [make(checkpoint, directory, 1), make(checkpoint, directory, 2, **patterns)]


@pytest.fixture
def shared(checkpoint: str) -> Iterator[Any]:
    made = executor(checkpoint, max_num_seqs=4)
    yield made
    made.shutdown()


@pytest.mark.parametrize("number", [0, 1])
def test_an_image_is_that_of_peft(
    checkpoint: str, adapters: list[LoRARequest], shared: Any, number: int
) -> None:
    lora, pipe = adapters[number], load(checkpoint)
    base = alone(pipe, "a fox", 0)
    assert torch.equal(result(shared, request("a")), base)
    peft.PeftModel.from_pretrained(pipe.transformer, lora.lora_path).eval()
    expected = alone(pipe, "a fox", 0)
    assert not close_to(expected, base)
    assert torch.equal(result(shared, request("b", lora_request=lora)), expected)
    assert torch.equal(result(shared, request("c")), base)


def test_each_layer_computes_what_it_computes_in_peft(
    checkpoint: str, adapters: list[LoRARequest], shared: Any
) -> None:
    pipe, own = load(checkpoint), shared.pipeline.pipe.transformer
    peft.PeftModel.from_pretrained(pipe.transformer, adapters[1].lora_path).eval()
    result(shared, request("a", lora_request=adapters[1]))
    changed = 0
    for name, layer in own.named_modules():
        if isinstance(layer, torch.nn.Linear):
            theirs = pipe.transformer.get_submodule(name)
            x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
            expected = theirs(x)
            assert (layer(x) - expected).abs().max() <= 1e-6 * expected.abs().max()
            changed += hasattr(theirs, "lora_A")
    assert changed > 10


def test_a_scale_is_that_of_diffusers(
    checkpoint: str, adapters: list[LoRARequest], shared: Any
) -> None:
    """`load_lora_adapter` and `set_adapters` of diffusers, with the same files."""
    from safetensors.torch import load_file

    pipe, lora = load(checkpoint), adapters[0]
    saved = load_file(Path(lora.lora_path) / "adapter_model.safetensors")
    weights = {name.removeprefix("base_model.model."): one for name, one in saved.items()}
    how = peft.LoraConfig.from_pretrained(lora.lora_path).to_dict()
    pipe.transformer.load_lora_adapter(weights, prefix=None, adapter_name="own", metadata=how)
    for scale in (0.5, -1.0):
        pipe.transformer.set_adapters(["own"], [scale])
        image = result(shared, request("a", lora_request=lora, lora_scale=scale))
        assert torch.equal(image, alone(pipe, "a fox", 0))


def test_requests_of_one_adapter_share_a_call(checkpoint: str, adapters: list[LoRARequest]) -> None:
    """Others do not; each image is that of its request alone."""
    how = {"max_num_seqs": 4, "lora_config": LoRAConfig(max_loras=2)}
    loras = [adapters[0], adapters[0], None, adapters[1]]
    batch = [request(f"r{at}", seed=at, lora_request=one) for at, one in enumerate(loras)]
    with DiffusionEngine(config(checkpoint, **how, request_batch_max_wait_ms=WAIT * 1e3)) as engine:
        outputs = engine.generate(batch, timeout=WAIT)
        assert engine.stats()["steps"] == 3
        assert engine.list_loras() == [1, 2]
        for at, (one, output) in enumerate(zip(loras, outputs, strict=True)):
            pipe = load(checkpoint)
            if one is not None:
                peft.PeftModel.from_pretrained(pipe.transformer, one.lora_path).eval()
            assert close_to(output.result()[0], alone(pipe, "a fox", at))


def test_an_adapter_that_does_not_fit_is_an_error_of_its_requests(
    checkpoint: str, adapters: list[LoRARequest], shared: Any, tmp_path: Path
) -> None:
    base = alone(load(checkpoint), "a fox", 0)
    conv = make(checkpoint, tmp_path, 5, target_modules=["pos_embed.proj"])
    with_bias = make(checkpoint, tmp_path, 6, bias="all")
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"lora_request": conv}, SchemaError, "that of no linear layer"),
        ({"lora_request": with_bias}, SchemaError, "bias 'all' is not supported"),
        ({"lora_request": LoRARequest("x", 9, str(tmp_path / "x"))}, EngineError, "cannot be read"),
        ({"lora_int_id": 77}, EngineError, "lora_int_id 77 is not loaded"),
        ({"lora_scale": 0.3}, SchemaError, "without a lora_request"),
    ]
    for params, kind, text in wrong:
        with pytest.raises(kind, match=text):
            run(shared, request("a", **params))[0].result()
        assert torch.equal(result(shared, request("b")), base)
    assert shared.list_loras() == []


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_sleep_and_wake_with_the_pipeline(
    checkpoint: str, adapters: list[LoRARequest], level: int, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(adapters[0].lora_path, copied)
    lora = LoRARequest("copied", 1, str(copied))
    made = executor(checkpoint)
    image = result(made, request("a", lora_request=lora))
    assert made.sleep(level)
    with pytest.raises(EngineAsleepError):
        made.add_lora(adapters[1])
    if level == 1:
        shutil.rmtree(copied)
    assert made.wake_up()
    assert torch.equal(result(made, request("b", lora_int_id=1)), image)
    assert torch.equal(result(made, request("c")), alone(load(checkpoint), "a fox", 0))
    assert made.remove_lora(1)
    assert not made.pin_lora(1)
    made.shutdown()
