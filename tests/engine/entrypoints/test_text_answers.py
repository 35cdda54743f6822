"""Texts and images as answers, by `OmniDiffusion`: the modes of vLLM-Omni's deploy files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import OmniDiffusion, RequestAborted
from omni_kvlink.engine.entrypoints.deploy import DeployConfig
from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import DenoiseParams
from support.engine.fixtures import WAIT, checkpoint, pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

PHOTO = (torch.arange(40 * 56 * 3) % 251).reshape(40, 56, 3).to(torch.uint8)
TEXT: dict[str, Any] = {"modalities": ["text"], "max_tokens": 6, "seed": 0}
IMAGE: dict[str, Any] = {"num_inference_steps": 3, "height": 16, "width": 24, "seed": 0}
TWO = {"pipeline": "bagel", "stages": [{"stage_id": 0, "max_num_seqs": 4}, {"stage_id": 1}]}
ONE = {"pipeline": "bagel_single_stage", "stages": [{"stage_id": 0, "max_num_seqs": 4}]}


@pytest.fixture(scope="module", params=["one stage", "two stages"])
def omni(request: pytest.FixtureRequest) -> Iterator[OmniDiffusion]:
    deploy = ONE if request.param == "one stage" else TWO
    with OmniDiffusion(checkpoint(), deploy, dtype="float32") as made:
        yield made


def answer(prompt: Any, *, think: bool = False, seed: int = 0, **options: Any) -> Any:
    """What the model answers to a prompt alone."""
    system_prompt = options.pop("system_prompt", None)
    model = pipeline()
    read = model.prefill(prompt, understanding=True, think=think, system_prompt=system_prompt)
    model.release_caches()
    generator = torch.Generator().manual_seed(seed)
    return model.generate_text_output(read.gen, generator=generator, **{"max_length": 6, **options})


def image(prompt: Any, *, edit: bool = False, **prefill: Any) -> torch.Tensor:
    defaults = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
    how = DenoiseParams(**{**vars(defaults), "num_timesteps": 3})
    seeded, shape = torch.Generator().manual_seed(0), None if edit else (16, 24)
    made = pipeline().generate(prompt, how, generator=seeded, image_shape=shape, **prefill)
    pipeline().release_caches()
    return made


def test_text_to_text_and_image_to_text(omni: OmniDiffusion) -> None:
    """A batch of texts, next to each other; the diffusion stage of two does not run."""
    before = omni.stats()
    questions = ["what is a fox?", (PHOTO, "what is it?"), "the sea"]
    outputs = omni.generate(questions, TEXT, timeout=WAIT, on_error="return")
    for question, output in zip(questions, outputs, strict=True):
        expected = answer(question)
        assert output.error is None
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
        assert (output.finish_reason, output.output) == ("length", None)
        assert len(output.stages) == 1
    assert omni.generate(questions, TEXT, timeout=WAIT) == [one.text for one in outputs]
    if len(omni.stages) == 2:
        ar, dit = omni.stats()
        assert dit["steps"] == before[1]["steps"]
        assert dit["kv"] == before[1]["kv"]
        assert ar["link"]["memory"]["used"] == 0
        assert ar["free_blocks"] == before[0]["free_blocks"]


def test_text_to_image_and_image_to_image(omni: OmniDiffusion) -> None:
    """Also next to requests for texts."""
    modes = [IMAGE, {**IMAGE, "modalities": "image"}, TEXT]
    found = omni.generate(["a fox", "a fox", "a fox"], modes, timeout=WAIT, output_type="pt")
    assert found[2] == answer("a fox").text
    assert all(torch.equal(one[0], image("a fox")) for one in found[:2])
    edit = {"num_inference_steps": 3, "seed": 0, "modalities": ["img2img"]}
    (made,) = omni.generate([(PHOTO, "night")], edit, timeout=WAIT, output_type="pt")
    assert torch.equal(made[0], image([PHOTO, "night"], edit=True))


@pytest.mark.parametrize("system_prompt", [None, "Plan it."])
def test_a_text_then_an_image(omni: OmniDiffusion, system_prompt: str | None) -> None:
    """What think mode writes, and the image that was made with it."""
    how = {**IMAGE, "modalities": ("text", "image"), "max_tokens": 5, "logprobs": 1}
    how |= {} if system_prompt is None else {"system_prompt": system_prompt}
    (output,) = omni.generate("a fox", how, timeout=WAIT, on_error="return")
    plan: dict[str, Any] = {"think": True, "max_think_tokens": 5, "system_prompt": system_prompt}
    assert torch.equal(output.result()[0], image("a fox", **plan))
    contexts = pipeline().prefill("a fox", image_shape=(16, 24), **plan)
    assert output.text == contexts.text
    assert (len(output.token_ids), len(output.logprobs.logprobs)) == (4, 4)
    pipeline().release_caches()


def test_think_prompts_of_an_answer(omni: OmniDiffusion) -> None:
    modes = [{**TEXT, "think": True}, {**TEXT, "think": True, "system_prompt": "Plan it."}, TEXT]
    found = omni.generate(["a fox"] * 3, modes, timeout=WAIT)
    expected = answer("a fox", think=True), answer("a fox", think=True, system_prompt="Plan it.")
    assert found == [expected[0].text, expected[1].text, answer("a fox").text]
    assert len(set(found)) == 3


def test_hidden_states_for_the_caller(omni: OmniDiffusion) -> None:
    modes = [{**IMAGE, "return_hidden_states": "all"}, {**TEXT, "return_hidden_states": "last"}]
    one, two = omni.generate(["a fox"] * 2, modes, timeout=WAIT, on_error="return")
    model = pipeline()
    expected = model.prefill("a fox", image_shape=(16, 24), keep_hidden="all").gen.hidden
    assert expected is not None
    assert torch.equal(one.hidden_states, expected.tensor())
    assert two.hidden_states.shape == expected.tensor()[-1].shape
    assert one.output is not None
    model.release_caches()


def test_prompts_as_vllm_omni_has_them(omni: OmniDiffusion) -> None:
    """Maps with the modalities in them; token ids, alone and after an image."""
    ids = pipeline().encode_prompt("what is it?")
    prompts = [
        {"prompt": "what is it?", "modalities": ["text"]},
        {"prompt_token_ids": ids, "modalities": ["text"], "multi_modal_data": {"image": PHOTO}},
        {"prompt": "what is it?", "modalities": ["text"], "multi_modal_data": {"image": [PHOTO]}},
        ids,
    ]
    found = omni.generate(prompts, {"max_tokens": 6, "modalities": ["text"]}, timeout=WAIT)
    text, seen = answer("what is it?").text, answer([PHOTO, "what is it?"]).text
    assert found == [text, seen, seen, text]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "text"),
    [
        ({"prompt": "a", "negative_prompt": "b"}, {}, SchemaError, "no negative_prompt; there are"),
        ({"modalities": ["text"]}, {}, SchemaError, "prompt or prompt_token_ids: one"),
        ({"prompt": "a", "multi_modal_data": {"video": 1}}, {}, SchemaError, "image or img2img"),
        ("a", {"modalities": ["audio"]}, ValueError, r"modalities \['audio'\]; there are text"),
        ("a", {"modalities": ["img2img"]}, SchemaError, "img2img needs an image"),
        ("a", {"modalities": "text", "num_outputs_per_prompt": 2}, SchemaError, "is of images"),
        ("a", {"modalities": ("text", "image"), "think": False}, ValueError, "leave think"),
        ("a", {"modalities": "text", "transfer_hidden_states": True}, ValueError, "no other stage"),
        ("a", {"logprobs": -2}, ValueError, "logprobs -2: a number of tokens"),
        ("a", {"return_hidden_states": "some"}, ValueError, "'some': wanted 'all' or 'last'"),
        ([3, 999], {"modalities": "text"}, SchemaError, "number 1 is 999"),
        (7, {}, SchemaError, "texts, token ids and images, not of ints"),
    ],
)
def test_what_no_request_may_want(
    omni: OmniDiffusion, prompt: Any, params: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        omni.generate([prompt], params, timeout=WAIT)


def test_one_stage_hands_nothing_on(omni: OmniDiffusion) -> None:
    how = {**IMAGE, "transfer_hidden_states": True}
    if len(omni.stages) == 2:
        (output,) = omni.generate("a fox", how, timeout=WAIT, on_error="return")
        assert torch.equal(output.result()[0], image("a fox"))
        assert output.stages[0].kv_sent.has_hidden_states
        return
    with pytest.raises(SchemaError, match="has one stage"):
        omni.generate("a fox", how, timeout=WAIT)


def test_an_aborted_answer_is_its_own(omni: OmniDiffusion) -> None:
    long = omni.submit("a fox", {**TEXT, "max_tokens": 200_000}, request_id="long")
    short = omni.submit("a fox", TEXT, request_id="short")
    if len(omni.stages) == 2:
        assert short.result(WAIT).text == answer("a fox").text
    omni.abort("long")
    assert isinstance(long.result(WAIT).error, RequestAborted)
    assert short.result(WAIT).text == answer("a fox").text


def test_a_stages_defaults_say_how_a_text_is_written() -> None:
    """`default_sampling_params` of the one stage; in a diffusion stage of two they are refused."""
    sampling = {"modalities": ["text"], "max_tokens": 6, "system_prompt": "Plan.", "think": True}
    deploy = {**ONE, "stages": [{"stage_id": 0, "default_sampling_params": sampling}]}
    with OmniDiffusion(checkpoint(), deploy, dtype="float32") as omni:
        expected = answer("a fox", think=True, system_prompt="Plan.").text
        assert omni.generate("a fox", {"seed": 0}, timeout=WAIT) == [expected]
    for name in ("modalities", "system_prompt", "think"):
        stages = [
            {"stage_id": 0},
            {"stage_id": 1, "default_sampling_params": {name: sampling[name]}},
        ]
        with pytest.raises(SchemaError, match=f"default_sampling_params {name}"):
            DeployConfig.from_dict({"pipeline": "bagel", "stages": stages})
