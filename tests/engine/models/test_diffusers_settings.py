"""Settings of a stage become diffusers' own calls, and a pipeline is what its name says."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.engine.diffusers_requests import EXAMPLE, WAIT, executor, levels, request, result, run
from support.engine.tiny_pipelines import make_tiny_wan
from support.engine.tiny_qwen_image import make_tiny_qwen_image

pytest.importorskip("diffusers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("transformers", reason="needs `pip install 'omni-kvlink[diffusers]'`")

from diffusers import AutoencoderKLQwenImage, DiffusionPipeline, QwenImagePipeline
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from omni_kvlink import UnavailableError
from omni_kvlink.engine import DiffusionEngine, Executor, OmniDiffusion
from omni_kvlink.engine import OmniDiffusionConfig as Config
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.models.diffusers_executor import DiffusersPipelineExecutor

if TYPE_CHECKING:
    from pathlib import Path

# Reaches into _attention_backend, _backends, _decode: diffusers has no public name for the kernel
# that a block runs, nor for how many images one pass of the decoder has.

LARGE = {"height": 272, "width": 272, "num_inference_steps": 1}  # more than one tile
SMALL = {"height": 32, "width": 48, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_qwen_image(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture
def pipe(checkpoint: str) -> Any:
    """A pipeline for this test alone."""
    loaded = DiffusionPipeline.from_pretrained(checkpoint, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def own(pipe: Any, **how: Any) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return levels(pipe(prompt="a fox", generator=random, output_type="np", **how))


def images(checkpoint: str, fields: Any = None, **how: Any) -> torch.Tensor:
    """What an executor with these fields gives."""
    made = executor(checkpoint, **(fields or {}))
    found: torch.Tensor = run(made, request("a", **how))[0].result()
    made.shutdown()
    return found


# ---- the autoencoder


def test_an_image_is_decoded_in_tiles(checkpoint: str, pipe: Any) -> None:
    whole = own(pipe, **LARGE)
    pipe.vae.enable_tiling()
    tiled = own(pipe, **LARGE)
    assert not torch.equal(whole, tiled)
    assert torch.equal(images(checkpoint, {"vae_use_tiling": True}, **LARGE), tiled)
    assert torch.equal(images(checkpoint, **LARGE), whole)


def test_images_are_decoded_one_by_one(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, decode = list[int](), AutoencoderKLQwenImage._decode

    def counting(self: Any, latents: torch.Tensor, **how: Any) -> Any:
        sizes.append(len(latents))
        return decode(self, latents, **how)

    monkeypatch.setattr(AutoencoderKLQwenImage, "_decode", counting)
    images(checkpoint, num_outputs_per_prompt=3, **SMALL)
    images(checkpoint, {"vae_use_slicing": True}, num_outputs_per_prompt=3, **SMALL)
    assert sizes == [3, 1, 1, 1]


class Whole(AutoencoderKLQwenImage):  # type: ignore[misc] # diffusers may be absent
    def enable_tiling(self, *_: object) -> None:
        raise NotImplementedError("Tiling doesn't seem to be implemented for Whole.")


class WithoutTiles(DiffusersPipelineExecutor):
    def load_pipeline(self) -> Any:
        parts = DiffusionPipeline.from_pretrained(self.config.model).components
        parts["vae"].__class__ = Whole
        return QwenImagePipeline(**parts)


def test_an_autoencoder_that_cannot_is_an_error(checkpoint: str) -> None:
    name = f"{__name__}:WithoutTiles"
    with pytest.raises(EngineError, match="vae_use_tiling: the autoencoder of QwenImagePipeline"):
        executor(checkpoint, vae_use_tiling=True, distributed_executor_backend=name)


def test_offload_needs_a_gpu(checkpoint: str) -> None:
    with pytest.raises(EngineError, match="enable_cpu_offload: the stage runs on the CPU"):
        executor(checkpoint, enable_cpu_offload=True, device="cpu")


# ---- attention


@pytest.mark.parametrize(
    ("given", "name"),
    [("TORCH_SDPA", "native"), ("native", "native"), ("_native_math", "_native_math")],
)
def test_the_attention_backend_is_set(
    checkpoint: str, pipe: Any, given: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one of other pipelines stays as it was."""
    used, table = [], _AttentionBackendRegistry._backends
    key = next(each for each in table if each.value == name)
    attend = table[key]

    def counting(*args: Any, **how: Any) -> Any:
        used.append(name)
        return attend(*args, **how)

    before = _AttentionBackendRegistry.get_active_backend()[0]
    made = executor(checkpoint, attention_backend=given)
    assert _AttentionBackendRegistry.get_active_backend()[0] == before
    monkeypatch.setitem(table, key, counting)
    image = result(made, request("a", **SMALL))
    assert used
    made.shutdown()
    pipe.transformer.set_attention_backend(name)
    monkeypatch.undo()
    expected = own(pipe, **SMALL)[0]
    _AttentionBackendRegistry.set_active_backend(before)
    assert torch.equal(image, expected)


