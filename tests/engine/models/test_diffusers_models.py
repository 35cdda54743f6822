"""Tiny pipelines of several models behind the engine give what diffusers' own calls give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

from support.engine.diffusers_requests import (
    SIZE,
    WAIT,
    config,
    executor,
    levels,
    request,
    result,
    run,
)
from support.engine.fixtures import close_to
from support.engine.tiny_pipelines import (
    make_tiny_longcat,
    make_tiny_ovis,
    make_tiny_qwen_image_edit,
    make_tiny_wan,
    shrink_images,
)

pytest.importorskip("diffusers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("transformers", reason="needs `pip install 'omni-kvlink[diffusers]'`")

from diffusers import DiffusionPipeline

from omni_kvlink import SchemaError
from omni_kvlink.engine import DiffusionEngine, EngineError, RequestFailed
from omni_kvlink.engine.models.diffusers_executor import DiffusersPipelineExecutor
from omni_kvlink.engine.models.images import from_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 3
VIDEO: dict[str, Any] = {"num_frames": 5, "guidance_scale": 3.0, "negative_prompt": "blur"}
OWN: dict[str, dict[str, Any]] = {
    "ovis": {"guidance_scale": 3.0, "negative_prompt": "blur"},
    "longcat": {"guidance_scale": 3.0, "extra_args": {"enable_prompt_rewrite": False}},
    "wan": VIDEO,
    "wan2": {**VIDEO, "guidance_scale_2": 2.0},
}
"""Sampling params for each model."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "ovis": make_tiny_ovis(root / "ovis"),
        "longcat": make_tiny_longcat(root / "longcat"),
        "wan": make_tiny_wan(root / "wan"),
        "wan2": make_tiny_wan(root / "wan2", two=True),
    }


@pytest.fixture(scope="module", params=sorted(OWN))
def model(request: pytest.FixtureRequest, checkpoints: dict[str, str]) -> Iterator[Any]:
    """A model's name, its own pipeline, and an executor."""
    name = request.param
    made = executor(checkpoints[name], max_num_seqs=4)
    yield name, pipeline_of(checkpoints[name]), made
    made.shutdown()


def pipeline_of(checkpoint: str) -> Any:
    loaded = DiffusionPipeline.from_pretrained(checkpoint, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def own(pipe: Any, prompt: Any, seed: int = 0, **how: Any) -> torch.Tensor:
    """What the pipeline itself gives for one prompt, uint8 without the dimension of prompts."""
    size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": STEPS}
    random, extra = torch.Generator().manual_seed(seed), how.pop("extra_args", {})
    made = pipe(prompt=prompt, generator=random, output_type="np", **{**size, **extra, **how})
    return levels(made)[0]


def test_a_prompts_output_is_the_pipelines_own(model: Any) -> None:
    name, pipe, made = model
    fox = own(pipe, "a fox", 1, **OWN[name])
    assert fox.shape == ((5,) if name.startswith("wan") else ()) + (*SIZE, 3)
    assert torch.equal(result(made, request("a", "a fox", 1, **OWN[name])), fox)
    assert torch.equal(
        result(made, request("b", "an owl", 1, **OWN[name])), own(pipe, "an owl", 1, **OWN[name])
    )
    assert not torch.equal(own(pipe, "an owl", 1, **OWN[name]), fox)


def test_several_prompts_and_outputs_in_one_call(model: Any) -> None:
    name, pipe, made = model
    both = run(made, *(request(each, each, 3, **OWN[name]) for each in ("a fox", "an owl")))
    for prompt, output in zip(("a fox", "an owl"), both, strict=True):
        assert close_to(output.result()[0], own(pipe, prompt, 3, **OWN[name]))
    (two,) = run(made, request("a", seed=3, num_outputs_per_prompt=2, **OWN[name]))
    assert close_to(two.result()[0], both[0].result()[0])
    assert not close_to(two.result()[0], two.result()[1])


def test_the_second_transformer_of_wan_runs(checkpoints: dict[str, str]) -> None:
    made, pipe = executor(checkpoints["wan2"]), pipeline_of(checkpoints["wan2"])
    image = result(made, request("a", **OWN["wan2"]))
    made.pipeline.pipe.transformer_2.proj_out.weight.data.zero_()
    assert not torch.equal(result(made, request("a", **OWN["wan2"])), image)
    assert torch.equal(image, own(pipe, "a fox", **OWN["wan2"]))
    made.shutdown()


def test_another_number_of_frames_than_requested_is_an_error(model: Any) -> None:
    name, _, made = model
    if name.startswith("wan"):  # rounds it, and warns
        with pytest.raises(RequestFailed, match=r"makes \(5, 32, 48\), not \(4, 32, 48\)"):
            result(made, request("a", **{**OWN[name], "num_frames": 4}))
    else:
        with pytest.raises(EngineError, match="takes no num_frames"):
            result(made, request("a", num_frames=5, **OWN[name]))


def test_numbers_of_frames_do_not_share_a_batch() -> None:
    keys = {request("a", num_frames=frames).key for frames in (1, 5, None)}
    assert len(keys) == 3
    with pytest.raises(ValueError, match="num_frames=0"):
        request("a", num_frames=0)


def test_a_video_as_images() -> None:
    video = torch.arange(2 * 3 * 4 * 6 * 3).reshape(2, 3, 4, 6, 3).to(torch.uint8)
    first, second = from_tensor(video)
    assert [frame.size for frame in first] == [(6, 4)] * 3
    assert second[2].getpixel((5, 3)) == tuple(video[1, 2, 3, 5].tolist())
    assert len(from_tensor(video[:1])) == 3


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"enable_prompt_rewirte": False}, "takes no enable_prompt_rewirte"),
        ({"output_type": "pil"}, "output_type: set by the engine"),
        ({"guidance_scale": 2.0}, "guidance_scale: set by the engine or another param"),
    ],
)
def test_extra_args_that_the_pipeline_does_not_take(model: Any, extra: Any, word: str) -> None:
    _, _, made = model
    with pytest.raises(EngineError, match=word):
        result(made, request("a", guidance_scale=3.0, extra_args=extra))
    with pytest.raises(ValueError, match="JSON values"):
        request("a", extra_args={"sigmas": torch.ones(2)})


