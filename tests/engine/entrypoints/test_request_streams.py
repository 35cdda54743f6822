"""Streams of `OmniDiffusion`: tokens and denoising steps while a request runs."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import OmniDiffusion
from omni_kvlink.engine.entrypoints.streams import OutputEvent, RequestStream
from omni_kvlink.engine.errors import EngineError, RequestAborted
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.tokens.events import EventBuffer, StepEvent, TokenEvent
from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import image_maker
from support.engine.fixtures import WAIT, checkpoint, until

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT: dict[str, Any] = {"modalities": ["text"], "max_tokens": 12, "seed": 3, "temperature": 2.0}
PLAN = {"modalities": ["text", "image"], "max_tokens": 5, "height": 16, "width": 24, "seed": 0}
PLAN |= {"num_inference_steps": 4, "preview_interval": 1}
AR, DIT = {"stage_id": 0, "max_num_seqs": 4}, {"stage_id": 1}
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "one stage": {"pipeline": "bagel_single_stage", "stages": [AR]},
    "two stages": {"pipeline": "bagel", "stages": [AR, DIT]},
    "workers": {
        "pipeline": "bagel",
        "distributed_executor_backend": "mp",
        "stages": [AR, {**DIT, "own_process": True}],
    },
}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def omni(request: pytest.FixtureRequest) -> Iterator[OmniDiffusion]:
    with OmniDiffusion(checkpoint(), DEPLOYMENTS[request.param], dtype="float32") as made:
        yield made


def check(events: list[Any], output: DiffusionOutput) -> list[Any]:
    """The tokens and the text are complete and in order, then come steps, then the output."""
    tokens = [one for one in events if isinstance(one, TokenEvent)]
    steps = [one for one in events if isinstance(one, StepEvent)]
    assert events == [*tokens, *steps, events[-1]]
    assert [one.start for one in tokens] == [
        sum(len(one.token_ids) for one in tokens[:at]) for at in range(len(tokens))
    ]
    assert [token for one in tokens for token in one.token_ids] == (output.token_ids or [])
    assert "".join(one.text for one in tokens) == (output.text or "")
    assert [one.done for one in steps] == sorted({one.done for one in steps})
    assert isinstance(events[-1], OutputEvent)
    assert events[-1].output.token_ids == output.token_ids
    return steps


def test_a_text(omni: OmniDiffusion) -> None:
    (output,) = omni.generate("a fox", TEXT, timeout=WAIT, on_error="return")
    assert check(list(omni.stream("a fox", TEXT)), output) == []


def test_a_text_then_an_image_with_previews(omni: OmniDiffusion) -> None:
    (output,) = omni.generate("a fox", PLAN, timeout=WAIT, on_error="return")
    events: list[Any] = list(omni.stream("a fox", PLAN))
    steps = check(events, output)
    assert torch.equal(events[-1].output.result(), output.result())
    assert all((one.total, one.preview.dtype) == (3, torch.uint8) for one in steps)
    shown = {one.done: one.preview for one in steps}
    if 3 in shown:  # the newest step is lost if the output overtakes it
        assert torch.equal(shown[3], output.result())


def test_what_is_written_is_read_before_the_end(omni: OmniDiffusion) -> None:
    """The first token of a text that has no end is read, then the request is aborted."""
    with omni.stream("a fox", {**TEXT, "max_tokens": 200_000}) as stream:
        first = next(stream)
        assert isinstance(first, TokenEvent)
        assert first.start == 0
    with pytest.raises(RequestAborted):
        list(stream)
    with pytest.raises(RequestAborted):
        next(stream)


def test_several_streams_at_once(omni: OmniDiffusion) -> None:
    prompts = ["a fox", "two owls", "the sea"]
    outputs = omni.generate(prompts, TEXT, timeout=WAIT, on_error="return")
    streams = [omni.stream(prompt, TEXT) for prompt in prompts]
    for stream, output in zip(streams, outputs, strict=True):
        check(list(stream), output)


def test_a_wrong_request_opens_no_stream(omni: OmniDiffusion) -> None:
    with pytest.raises(SchemaError):
        list(omni.stream("a fox", {"no_such_param": 1}))
    # A stream that nobody has costs memory, and shows nowhere.
    assert omni._streams._streams == {}


def test_asyncio(omni: OmniDiffusion) -> None:
    """An output, a stream, an error, and what is cancelled is aborted."""

    async def run() -> None:
        output = await omni.generate_async("a fox", TEXT)
        check([event async for event in omni.stream_async("a fox", TEXT)], output)
        with pytest.raises(SchemaError):
            await omni.generate_async([3, 9999], TEXT)
        endless = {**TEXT, "max_tokens": 200_000}
        stream = omni.stream_async("a fox", endless, request_id="a")
        assert isinstance(await anext(stream), TokenEvent)  # it runs
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.ensure_future(omni.generate_async("a fox", endless, request_id="b"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (output,) = omni.generate("a fox", TEXT, timeout=WAIT, on_error="return")
        assert output.error is None

    asyncio.run(run())
    omni.generate("a fox", TEXT, timeout=WAIT, request_ids=["a"])  # the id is free again


def test_prompts_that_cannot_all_be_queued_are_aborted(omni: OmniDiffusion) -> None:
    endless = {**TEXT, "max_tokens": 200_000}
    with pytest.raises(EngineError, match="'a'"):
        omni.generate(["a fox", "an owl"], endless, request_ids=["a", "a"])
    with pytest.raises(SchemaError, match="1 request ids for 2 prompts"):
        omni.generate(["a fox", "an owl"], TEXT, request_ids=["b"])
    until(lambda: not omni._open)  # the first prompt has ended
    omni.generate("a fox", TEXT, timeout=WAIT, request_ids=["a"])  # the id is free again


def test_a_stage_that_restarts_is_streamed_again() -> None:
    with OmniDiffusion(checkpoint(), DEPLOYMENTS["two stages"], dtype="float32") as omni:
        (output,) = omni.generate("a fox", TEXT, timeout=WAIT, on_error="return")
        check(list(omni.stream("a fox", TEXT)), output)
        omni.restart(0)
        check(list(omni.stream("a fox", TEXT)), output)


def test_steps_of_all_images_of_a_prompt() -> None:
    """Each preview, while nobody waits in between: every step is seen."""
    seen = list[StepEvent]()
    with OmniDiffusion(checkpoint(), DEPLOYMENTS["one stage"], dtype="float32") as omni:
        stage: Any = omni.stages[0]
        events = stage.executor.events
        put = events.put

        def recorded(event: StepEvent) -> None:
            seen.append(event)
            put(event)

        events.put = recorded
        how = {**PLAN, "modalities": [], "num_outputs_per_prompt": 2, "preview_interval": 2}
        *_, last = omni.stream("a fox", how)
        assert isinstance(last, OutputEvent)
    assert [(one.done, one.total) for one in seen] == [(1, 3), (2, 3), (3, 3)]
    assert [one.preview is not None for one in seen] == [False, True, True]
    assert seen[2].preview is not None
    assert torch.equal(seen[2].preview, last.output.result())
    assert seen[1].preview is not None
    assert not torch.equal(seen[1].preview, seen[2].preview)


def test_a_large_preview_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_maker, "PREVIEW_SIDE_PIXELS", 16)
    with OmniDiffusion(checkpoint(), DEPLOYMENTS["one stage"], dtype="float32") as omni:
        how = {**PLAN, "modalities": [], "height": 64, "width": 32}
        shown = [one.preview for one in omni.stream("a fox", how) if isinstance(one, StepEvent)]
    assert shown
    assert {tuple(one.shape) for one in shown if one is not None} == {(1, 16, 8, 3)}


# ---- the parts


def test_a_slow_reader_gets_all_tokens_and_the_newest_step() -> None:
    buffer = EventBuffer()
    for at in range(1000):
        buffer.put(TokenEvent("a", at, [at], "x"))
    for done in (1, 2, 3):
        shown = torch.full((1,), done) if done == 2 else None
        buffer.put(StepEvent("a", done, 3, shown))
    buffer.put(TokenEvent("b", 0, [7], "y"))
    tokens, step, other = buffer.take().result(0)
    assert tokens == TokenEvent("a", 0, [*range(1000)], "x" * 1000)
    assert isinstance(step, StepEvent)
    assert (step.done, step.preview) == (3, torch.tensor([2]))
    assert other == TokenEvent("b", 0, [7], "y")
    waits = buffer.take()
    assert not waits.done()
    threading.Thread(target=buffer.put, args=(tokens,)).start()
    assert waits.result(WAIT) == [tokens]
    first, second = buffer.take(), buffer.take()
    assert (first.result(0), second.done()) == ([], False)
    buffer.close()
    assert second.result(0) == []


def test_a_stream_completes_and_orders_what_comes() -> None:
    """Tokens that come with the output, and again as a late event."""
    stream = RequestStream("a", lambda key: None)
    stream.put(TokenEvent("a", 0, [1], "x"))
    stream.put(TokenEvent("a", 1, [2], ""))
    output = DiffusionOutput("a", text="xyz", token_ids=[1, 2, 3])
    stream.put_rest(output)
    stream.put(TokenEvent("a", 2, [3], "z"))
    stream.put(StepEvent("a", 1, 2))
    stream.put(StepEvent("a", 2, 2))
    stream.end(output)
    stream.put(StepEvent("a", 2, 2))
    assert list(stream) == [
        TokenEvent("a", 0, [1, 2, 3], "xyz"),
        StepEvent("a", 2, 2),
        OutputEvent(output),
    ]
    assert stream.is_done
