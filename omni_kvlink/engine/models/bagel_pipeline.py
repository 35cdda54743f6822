"""`OmniBagelPipeline`: runs batches of engine requests on a BAGEL pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omni_kvlink.engine.errors import RequestAborted, RequestFailed
from omni_kvlink.engine.models.bagel_text import (
    plan_options,
    readable,
    text_fields,
    write_answers,
)
from omni_kvlink.engine.models.step_emitter import StepEmitter
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.errors import KVLinkError, SchemaError
from omni_kvlink.models.bagel.cache import BagelContexts
from omni_kvlink.models.bagel.denoise import DenoiseState
from omni_kvlink.models.bagel.pipeline import BagelPipeline
from omni_kvlink.models.bagel.prompts import is_text, prompt_items
from omni_kvlink.models.bagel.sampling import DenoiseParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.engine.inputs.prompt import Prompt
    from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams

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
    params: DenoiseParams

    @property
    def key(self) -> str:
        return self.request.request_id


@dataclass
class BagelStepState:
    """A request between two denoising steps: its images, which are at the same step."""

    request: OmniDiffusionRequest
    images: list[DenoiseState]

    @property
    def denoise_completed(self) -> bool:
        """Whether all steps are done."""
        return all(image.is_done for image in self.images)


def fill_params(params: OmniDiffusionSamplingParams, prompt: Prompt) -> None:
    """Set the params that are None to the published defaults for the kind of prompt.

    Raises SchemaError if the prompt is not made of texts and images.
    """
    edit = not all(map(is_text, prompt_items(readable(prompt))))
    defaults = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
    for name, field in _FIELDS.items():
        if getattr(params, name) is None:
            setattr(params, name, getattr(defaults, field))


_UNSUPPORTED = {
    "num_frames": "BAGEL generates images, and no videos",
    "extra_args": "BAGEL has no other params",
    "true_cfg_scale": "BAGEL has guidance_scale for the text and guidance_scale_2 for images",
    "negative_prompt": "BAGEL is guided away from no prompt at all, not from another one",
}


def denoise_params(params: OmniDiffusionSamplingParams) -> DenoiseParams:
    """Sampling params in BAGEL's form; SchemaError if the model does not support one of them."""
    for name, reason in _UNSUPPORTED.items():
        if (value := getattr(params, name)) is not None:
            raise SchemaError(f"{name} {value!r:.60}: {reason}")
    values = {field: getattr(params, name) for name, field in _FIELDS.items()}
    try:
        return DenoiseParams(**{key: value for key, value in values.items() if value is not None})
    except ValueError as error:
        raise SchemaError(str(error)) from error


