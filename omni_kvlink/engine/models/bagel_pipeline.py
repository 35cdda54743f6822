"""`OmniBagelPipeline`: runs batches of engine requests on a BAGEL pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omni_kvlink.engine.errors import RequestAborted, RequestFailed
from omni_kvlink.engine.inputs.prompt import EmbedsPrompt
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.errors import KVLinkError, SchemaError
from omni_kvlink.models.bagel.cache import BagelContexts
from omni_kvlink.models.bagel.pipeline import BagelPipeline
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

    @property
    def key(self) -> str:
        return self.request.request_id


def fill_params(params: OmniDiffusionSamplingParams, prompt: Prompt) -> None:
    """Set the params that are None to the published defaults for the kind of prompt.

    Raises SchemaError if the prompt is not made of texts and images.
    """
    items = readable(prompt)
    edit = not isinstance(items, str) and any(not isinstance(item, str) for item in items)
    defaults = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
    for name, own in _FIELDS.items():
        if getattr(params, name) is None:
            setattr(params, name, getattr(defaults, own))


def readable(prompt: Prompt) -> str | Tensor | Sequence[str | Tensor]:
    """The prompt's texts and images; raises SchemaError if it has embeddings."""
    if isinstance(prompt, EmbedsPrompt):
        raise SchemaError(
            "prompt_embeds: BAGEL reads texts and images into its KV cache, and no embeddings; "
            "give the text"
        )
    return prompt


_UNSUPPORTED = {
    "num_frames": "BAGEL generates images, and no videos",
    "extra_args": "BAGEL has no other params",
    "lora_int_id": "this pipeline holds no adapters",
    "true_cfg_scale": "BAGEL has guidance_scale for the text and guidance_scale_2 for images",
    "negative_prompt": "BAGEL is guided away from no prompt at all, not from another one",
}


def denoise_params(params: OmniDiffusionSamplingParams) -> DenoiseParams:
    """Sampling params in BAGEL's form; SchemaError if the model does not support one of them."""
    for name, reason in _UNSUPPORTED.items():
        if (value := getattr(params, name)) is not None:
            raise SchemaError(f"{name} {value!r:.60}: {reason}")
    values = {own: getattr(params, name) for name, own in _FIELDS.items()}
    try:
        return DenoiseParams(**{own: value for own, value in values.items() if value is not None})
    except ValueError as error:
        raise SchemaError(str(error)) from error


class OmniBagelPipeline(BagelPipeline):
    """A `BagelPipeline` that is a `DiffusionPipeline`."""

    supports_request_batch = True

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Generate the images of a request, or of a batch; those of one size are denoised together.

        A request's error is in its own output. A cancelled request stays in the batch until that
        ends, so that other images do not depend on it; when all are cancelled, it ends at once.
        """
        batch = req if isinstance(req, DiffusionRequestBatch) else DiffusionRequestBatch([req])
        outputs: dict[str, DiffusionOutput] = {}
        jobs: list[_PreparedRequest] = []
        for request in batch:
            try:
                params = denoise_params(request.sampling_params)
                jobs.append(self._prepare(request, params))
            except Exception as error:  # noqa: PERF203 - each request has its own error
                outputs[request.request_id] = _failed(request.request_id, error)
        self._settle(outputs)
        jobs = [job for job in jobs if job.key not in outputs]
        for shape in dict.fromkeys(job.contexts.image_shape for job in jobs):
            group = [job for job in jobs if job.contexts.image_shape == shape]
            denoised = self._denoise(group, params)
            self._settle(denoised)
            outputs.update(denoised)
        self._last = jobs[-1].contexts if jobs else None
        return [outputs[request_id] for request_id in batch.request_ids]

    def _prepare(self, request: OmniDiffusionRequest, params: DenoiseParams) -> _PreparedRequest:
        contexts, own = request.past_key_values, request.sampling_params
        if contexts is None:
            if request.need_kv_receive or self.stage != "all":
                raise SchemaError(f"request {request.request_id!r} came without its KV cache")
            own.generator = torch.Generator().manual_seed(own.seed or 0)
            shape = None if own.height is None else (own.height, own.width or own.height)
            prompt = readable(request.prompt)
            contexts = self.prefill(prompt, image_shape=shape, generator=own.generator)
            request.past_key_values = contexts
        if not isinstance(contexts, BagelContexts):
            raise SchemaError(f"past_key_values is a {type(contexts).__name__}, not BagelContexts")
        if own.generator is None:
            raise SchemaError(f"request {request.request_id!r}: its KV came without a generator")
        if own.latents is None:
            noise = [
                self.initial_noise(contexts.image_shape, own.generator)
                for _ in range(own.num_outputs_per_prompt)
            ]
        else:
            noise = list(own.latents.float().unbind())
        self.check_request(contexts, noise[0], params)
        return _PreparedRequest(request, contexts, noise)

    def _denoise(
        self, jobs: Sequence[_PreparedRequest], params: DenoiseParams
    ) -> dict[str, DiffusionOutput]:
        rows = [(job.contexts, noise) for job in jobs for noise in job.noise]

        def on_step(done: int, total: int) -> None:
            if all(job.request.is_cancelled() for job in jobs):
                raise RequestAborted(f"aborted after {done} of {total} denoising steps")

        try:
            contexts, noise = zip(*rows, strict=True)
            latents = iter(self.denoise_batch(contexts, noise, params, on_step))
            images = {
                job.key: torch.stack([self.decode(next(latents)) for _ in job.noise])
                for job in jobs
                if self.hooks.decode
            }
        except Exception as error:
            return {job.key: _failed(job.key, error) for job in jobs}
        return {
            job.key: _failed(job.key, RequestAborted("aborted while its batch ran"))
            if job.request.is_cancelled()
            else DiffusionOutput(job.key, images.get(job.key), text=job.contexts.text)
            for job in jobs
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
