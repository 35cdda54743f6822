"""Runs a batch of engine requests on a BAGEL pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omni_kvlink.engine.errors import RequestAborted, RequestFailed
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.errors import KVLinkError, SchemaError
from omni_kvlink.models.bagel.cache import BagelContexts
from omni_kvlink.models.bagel.sampling import DenoiseParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.engine.request import DiffusionRequestBatch, Prompt
    from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
    from omni_kvlink.models.bagel.pipeline import BagelPipeline

_FIELDS = {
    "guidance_scale": "cfg_text_scale",
    "guidance_scale_2": "cfg_img_scale",
    "cfg_interval": "cfg_interval",
    "cfg_renorm_type": "cfg_renorm_type",
    "cfg_renorm_min": "cfg_renorm_min",
    "timestep_shift": "timestep_shift",
    "num_inference_steps": "num_timesteps",
}
"""Sampling params: the engine's names, and BAGEL's."""


@dataclass
class _PreparedRequest:
    """A request with its contexts, and noise for each of its images."""

    request: OmniDiffusionRequest
    contexts: BagelContexts
    noise: list[Tensor]

    @property
    def key(self) -> str:
        return self.request.request_id


def fill_params(params: OmniDiffusionSamplingParams, prompt: Prompt) -> None:
    """Set the params that are None to the published defaults for the kind of prompt."""
    edit = not isinstance(prompt, str) and any(not isinstance(item, str) for item in prompt)
    defaults = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
    for name, own in _FIELDS.items():
        if getattr(params, name) is None:
            setattr(params, name, getattr(defaults, own))


def denoise_params(params: OmniDiffusionSamplingParams) -> DenoiseParams:
    """Sampling params in BAGEL's form.

    Raises:
        SchemaError: the model does not support one of them.
    """
    if params.lora_int_id is not None:
        raise SchemaError(f"LoRA {params.lora_int_id}: this pipeline holds no adapters")
    values = {own: getattr(params, name) for name, own in _FIELDS.items()}
    try:
        return DenoiseParams(**{own: value for own, value in values.items() if value is not None})
    except ValueError as error:
        raise SchemaError(str(error)) from error


def generate(
    pipeline: BagelPipeline,
    batch: DiffusionRequestBatch,
    read: Callable[[OmniDiffusionRequest], BagelContexts],
) -> tuple[list[DiffusionOutput], BagelContexts | None]:
    """Generate the images of a batch; those of one size are denoised together.

    A request's error is in its own output. A cancelled request stays in the batch until the batch
    ends, so that other images do not depend on it; when all are cancelled, the batch ends at once.

    Args:
        pipeline: the loaded model.
        batch: the requests.
        read: reads the prompt of a request without KV; returns its contexts.

    Returns:
        The outputs in the batch's order, and the contexts of the last request denoised.
    """
    outputs: dict[str, DiffusionOutput] = {}
    jobs: list[_PreparedRequest] = []
    for request in batch:
        try:
            params = denoise_params(request.sampling_params)
            jobs.append(_prepared(pipeline, request, params, read))
        except Exception as error:  # noqa: PERF203 - each request has its own error
            outputs[request.request_id] = _failed(request.request_id, error)
    _settle(pipeline, outputs)
    jobs = [job for job in jobs if job.key not in outputs]
    for shape in dict.fromkeys(job.contexts.image_shape for job in jobs):
        group = [job for job in jobs if job.contexts.image_shape == shape]
        denoised = _denoise(pipeline, group, params)
        _settle(pipeline, denoised)
        outputs.update(denoised)
    last = jobs[-1].contexts if jobs else None
    return [outputs[request_id] for request_id in batch.request_ids], last


def _prepared(
    pipeline: BagelPipeline,
    request: OmniDiffusionRequest,
    params: DenoiseParams,
    read: Callable[[OmniDiffusionRequest], BagelContexts],
) -> _PreparedRequest:
    contexts, own = request.past_key_values, request.sampling_params
    if contexts is None:
        if request.need_kv_receive or pipeline.stage != "all":
            raise SchemaError(f"request {request.request_id!r} came without its KV cache")
        own.generator = torch.Generator().manual_seed(own.seed or 0)
        contexts = request.past_key_values = read(request)
    if not isinstance(contexts, BagelContexts):
        raise SchemaError(f"past_key_values is a {type(contexts).__name__}, not BagelContexts")
    if own.generator is None:
        raise SchemaError(f"request {request.request_id!r}: its KV came without a generator")
    noise = [
        pipeline.initial_noise(contexts.image_shape, own.generator)
        for _ in range(own.num_outputs_per_prompt)
    ]
    pipeline.check_request(contexts, noise[0], params)
    return _PreparedRequest(request, contexts, noise)


def _denoise(
    pipeline: BagelPipeline, jobs: Sequence[_PreparedRequest], params: DenoiseParams
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
        job.key: _failed(job.key, RequestAborted("aborted while its batch ran"))
        if job.request.is_cancelled()
        else DiffusionOutput(job.key, images.get(job.key), text=job.contexts.text)
        for job in jobs
    }


def _settle(pipeline: BagelPipeline, outputs: dict[str, DiffusionOutput]) -> None:
    """If several ranks share the batch, add the errors of the others."""
    if pipeline.hooks.sync_errors is None:
        return
    errors = {key: output.error for key, output in outputs.items() if output.error is not None}
    for key, error in pipeline.hooks.sync_errors(errors).items():
        outputs[key] = _failed(key, error)


def _failed(request_id: str, error: Exception) -> DiffusionOutput:
    if not isinstance(error, KVLinkError):
        cause, error = error, RequestFailed(f"request {request_id!r} failed: {error!r}")
        error.__cause__ = cause
    return DiffusionOutput(request_id, error=error)