class OmniBagelPipeline(BagelPipeline):
    """A `BagelPipeline` that is a `DiffusionPipeline`."""

    supports_request_batch = True
    supports_step_execution = True

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Generate the images of a request, or of a batch; those of one size are denoised together.

        Where only texts are wanted, they are written together; see `write_answers`.

        A request's error is in its own output. A cancelled request stays in the batch until that
        ends, so that other images do not depend on it; when all are cancelled, it ends at once.
        """
        batch = req if isinstance(req, DiffusionRequestBatch) else DiffusionRequestBatch([req])
        outputs: dict[str, DiffusionOutput] = {}
        if batch.sampling_params.modalities == ("text",) and self.stage == "all":
            outputs = write_answers(self, batch.requests)
            self._settle(outputs)
            return [outputs[request_id] for request_id in batch.request_ids]
        jobs: list[_PreparedRequest] = []
        for request in batch:
            try:
                jobs.append(self._prepare(request, denoise_params(request.sampling_params)))
            except Exception as error:  # noqa: PERF203 - each request has its own error
                outputs[request.request_id] = _failed(request.request_id, error)
        self._settle(outputs)
        jobs = [job for job in jobs if job.key not in outputs]
        for shape in dict.fromkeys(job.contexts.image_shape for job in jobs):
            group = [job for job in jobs if job.contexts.image_shape == shape]
            denoised = self._denoise(group)
            self._settle(denoised)
            outputs.update(denoised)
        self._last = jobs[-1].contexts if jobs else None
        return [outputs[request_id] for request_id in batch.request_ids]

    def prepare_encode(self, request: OmniDiffusionRequest) -> BagelStepState:
        """A request's state before its first step; reads its prompt, if its KV did not come."""
        if request.sampling_params.is_text_only:
            raise SchemaError("modalities ('text',): a stage with step_execution writes no texts")
        params = denoise_params(request.sampling_params)
        job = self._prepare(request, params)
        images = [self.begin_denoise(job.contexts, noise, params) for noise in job.noise]
        return BagelStepState(request, images)

    def denoise_step(self, states: Sequence[BagelStepState]) -> list[list[Tensor]]:
        """The flows of each request's images; images of one size are one pass."""
        images = [image for state in states for image in state.images]
        flows: dict[DenoiseState, Tensor] = {}
        for grid in dict.fromkeys(image.grid for image in images):
            group = [image for image in images if image.grid == grid]
            flows.update(zip(group, self.guided_flows(group), strict=True))
        return [[flows[image] for image in state.images] for state in states]

    def step_scheduler(self, state: BagelStepState, noise_pred: Sequence[Tensor]) -> None:
        """Take a request's next step."""
        pairs = list(zip(state.images, noise_pred, strict=True))
        steps = StepEmitter(self, [state.request], state.images[0].params.num_steps)
        clean = [image.clean(flow) for image, flow in pairs] if steps.is_needed else []
        for image, flow in pairs:
            image.integrate(flow)
        if steps.is_needed:
            steps.on_clean(state.images[0].step, clean)

    def post_decode(self, state: BagelStepState) -> DiffusionOutput:
        """Decode a request's images, which a group's leader alone has."""
        contexts = self._last = state.images[0].contexts
        output = self._decode([self.latent(image) for image in state.images])
        fields = self._text_fields(state.request, contexts)
        return DiffusionOutput(state.request.request_id, output, **fields)

    def _prepare(self, request: OmniDiffusionRequest, denoise: DenoiseParams) -> _PreparedRequest:
        contexts, params = request.past_key_values, request.sampling_params
        if params.lora_int_id is not None and request.lora is None:
            raise SchemaError(f"lora_int_id {params.lora_int_id}: a model runner must activate it")
        if contexts is None:
            if request.need_kv_receive or self.stage != "all":
                raise SchemaError(f"request {request.request_id!r} came without its KV cache")
            params.generator = torch.Generator().manual_seed(params.seed or 0)
            shape = (
                None if params.height is None else (params.height, params.width or params.height)
            )
            contexts = self.prefill(
                readable(request.prompt),
                image_shape=shape,
                generator=params.generator,
                **plan_options(self, request, think=False),
            )
            request.past_key_values = contexts
        if not isinstance(contexts, BagelContexts):
            raise SchemaError(f"past_key_values is a {type(contexts).__name__}, not BagelContexts")
        if params.generator is None:
            raise SchemaError(f"request {request.request_id!r}: its KV came without a generator")
        if params.latents is None:
            noise = [
                self.initial_noise(contexts.image_shape, params.generator)
                for _ in range(params.num_outputs_per_prompt)
            ]
        else:
            noise = list(params.latents.float().unbind())
        self.check_request(contexts, noise[0], denoise)
        return _PreparedRequest(request, contexts, noise, denoise)

    def _denoise(self, jobs: Sequence[_PreparedRequest]) -> dict[str, DiffusionOutput]:
        params = jobs[0].params  # a batch has the same ones
        rows = [(job.contexts, noise) for job in jobs for noise in job.noise]

        def on_step(done: int, total: int) -> None:
            if all(job.request.is_cancelled() for job in jobs):
                raise RequestAborted(f"aborted after {done} of {total} denoising steps")

        steps = StepEmitter(self, [job.request for job in jobs], params.num_steps)
        self.hooks.on_clean = steps.on_clean if steps.is_needed else None
        try:
            contexts, noise = zip(*rows, strict=True)
            latents = iter(self.denoise_batch(contexts, noise, params, on_step))
            images = {job.key: self._decode([next(latents) for _ in job.noise]) for job in jobs}
        except Exception as error:
            return {job.key: _failed(job.key, error) for job in jobs}
        return {
            job.key: _failed(job.key, RequestAborted("aborted while its batch ran"))
            if job.request.is_cancelled()
            else DiffusionOutput(
                job.key, images[job.key], **self._text_fields(job.request, job.contexts)
            )
            for job in jobs
        }

    def _decode(self, latents: Sequence[Tensor]) -> Tensor | None:
        """A request's images [n, H, W, 3]; None on all ranks of a group but its leader."""
        decoded = [self.decode_shared(latent) for latent in latents]
        images = [image for image in decoded if image is not None]
        return torch.stack(images) if images else None

    def _text_fields(
        self, request: OmniDiffusionRequest, contexts: BagelContexts
    ) -> dict[str, Any]:
        """The fields of an output that are read from a prompt that this pipeline has read."""
        hidden = contexts.gen.hidden
        return {
            "hidden_states": None if hidden is None else hidden.tensor().cpu(),
            **text_fields(request, self.special_tokens.eos, contexts.text),
        }

    def _settle(self, outputs: dict[str, DiffusionOutput]) -> None:
        """If several ranks share the batch, add the errors of the others."""
        if self.hooks.sync_errors is None:
            return
        errors = {key: output.error for key, output in outputs.items() if output.error is not None}
        for key, error in self.hooks.sync_errors(errors).items():
            outputs[key] = _failed(key, error)


def _failed(request_id: str, error: Exception) -> DiffusionOutput:
    if not isinstance(error, KVLinkError):
        cause, error = error, RequestFailed(f"request {request_id!r} failed: {error!r}")
        error.__cause__ = cause
    return DiffusionOutput(request_id, error=error)
