"""An AR stage's tokens, hidden states and text answers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import (
    AREngine,
    DiffusionEngine,
    EngineError,
    KVConfig,
    ModelRunnerOutput,
    OmniARConfig,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
    RequestAborted,
)
from support.engine.fixtures import SHAPE, WAIT, checkpoint, params, pipeline, until, url

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTIONS = ("what is a fox?", "two owls in the rain", "the sea")
TEXT: dict[str, Any] = {"modalities": ("text",), "max_tokens": 6}


@pytest.fixture(params=["uni", "mp"])
def engine(request: pytest.FixtureRequest, sockets: str) -> Iterator[AREngine]:
    with ar_engine(sockets, request.param) as made:
        yield made


@contextmanager
def ar_engine(sockets: str, backend: str = "uni", **fields: Any) -> Iterator[AREngine]:
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    how = {"dtype": "float32", "max_num_seqs": 4, "num_blocks": 4096, **fields}
    config = OmniARConfig(checkpoint(), kv=kv, distributed_executor_backend=backend, **how)
    engine = AREngine(config)
    with engine:
        yield engine


def prompt(name: str, text: Any = "a fox", **fields: Any) -> OmniDiffusionRequest:
    own = {key: fields.pop(key) for key in list(fields) if key.startswith("need_")}
    return OmniDiffusionRequest(text, params(**fields), name, **own)


def steps_of(engine: Any) -> list[ModelRunnerOutput]:
    """What the executor returns, step by step."""
    found, execute = list[ModelRunnerOutput](), engine.executor.execute_model

    def recorded(scheduled: Any) -> ModelRunnerOutput:
        found.append(execute(scheduled))
        return found[-1]

    engine.executor.execute_model = recorded
    return found


def answer(text: Any, *, seed: int = 0, think: bool = False, **options: Any) -> Any:
    """What the model answers to a prompt alone."""
    model = pipeline()
    system_prompt = options.pop("system_prompt", None)
    read = model.prefill(text, understanding=True, think=think, system_prompt=system_prompt)
    model.release_caches()
    return model.generate_text_output(
        read.gen, generator=torch.Generator().manual_seed(seed), **options
    )


def test_each_steps_tokens(engine: AREngine) -> None:
    """Through the codec, too: the tokens of all steps are the text's."""
    steps = steps_of(engine)
    batch = [
        prompt("a", QUESTIONS[0], **TEXT, logprobs=2),
        prompt("b", QUESTIONS[1], **{**TEXT, "max_tokens": 3}),
    ]
    outputs: Any = {one.request_id: one for one in engine.generate(batch, timeout=WAIT)}
    for name, text, most in (("a", QUESTIONS[0], 6), ("b", QUESTIONS[1], 3)):
        chosen: list[int] = []
        for step in steps:
            if name in step.req_ids:
                tokens = step.sampled_token_ids[step.req_id_to_index[name]]
                chosen += tokens
                assert step.num_nans_in_logits is not None
                assert step.num_nans_in_logits.get(name) == (0 if tokens else None)
        assert outputs[name].error is None
        assert chosen == outputs[name].token_ids == answer(text, max_length=most).token_ids
    rows = [step.logprobs for step in steps if step.logprobs is not None]
    assert [row for one in rows for row in one.logprobs if row] == outputs["a"].logprobs.logprobs
    assert all(len(row) in (0, 3) for one in rows for row in one.logprobs)
    assert outputs["b"].logprobs is None
    expected = answer(QUESTIONS[0], max_length=6, output_logits=True).logprobs
    for at, (ids, found) in enumerate(
        zip(outputs["a"].logprobs.logprob_token_ids, outputs["a"].logprobs.logprobs, strict=True)
    ):
        assert ids[0] == outputs["a"].token_ids[at]
        assert ids[1:] == expected[at].topk(2).indices.tolist()
        assert torch.allclose(torch.tensor(found), expected[at][ids], atol=1e-5)
    assert outputs["a"].logprobs.sampled_token_ranks == [1] * 5
    for step in steps:
        assert (step.spec_token_ids, step.prompt_logprobs_dict) == (None, {})


def test_which_kv_was_sent_in_a_step(engine: AREngine) -> None:
    steps = steps_of(engine)
    batch = [prompt("text", **TEXT), prompt("image"), prompt("image2", think=True, max_tokens=3)]
    for output in engine.generate(batch, timeout=WAIT):
        assert output.error is None
        assert (output.kv_sent is None) == (output.request_id == "text")
    sent = [step.kv_connector_output for step in steps if step.kv_connector_output is not None]
    assert [one.finished_sending for one in sent] == [{"image"}, {"image2"}]
    assert [one.finished_recving for one in sent] == [None, None]
    for name in ("image", "image2"):
        engine.fail_kv(name, "not needed")
    assert engine.stats()["free_blocks"] == 4096