# ---- images in the prompt


class Edit(DiffusersPipelineExecutor):
    name = "QwenImageEditPipeline"

    def load_pipeline(self) -> Any:
        from pathlib import Path

        return make_tiny_qwen_image_edit(Path(self.config.model), self.name)


class EditPlus(Edit):
    name = "QwenImageEditPlusPipeline"


@pytest.fixture(scope="module", params=["Edit", "EditPlus"])
def edit(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        shrink_images(patch)
        name = f"{__name__}:{request.param}"
        where = str(tmp_path_factory.mktemp("edit"))
        made = executor(where, max_num_seqs=4, distributed_executor_backend=name)
        pipe = made.load_pipeline()
        pipe.set_progress_bar_config(disable=True)
        yield request.param, pipe, made
        made.shutdown()


def picture(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (40, 32, 3), dtype=torch.uint8, generator=random)


def test_an_image_in_the_prompt(edit: Any) -> None:
    _, pipe, made = edit
    photos = [picture(seed) for seed in (0, 1)]
    expected = [
        own(pipe, "make it night", image=Image.fromarray(photo.numpy())) for photo in photos
    ]
    prompts: list[Any] = [[photos[0], "make it night"], ["make it night", photos[1]]]
    found = run(made, *(request(str(n), prompt) for n, prompt in enumerate(prompts)))
    assert all(map(torch.equal, [output.result()[0] for output in found], expected))
    assert not torch.equal(*expected)


def test_several_images_in_one_prompt(edit: Any) -> None:
    name, pipe, made = edit
    photos = [picture(seed) for seed in (0, 1)]
    given = request("a", [*photos, "put them together"])
    if name == "Edit":  # takes a list as the images of several prompts
        with pytest.raises(RequestFailed):
            result(made, given)
        return
    images = [Image.fromarray(photo.numpy()) for photo in photos]
    expected = own(pipe, "put them together", image=images)
    assert torch.equal(result(made, given), expected)
    assert not torch.equal(expected, own(pipe, "put them together", image=images[::-1]))


def test_an_edit_needs_an_image_and_a_text(edit: Any) -> None:
    _, _, made = edit
    with pytest.raises(SchemaError, match=r"reads an image: give \[image, text\]"):
        result(made, request("a", "make it night"))
    with pytest.raises(SchemaError, match="reads one text"):
        result(made, request("a", [picture(0)]))


def test_images_reach_no_pipeline_that_takes_none(model: Any) -> None:
    _, _, made = model
    with pytest.raises(SchemaError, match="takes no images"):
        result(made, request("a", [picture(0), "make it night"]))


def test_edits_of_an_engine(edit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, pipe, made = edit
    shrink_images(monkeypatch)
    how = {"max_num_seqs": 4, "distributed_executor_backend": f"{__name__}:{type(made).__name__}"}
    photos = [picture(seed) for seed in (0, 1, 2)]
    given = [request(str(n), [photo, "make it night"], n) for n, photo in enumerate(photos)]
    with DiffusionEngine(config(made.config.model, **how)) as engine:
        outputs = engine.generate(given, timeout=WAIT)
    for seed, (photo, output) in enumerate(zip(photos, outputs, strict=True)):
        expected = own(pipe, "make it night", seed, image=Image.fromarray(photo.numpy()))
        assert torch.equal(output.result()[0], expected)
