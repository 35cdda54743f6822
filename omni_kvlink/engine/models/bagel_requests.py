"""Requests of an engine: what each of them wants, painted together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_kvlink.engine.errors import RequestAborted, RequestFailed
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest, Prompt
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.errors import KVLinkError, SchemaError
from omni_kvlink.models.bagel.cache import BagelContexts
from omni_kvlink.models.bagel.sampling import DenoiseParams
from omni_kvlink.models.bagel.steps import BagelSteps

_FIELDS = {
    "guidance_scale": "cfg_text_scale",
    "guidance_scale_2": "cfg_img_scale",
    "cfg_interval": "cfg_interval",
    "cfg_renorm_type": "cfg_renorm_type",
    "cfg_renorm_min": "cfg_renorm_min",
    "timestep_shift": "timestep_shift",
    "num_inference_steps": "num_timesteps",
}
"""The engine's names, and this model's."""


@dataclass
class _Job:
    """A request that has all it needs: its contexts, and noise for each of its images."""

    request: OmniDiffusionRequest
    contexts: BagelContexts
    noise: list[Tensor]

    @property
    def key(self) -> str:
        return self.request.request_id


def fill_params(params: OmniDiffusionSamplingParams, prompt: Prompt) -> None:
    """Put the published defaults where a request leaves the choice to the model."""
    edit = not isinstance(prompt, str) and any(not isinstance(item, str) for item in prompt)
    defaults = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
    for name, own in _FIELDS.items():
        if getattr(params, name) is None:
            setattr(params, name, getattr(defaults, own))


def denoise_params(params: OmniDiffusionSamplingParams) -> DenoiseParams:
    """The wishes of a request as this model takes them.

    Raises:
        SchemaError: it cannot do one of them.
    """
    if params.lora_int_id is not None:
        raise SchemaError(f"LoRA {params.lora_int_id}: this pipeline holds no adapters")
    wishes = {own: getattr(params, name) for name, own in _FIELDS.items()}
    try:
        return DenoiseParams(**{name: wish for name, wish in wishes.items() if wish is not None})
    except ValueError as error:
        raise SchemaError(str(error)) from error


def generate(
    pipeline: BagelSteps,
    batch: DiffusionRequestBatch,
    read: Callable[[OmniDiffusionRequest], BagelContexts],
) -> tuple[list[DiffusionOutput], BagelContexts | None]:
    """One output for each request; images of one size go through the model together.

    What one request lacks is its own error. One that is cancelled ends when the batch does, so that
    its mates' images do not depend on it; when all are cancelled, the batch ends at once.

    Args:
        read: the contexts of a request whose prompt is to be read here.

    Returns:
        The outputs in the batch's order, and the contexts of the last request painted.
    """
    outputs: dict[str, DiffusionOutput] = {}
    jobs: list[_Job] = []
    for request in batch:
        try:
            params = denoise_params(request.sampling_params)
            jobs.append(_prepared(pipeline, request, params, read))
        except Exception as error:
            outputs[request.request_id] = _failed(request.request_id, error)
    _settle(pipeline, outputs)
    jobs = [job for job in jobs if job.key not in outputs]
    for shape in dict.fromkeys(job.contexts.image_shape for job in jobs):
        group = [job for job in jobs if job.contexts.image_shape == shape]
        painted = _painted(pipeline, group, params)
        _settle(pipeline, painted)
        outputs.update(painted)
    last = jobs[-1].contexts if jobs else None
    return [outputs[request_id] for request_id in batch.request_ids], last


def _prepared(
    pipeline: BagelSteps,
    request: OmniDiffusionRequest,
    params: DenoiseParams,
    read: Callable[[OmniDiffusionRequest], BagelContexts],
) -> _Job:
    contexts, wishes = request.past_key_values, request.sampling_params
    if contexts is None:
        if request.need_kv_receive or pipeline.stage != "all":
            raise SchemaError(f"request {request.request_id!r} came without its KV cache")
        wishes.generator = torch.Generator().manual_seed(wishes.seed or 0)
        contexts = request.past_key_values = read(request)
    if not isinstance(contexts, BagelContexts):
        raise SchemaError(f"past_key_values is a {type(contexts).__name__}, wanted BagelContexts")
    if wishes.generator is None:
        raise SchemaError(f"request {request.request_id!r}: its KV came without a generator")
    noise = [
        pipeline.initial_noise(contexts.image_shape, wishes.generator)
        for _ in range(wishes.num_outputs_per_prompt)
    ]
    pipeline.check_request(contexts, noise[0], params)
    return _Job(request, contexts, noise)


def _painted(
    pipeline: BagelSteps, jobs: Sequence[_Job], params: DenoiseParams
) -> dict[str, DiffusionOutput]:
    rows = [(job.contexts, noise) for job in jobs for noise in job.noise]

    def on_step(done: int, total: int) -> None:
        if all(job.request.is_cancelled() for job in jobs):
            raise RequestAborted(f"aborted after {done} of {total} denoising steps")

    try:
        contexts, noise = zip(*rows, strict=True)
        latents = iter(pipeline.denoise_batch(contexts, noise, params, on_step))
        images = {
            job.key: torch.stack([pipeline.decode(next(latents)) for _ in job.noise])
            for job in jobs
            if pipeline.hooks.decode
        }
    except Exception as error:
        return {job.key: _failed(job.key, error) for job in jobs}
    return {
        job.key: _failed(job.key, RequestAborted("aborted while its batch was painted"))
        if job.request.is_cancelled()
        else DiffusionOutput(job.key, images.get(job.key), text=job.contexts.text)
        for job in jobs
    }


def _settle(pipeline: BagelSteps, outputs: dict[str, DiffusionOutput]) -> None:
    """What failed on one of several ranks has failed on all."""
    if pipeline.hooks.settle is None:
        return
    errors = {key: output.error for key, output in outputs.items() if output.error is not None}
    for key, error in pipeline.hooks.settle(errors).items():
        outputs[key] = _failed(key, error)


def _failed(request_id: str, error: Exception) -> DiffusionOutput:
    if not isinstance(error, KVLinkError):
        cause, error = error, RequestFailed(f"request {request_id!r} failed: {error!r}")
        error.__cause__ = cause
    return DiffusionOutput(request_id, error=error)