def test_nans_are_counted(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        utility = engine.executor.worker.runner.utility  # type: ignore[attr-defined]
        advance, steps = utility.advance, steps_of(engine)

        def with_nans(passes: Any) -> Any:
            return [
                (context, logits.index_fill(0, torch.tensor([1, 2]), torch.nan))
                for context, logits in advance(passes)
            ]

        utility.advance = with_nans
        engine.generate([prompt("a", **{**TEXT, "max_tokens": 3})], timeout=WAIT)
        counted = [step.num_nans_in_logits for step in steps]
    assert [one for one in counted if one] == [{"a": 2}, {"a": 2}]


def test_diffusion_has_no_tokens() -> None:
    """Each field is as empty as vLLM's."""
    with DiffusionEngine(OmniDiffusionConfig(checkpoint(), stage="all", dtype="float32")) as engine:
        steps = steps_of(engine)
        engine.generate([prompt("a")], timeout=WAIT)
    (step,) = steps
    assert (step.sampled_token_ids, step.prompt_logprobs_dict) == ([], {})
    assert (step.spec_token_ids, step.logprobs) == (None, None)
    assert (step.kv_connector_output, step.num_nans_in_logits) == (None, None)


@pytest.mark.parametrize("keep", ["all", "last"])
def test_hidden_states_are_the_models_own(engine: AREngine, keep: Any) -> None:
    steps = steps_of(engine)
    (output,) = engine.generate([prompt("a", return_hidden_states=keep)], timeout=WAIT)
    expected = pipeline().prefill("a fox", image_shape=SHAPE, keep_hidden=keep).gen
    assert expected.hidden is not None
    assert output.hidden_states is not None
    assert torch.equal(output.hidden_states, expected.hidden.tensor())
    pooled = [one for step in steps for one in step.pooler_output if one is not None]
    assert len(pooled) == 1
    assert torch.equal(pooled[0], output.hidden_states)
    engine.fail_kv("a", "not needed")
    pipeline().release_caches()


def test_hidden_states_of_an_answer_are_those_of_its_tokens_too(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        one = prompt("a", QUESTIONS[0], **TEXT, return_hidden_states="all")
        (output,) = engine.generate([one], timeout=WAIT)
    model = pipeline()
    context = model.prefill(QUESTIONS[0], understanding=True, keep_hidden="all").gen
    expected = model.generate_text_output(context, max_length=6)
    assert expected.context.hidden is not None
    assert output.hidden_states is not None
    assert torch.equal(output.hidden_states, expected.context.hidden.tensor())
    assert len(output.hidden_states) == expected.context.kv_lens[0]


def test_hidden_states_reach_the_next_stage(sockets: str) -> None:
    """Bit for bit, next to the KV; nothing is held afterwards."""
    with ar_engine(sockets) as ar:
        kv = KVConfig(sources=ar.sink_urls, source_options={"directory": sockets}, timeout=WAIT)
        with DiffusionEngine(OmniDiffusionConfig(checkpoint(), dtype="float32", kv=kv)) as dit:
            utility = dit.executor.worker.runner.utility  # type: ignore[attr-defined]
            convert, found = utility.convert, dict[str, torch.Tensor | None]()

            def recorded(payload: Any, one: OmniDiffusionRequest) -> Any:
                found[one.request_id] = one.hidden_states
                return convert(payload, one)

            utility.convert = recorded
            one = prompt("a", transfer_hidden_states=True)
            (output,) = ar.generate([one, prompt("b")], timeout=WAIT)[:1]
            assert output.kv_sent is not None
            assert (output.kv_sent.has_hidden_states, output.hidden_states) == (True, None)
            for name, has in (("a", True), ("b", False)):
                how = {"need_kv_receive": True, "need_hidden_receive": has}
                dit.submit(prompt(name, **how)).result(WAIT).result()
            until(lambda: ar.stats()["link"]["memory"]["used"] == 0)  # its KV is released
    expected = pipeline().prefill("a fox", image_shape=SHAPE, keep_hidden="all").gen.hidden
    assert expected is not None
    assert found["a"] is not None
    assert torch.equal(found["a"], expected.tensor())
    assert found["b"] is None
    pipeline().release_caches()


def test_hidden_states_that_are_not_needed_are_released(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        engine.generate([prompt("a", transfer_hidden_states=True)], timeout=WAIT)
        assert engine.stats()["link"]["memory"]["used"] > 0
        engine.fail_kv("a", "not needed")
        assert engine.stats()["link"]["memory"]["used"] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_each_alone(engine: AREngine, temperature: float) -> None:
    """Written together; nothing is sent, and no block stays in use."""
    batch = [
        prompt(str(seed), text, seed=seed, temperature=temperature, **TEXT)
        for seed, text in enumerate(QUESTIONS)
    ]
    outputs = engine.generate(batch, timeout=WAIT)
    how: dict[str, Any] = {
        "do_sample": temperature > 0,
        "temperature": temperature or 0.3,
        "max_length": 6,
    }
    for seed, (text, output) in enumerate(zip(QUESTIONS, outputs, strict=True)):
        expected = answer(text, seed=seed, **how)
        assert output.error is None
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
        assert (output.finish_reason, output.kv_sent) == (expected.finish_reason, None)
        with pytest.raises(EngineError, match="no image; its `text`: "):
            output.result()
    stats = engine.stats()
    assert (stats["free_blocks"], stats["link"]["memory"]["used"]) == (4096, 0)


def test_an_image_is_understood(sockets: str) -> None:
    photo = (torch.arange(40 * 56 * 3) % 251).reshape(40, 56, 3).to(torch.uint8)
    items: Any = [photo, "what is it?"]
    with ar_engine(sockets) as engine:
        (output,) = engine.generate([prompt("a", items, **TEXT)], timeout=WAIT)
    assert output.text == answer(items, max_length=6).text
    assert output.text != answer("what is it?", max_length=6).text


def test_an_answer_may_be_thought_about(sockets: str) -> None:
    """With the library's prompt, or another one; a request decides for itself."""
    with ar_engine(sockets, think=True) as engine:
        batch = [
            prompt("a", **TEXT),
            prompt("b", **TEXT, system_prompt="Plan."),
            prompt("c", **TEXT, think=False),
        ]
        a, b, c = engine.generate(batch, timeout=WAIT)
    assert a.text == answer("a fox", think=True, max_length=6).text
    assert b.text == answer("a fox", think=True, system_prompt="Plan.", max_length=6).text
    assert c.text == answer("a fox", max_length=6).text
    assert len({a.text, b.text, c.text}) == 3


def test_a_penalty_is_for_the_prompts_tokens_too(sockets: str) -> None:
    """A prompt of token ids: every byte."""
    ids = [*range(256)]
    with ar_engine(sockets) as engine:
        one = prompt("a", ids, **TEXT, repetition_penalty=9.0)
        (output,) = engine.generate([one], timeout=WAIT)
    how: dict[str, Any] = {"max_length": 6, "repetition_penalty": 9.0}
    assert output.token_ids == answer(ids, **how, prompt_ids=ids).token_ids
    assert output.token_ids != answer(ids, **how).token_ids


def test_an_aborted_answer(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        utility = engine.executor.worker.runner.utility  # type: ignore[attr-defined]
        advance = utility.advance

        def aborting(passes: Any) -> Any:
            engine.abort("a")
            return advance(passes)

        utility.advance = aborting
        a, b = engine.generate([prompt("a", **TEXT), prompt("b", **TEXT)], timeout=WAIT)
        assert isinstance(a.error, RequestAborted)
        assert b.text == answer("a fox", max_length=6).text
        assert engine.stats()["free_blocks"] == 4096


def test_a_model_that_writes_no_text(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        utility = engine.executor.worker.runner.utility  # type: ignore[attr-defined]
        steps = utility.prefill_steps

        def silent(*given: Any) -> Any:
            output = yield from steps(*given)
            output.text = None
            return output

        utility.prefill_steps = silent
        (output,) = engine.generate([prompt("a", **TEXT)], timeout=WAIT)
        assert isinstance(output.error, EngineError)
        assert "its model wrote none" in str(output.error)


def test_a_stage_without_a_next_one_writes_texts_alone() -> None:
    with AREngine(OmniARConfig(checkpoint(), dtype="float32")) as engine:
        text, image = engine.generate([prompt("a", **TEXT), prompt("b")], timeout=WAIT)
        assert text.text == answer("a fox", max_length=TEXT["max_tokens"]).text
        with pytest.raises(EngineError, match=r"no next one: set kv\.sinks, or ask for"):
            image.result()