def test_both_transformers_of_wan_have_it(tmp_path: Path) -> None:
    made = executor(make_tiny_wan(tmp_path, two=True), attention_backend="_native_math")
    pipe = made.pipeline.pipe
    for network in (pipe.transformer, pipe.transformer_2):
        found = {block.attn1.processor._attention_backend.value for block in network.blocks}
        assert found == {"_native_math"}
    made.shutdown()


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [
        ("FLASH_ATTN", UnavailableError, "'FLASH_ATTN': .*pip install flash-attn"),
        ("SAGE_ATTN", UnavailableError, "'SAGE_ATTN': .*pip install sageattention"),
        ("_sage_qk_int8_pv_fp16_triton", UnavailableError, "pip install sageattention"),
        ("xformers", UnavailableError, "pip install xformers"),
        ("flash_hub", EngineError, "'flash_hub': diffusers downloads it"),
        ("STA", EngineError, "'STA': there are auto, TORCH_SDPA, .*native"),
    ],
)
def test_a_backend_that_is_not_here(
    checkpoint: str, name: str, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        executor(checkpoint, attention_backend=name)


def test_attention_past_diffusers_dispatcher_is_an_error(tmp_path: Path) -> None:
    """Stable Diffusion 3 calls torch itself: the setting would have no effect."""
    directory = runpy.run_path(str(EXAMPLE))["make_tiny_pipeline"](tmp_path)
    with pytest.raises(EngineError, match="SD3Transformer2DModel does not go through"):
        executor(str(directory), attention_backend="native")


# ---- by name


@pytest.mark.parametrize("name", ["QwenImagePipeline", f"{__name__}:WithoutTiles"])
def test_a_class_name_chooses_the_executor(checkpoint: str, pipe: Any, name: str) -> None:
    how: dict[str, Any] = {"model_class_name": "QwenImagePipeline", "dtype": "float32"}
    if ":" in name:
        how["distributed_executor_backend"] = name
    found = Config(checkpoint, **how)
    assert issubclass(Executor.get_class(found), DiffusersPipelineExecutor)
    with DiffusionEngine(found) as engine:
        (output,) = engine.generate([request("a", **SMALL)], timeout=WAIT)
    assert torch.equal(output.result(), own(pipe, **SMALL))


@pytest.mark.parametrize("name", ["WanPipeline", "Wan22Pipeline", "FluxPipeline"])
@pytest.mark.parametrize("backend", ["diffusers", f"{__name__}:WithoutTiles"])
def test_another_class_than_its_name_is_an_error(checkpoint: str, name: str, backend: str) -> None:
    """Also of a pipeline that is loaded from elsewhere."""
    with pytest.raises(
        EngineError, match=f"has a QwenImagePipeline, and model_class_name is {name}"
    ):
        executor(checkpoint, model_class_name=name, distributed_executor_backend=backend)


def test_a_deploy_file_of_wan(wan: str, tmp_path: Path) -> None:
    """As vLLM-Omni's, in a process of its own; the video is diffusers' own."""
    file = tmp_path / "wan2_2_ti2v.yaml"
    file.write_text(
        "distributed_executor_backend: mp\n"
        "stages: [{stage_id: 0, max_num_seqs: 4, vae_use_tiling: true, num_threads: 1,"
        " final_output_type: video, default_sampling_params: {seed: 42}}]\n"
    )
    video = {**SMALL, "num_frames": 5}
    with OmniDiffusion(wan, file, dtype="float32") as omni:
        (found,) = omni.generate(["a fox"], video, timeout=WAIT, output_type="pt")
        (frames,) = omni.generate(["a fox"], video, timeout=WAIT)
    loaded = DiffusionPipeline.from_pretrained(wan, local_files_only=True)
    loaded.vae.enable_tiling()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(42)
    expected = levels(loaded(prompt="a fox", generator=random, output_type="np", **video))
    torch.set_num_threads(before)
    assert torch.equal(found, expected)
    assert len(frames) == 5
    assert frames[0].size == (48, 32)
