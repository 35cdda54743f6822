"""BAGEL's texts for the engine: answers, and the plans of think mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.errors import RequestAborted, as_engine_error
from omni_kvlink.engine.inputs.prompt import EmbedsPrompt
from omni_kvlink.engine.models.token_emitter import TokenEmitter, log_of
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.pipeline import THINK_TEXT_PROMPT
from omni_kvlink.models.bagel.prompts import is_text, prompt_items

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.engine.inputs.prompt import Prompt, PromptItems
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
    from omni_kvlink.models.bagel.hidden_states import Keep
    from omni_kvlink.models.bagel.pipeline import BagelPipeline
    from omni_kvlink.models.bagel.prefill_steps import Steps, TextPass


def readable(prompt: Prompt) -> PromptItems:
    """The prompt's texts, images and token ids; raises SchemaError if it has embeddings."""
    if isinstance(prompt, EmbedsPrompt):
        raise SchemaError(
            "prompt_embeds: BAGEL reads texts and images into its KV cache, and no embeddings; "
            "give the text"
        )
    return prompt


def check_modalities(request: OmniDiffusionRequest) -> None:
    """Raise SchemaError if the prompt is not one for what the request wants."""
    params, items = request.sampling_params, prompt_items(readable(request.prompt))
    if not params.modalities:
        return
    if "img2img" in params.modalities and all(map(is_text, items)):
        raise SchemaError(f"request {request.request_id!r}: img2img needs an image in the prompt")
    if params.is_text_only and params.num_outputs_per_prompt != 1:
        raise SchemaError(f"request {request.request_id!r}: num_outputs_per_prompt is of images")


def keep_hidden(request: OmniDiffusionRequest) -> Keep | None:
    """Return the hidden states that the model must keep: all if they go to the next stage."""
    kept = request.sampling_params.return_hidden_states
    return "all" if request.sampling_params.transfer_hidden_states else kept


def text_options(pipeline: BagelPipeline, request: OmniDiffusionRequest) -> dict[str, Any]:
    """Return the sampling options of a request's text, as `text_steps` takes them."""
    params, on_token = request.sampling_params, log_of(request).add
    if params.stream and request.emit is not None:
        on_token = TokenEmitter(pipeline, request).add
    return {
        "do_sample": params.temperature > 0,
        "temperature": params.temperature,
        "top_k": max(0, params.top_k),
        "top_p": params.top_p,
        "repetition_penalty": params.repetition_penalty,
        "on_token": on_token,
    }


def plan_options(
    pipeline: BagelPipeline, request: OmniDiffusionRequest, *, think: bool
) -> dict[str, Any]:
    """The options of `prefill` for an image: whether and how a plan is written, what is kept."""
    params = request.sampling_params
    return {
        "think": params.thinks(think),
        "system_prompt": params.system_prompt,
        "max_think_tokens": params.max_tokens,
        "keep_hidden": keep_hidden(request),
        **text_options(pipeline, request),
    }


def count_options(params: OmniDiffusionSamplingParams, *, think: bool) -> dict[str, Any]:
    """The options of `count_tokens`."""
    return {
        "think": params.thinks(think),
        "understanding": params.is_text_only,
        "system_prompt": params.system_prompt,
        "max_think_tokens": params.max_tokens,
    }


def text_fields(request: OmniDiffusionRequest, end: int, text: str | None) -> dict[str, Any]:
    """The fields of an output about a request's text; `end` is the end marker."""
    if text is None:
        return {}
    log = log_of(request)
    reason = "stop" if log.token_ids[-1:] == [end] else "length"
    fields = {"token_ids": log.token_ids, "finish_reason": reason, "logprobs": log.logprobs()}
    return {"text": text, **fields}


def answer_steps(
    pipeline: BagelPipeline, request: OmniDiffusionRequest, *, think: bool, **prefill: Any
) -> Steps[DiffusionOutput]:
    """Read a prompt for understanding, and write the answer; the steps' value is the output.

    `think` is the stage's setting; `prefill` has further options of `prefill_steps`.
    """
    params = request.sampling_params
    thinks, prompt = params.thinks(think), readable(request.prompt)
    contexts = yield from pipeline.prefill_steps(
        prompt,
        think=thinks,
        understanding=True,
        system_prompt=params.system_prompt,
        keep_hidden=keep_hidden(request),
        **prefill,
    )
    pipeline.release_caches()
    first = (params.system_prompt or THINK_TEXT_PROMPT) if thinks else ""
    answer = yield from pipeline.text_steps(
        contexts.gen,
        max_length=params.max_tokens,
        prompt_ids=pipeline.text_ids(prompt, first),
        generator=torch.Generator().manual_seed(params.seed or 0),
        **text_options(pipeline, request),
    )
    hidden = None if answer.context.hidden is None else answer.context.hidden.tensor()
    fields = text_fields(request, pipeline.special_tokens.eos, answer.text)
    return DiffusionOutput(request.request_id, hidden_states=hidden, **fields)


def write_answers(
    pipeline: BagelPipeline, requests: Sequence[OmniDiffusionRequest]
) -> dict[str, DiffusionOutput]:
    """Answer requests with texts, whose tokens are chosen together; an output by request id.

    A request's error is in its own output; an abort takes effect before its next token.
    """
    by_id = {request.request_id: request for request in requests}
    steps = {key: answer_steps(pipeline, request, think=False) for key, request in by_id.items()}
    outputs: dict[str, DiffusionOutput] = {}
    answers: dict[str, Any] = dict.fromkeys(steps)
    while answers:
        passes: dict[str, TextPass] = {}
        for key, answer in list(answers.items()):
            answers[key] = None
            try:
                if by_id[key].is_cancelled():
                    raise RequestAborted(f"request {key!r} was aborted")
                step = steps[key].send(answer)
            except StopIteration as end:
                outputs[key] = end.value
            except Exception as error:
                outputs[key] = _failed(key, error)
            else:
                passes |= {} if step is None else {key: step}
            if key in outputs:
                del answers[key]
                steps[key].close()
        if passes:
            try:
                answers |= zip(passes, pipeline.advance([*passes.values()]), strict=True)
            except Exception as error:
                for key in passes:
                    outputs[key] = _failed(key, error)
                    del answers[key]
                    steps[key].close()
    return outputs


def _failed(key: str, error: Exception) -> DiffusionOutput:
    return DiffusionOutput(key, error=as_engine_error(error, f"request {key!r} failed"))
