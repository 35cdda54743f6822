"""`DiffusersPipeline`: a pipeline of diffusers with the interface of the engine."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.errors import EngineError, RequestAborted, RequestFailed
from omni_kvlink.engine.inputs.prompt import EmbedsPrompt
from omni_kvlink.engine.lora.adapter import LoRATarget, LoRATargets
from omni_kvlink.engine.lora.request import LORA_PARAMS
from omni_kvlink.engine.models.images import as_pil
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.engine.sampling import KEY_FIELDS, TEXT_PARAMS, OmniDiffusionSamplingParams
from omni_kvlink.errors import KVLinkError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.step_cache.cache_backend import CacheBackend

_NEED_IMAGES = {"LongCatImageEditPipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"}
"""Pipelines whose `image` has a default, None, with which they fail."""

_SET_HERE = frozenset(
    (
        *("self", "prompt", "image", "generator", "latents", "output_type", "return_dict"),
        *("num_images_per_prompt", "num_videos_per_prompt", "callback_on_step_end"),
    )
)
"""Arguments of a pipeline that no request may set by `extra_args`."""


class DiffusersPipeline:
    """Generates images or videos for texts, or for images with a text, or for embeddings.

    The pipeline of diffusers takes a `prompt` and a `generator`, and returns `images` or `frames`.
    All noise of a request comes from a generator with its seed, if it brings no `latents`.
    `supports_request_batch` says whether the pipeline takes lists of prompts and generators; one
    that takes an `image` runs each request by itself, because diffusers' pipelines differ in what
    a list of images means.
    """

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.name = type(pipe).__name__
        self._parameters = inspect.signature(type(pipe).__call__).parameters
        lacking = {"prompt", "generator", "output_type"} - self._parameters.keys()
        if lacking:
            raise EngineError(f"{self.name} takes no {', '.join(sorted(lacking))}: choose another")
        self._takes_images = "image" in self._parameters
        lists = self._takes_list("prompt") and self._takes_list("generator")
        self.supports_request_batch = lists and not self._takes_images
        kind = "videos" if "num_videos_per_prompt" in self._parameters else "images"
        self._names = {"num_outputs_per_prompt": f"num_{kind}_per_prompt"}
        self._cache: CacheBackend | None = None
        pipe.set_progress_bar_config(disable=True)

    def use_cache(self, backend: CacheBackend | None) -> None:
        """Refresh a backend before each call; called once. Raises ValueError as its `enable`."""
        if backend is not None:
            backend.enable(self.pipe)
        self._cache = backend

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The networks by name."""
        components = self.pipe.components.items()
        return {name: module for name, module in components if isinstance(module, torch.nn.Module)}

    def lora_targets(self, device: torch.device) -> LoRATargets | None:
        """The denoiser's linear layers; None if the pipeline has no `transformer` or `unet`."""
        modules = self.modules()
        name = next((key for key in ("transformer", "unet") if key in modules), None)
        if name is None:
            return None
        layers = {
            f"{name}.{path}": LoRATarget(layer, (layer.out_features, layer.in_features))
            for path, layer in modules[name].named_modules()
            if isinstance(layer, torch.nn.Linear)
        }
        return LoRATargets(layers, device, (f"{name}.",))

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One output for each request, in their order; a request's error is in its own output.

        If a batch fails, its requests run again one by one, to find the one that caused it.
        """
        requests = list(req) if isinstance(req, DiffusionRequestBatch) else [req]
        errors = {request.request_id: self._refusal(request) for request in requests}
        ready = [request for request in requests if errors[request.request_id] is None]
        outputs = {output.request_id: output for output in self._outputs(ready)}
        return [
            outputs[key] if error is None else DiffusionOutput(key, error=error)
            for key, error in errors.items()
        ]

    def _refusal(self, request: OmniDiffusionRequest) -> KVLinkError | None:
        """Why a request cannot run; None if it can."""
        try:
            refuse_kv(request)
            if request.lora is None and request.sampling_params.lora_int_id is not None:
                raise EngineError("lora_int_id: the executor must activate the adapter")
            self.prompt_of(request)
            self.arguments_of(request)
        except KVLinkError as error:
            return error
        return _aborted(request) if request.is_cancelled() else None

    def _outputs(self, requests: Sequence[OmniDiffusionRequest]) -> list[DiffusionOutput]:
        if not requests:
            return []
        try:
            images = list(self._run(requests))
        except Exception as error:
            if len(requests) > 1 and not isinstance(error, RequestAborted):
                return [output for request in requests for output in self.forward(request)]
            if not isinstance(error, KVLinkError):
                cause, error = error, RequestFailed(f"{self.name} failed: {error!r}")
                error.__cause__ = cause
            return [DiffusionOutput(request.request_id, error=error) for request in requests]
        outputs = [self._output(*pair) for pair in zip(requests, images, strict=True)]
        if self._cache is not None:
            for output in outputs:
                output.cached_steps = self._cache.cached_steps(self.pipe)
        return outputs

    def _run(self, requests: Sequence[OmniDiffusionRequest]) -> tuple[torch.Tensor, ...]:
        """Each request's images or videos, float [num_outputs_per_prompt, …, H, W, 3], 0 to 1."""

        def on_step_end(pipe: Any, step: int, time: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if all(request.is_cancelled() for request in requests):
                raise RequestAborted(f"aborted after step {step + 1}")
            return kept

        num_images = requests[0].sampling_params.num_outputs_per_prompt
        # A request's images draw from one generator in turn, whatever else is in the batch.
        noise = [random for request in requests for random in [_generator(request)] * num_images]
        arguments: dict[str, Any] = {
            **self._prompts(requests),
            "generator": noise if self.supports_request_batch else noise[0],
            "output_type": "np",
        }
        if "latents" in arguments:
            arguments["latents"] = torch.cat([_latents(request) for request in requests])
        if self.supports_request_batch and "negative_prompt" in arguments:
            arguments["negative_prompt"] = [arguments["negative_prompt"]] * len(requests)
        if "callback_on_step_end" in self._parameters:
            arguments["callback_on_step_end"] = on_step_end
        if self._cache is not None:
            self._cache.refresh(self.pipe, self._steps(arguments))
        images = self._images_of(self.pipe(**arguments))
        if len(images) != num_images * len(requests):
            raise EngineError(
                f"{self.name} gave {len(images)} images, not {num_images * len(requests)}"
            )
        return images.reshape(-1, num_images, *images.shape[1:]).unbind()

    def _prompts(self, requests: Sequence[OmniDiffusionRequest]) -> dict[str, Any]:
        """The arguments of the call that requests of one key share, and their prompts."""
        prompts = [self.prompt_of(request) for request in requests]
        arguments = {**prompts[0], **self.arguments_of(requests[0])}
        for name, value in prompts[0].items():
            if isinstance(value, torch.Tensor):
                arguments[name] = torch.cat([prompt[name] for prompt in prompts])
            elif name == "prompt" and self.supports_request_batch:
                arguments[name] = [prompt[name] for prompt in prompts]
        return arguments

    def _steps(self, arguments: Mapping[str, Any]) -> int:
        """The number of denoising steps of a call with these arguments."""
        if arguments.get("sigmas") is not None:
            return len(arguments["sigmas"])
        default = self._parameters.get("num_inference_steps")
        return int(arguments.get("num_inference_steps", 0 if default is None else default.default))

    def _images_of(self, output: Any) -> torch.Tensor:
        """The images [n, H, W, 3] or videos [n, frames, H, W, 3] of a pipeline's output, float."""
        images = getattr(output, "images", None)
        images = getattr(output, "frames", None) if images is None else images
        if images is None:
            raise EngineError(f"{self.name} gives no images and no frames")
        if getattr(output, "audio", None) is not None:
            raise EngineError(f"{self.name} gives audio, too, which has no place in an output")
        return torch.as_tensor(images).float().cpu()

    def _output(self, request: OmniDiffusionRequest, images: torch.Tensor) -> DiffusionOutput:
        params, size = request.sampling_params, images.shape[1:-1]
        sizes = {-3: params.num_frames, -2: params.height, -1: params.width}
        expected = tuple(sizes[axis - len(size)] or size[axis] for axis in range(len(size)))
        error: EngineError | None = None
        if request.is_cancelled():
            error = _aborted(request)
        elif not images.isfinite().all():
            error = RequestFailed(f"{self.name} computed NaN or infinity: try dtype float32")
        elif tuple(size) != expected:
            error = RequestFailed(
                f"{self.name} makes {tuple(size)}, not {expected}: request that size"
            )
        if error is not None:
            return DiffusionOutput(request.request_id, error=error)
        levels = images.clamp(0, 1).mul(255).round().to(torch.uint8)
        return DiffusionOutput(request.request_id, levels)

    def prompt_of(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        """The prompt as arguments of the pipeline: `prompt` or embeddings, and `image`.

        Raises:
            SchemaError: the prompt has not just one text, or images that the pipeline does not
                take, or none where it needs one; or it has embeddings of an unknown name.
        """
        prompt, label = request.prompt, f"request {request.request_id!r}"
        arguments: dict[str, Any]
        if isinstance(prompt, EmbedsPrompt):
            images, arguments = list(prompt.images), dict(prompt.tensors)
            if unknown := sorted(arguments.keys() - self._parameters.keys()):
                raise SchemaError(f"{label}: {self.name} takes no {', '.join(unknown)}")
        else:
            images = [item for item in _items(prompt) if isinstance(item, torch.Tensor)]
            arguments = {"prompt": self.text_of(request)}
        if images and not self._takes_images:
            raise SchemaError(f"{label}: {self.name} takes no images: give one text alone")
        if images:
            pictures = [as_pil(image) for image in images]
            arguments["image"] = pictures[0] if len(pictures) == 1 else pictures
        elif self._needs_images():
            raise SchemaError(f"{label}: {self.name} reads an image: give [image, text]")
        return arguments

    def _needs_images(self) -> bool:
        has_default = self._parameters["image"].default if self._takes_images else None
        return has_default is inspect.Parameter.empty or self.name in _NEED_IMAGES

    def text_of(self, request: OmniDiffusionRequest) -> str:
        """The text that the pipeline reads; SchemaError unless the prompt has just one."""
        rest = [item for item in _items(request.prompt) if not isinstance(item, torch.Tensor)]
        if len(rest) == 1 and isinstance(rest[0], str):
            return rest[0]
        raise SchemaError(f"request {request.request_id!r}: a pipeline of diffusers reads one text")

    def arguments_of(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        """The sampling params that are set, as arguments of the pipeline.

        Raises:
            EngineError: the pipeline takes no such argument.
            SchemaError: one of `true_cfg_scale` and `negative_prompt` would have no effect.
        """
        params = request.sampling_params
        default, arguments = OmniDiffusionSamplingParams(), {}
        for field in sorted(TEXT_PARAMS - {"stream"}):
            if getattr(params, field) != getattr(default, field):
                raise EngineError(f"{self.name} writes no text: leave {field} as it is")
        for field in [key for key in KEY_FIELDS if key not in {*LORA_PARAMS, "extra_args"}]:
            value, name = getattr(params, field), self._names.get(field, field)
            if value == getattr(default, field):
                continue
            if name not in self._parameters:
                raise EngineError(f"{self.name} takes no {name}: leave {field} as it is")
            arguments[name] = value
        arguments |= self._extra_args(params, arguments)
        prompt, scale = request.prompt, arguments.get("true_cfg_scale")
        embeds = isinstance(prompt, EmbedsPrompt) and "negative_prompt_embeds" in prompt.tensors
        if embeds and "negative_prompt" in arguments:
            raise SchemaError("negative_prompt and negative_prompt_embeds: give one of them")
        is_led = embeds or "negative_prompt" in arguments
        if scale is not None and scale > 1 and not is_led:
            raise SchemaError("true_cfg_scale has no effect without a negative_prompt: give ' '")
        if scale is not None and scale <= 1 and is_led:
            raise SchemaError(
                f"negative_prompt has no effect with true_cfg_scale {scale:g}: give more than 1"
            )
        return arguments

    def _extra_args(
        self, params: OmniDiffusionSamplingParams, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`extra_args`; raises EngineError if one is not the pipeline's, or the engine sets it."""
        extra_args, reserved_names = params.extra_args or {}, _SET_HERE | arguments.keys()
        if wrong := sorted(extra_args.keys() & reserved_names):
            raise EngineError(f"extra_args {', '.join(wrong)}: set by the engine or another param")
        if wrong := sorted(extra_args.keys() - self._parameters.keys()):
            raise EngineError(f"{self.name} takes no {', '.join(wrong)}: take it out of extra_args")
        return dict(extra_args)

    def _takes_list(self, name: str) -> bool:
        return "list[" in str(self._parameters[name].annotation).lower()


def _items(prompt: Any) -> list[Any]:
    return [prompt] if isinstance(prompt, (str, torch.Tensor, EmbedsPrompt)) else list(prompt)


def refuse_kv(request: OmniDiffusionRequest) -> None:
    """Raises EngineError if the request needs KV."""
    if request.need_kv_receive or request.need_kv_transfer:
        raise EngineError(
            f"request {request.request_id!r} needs KV, and a pipeline of diffusers neither receives"
            " nor sends any: use distributed_executor_backend 'uni' or 'mp'"
        )


def _generator(request: OmniDiffusionRequest) -> torch.Generator:
    """A new generator, so that a second run has the same noise; on the CPU, for any device."""
    params = request.sampling_params
    if params.generator is not None:
        return params.generator.clone_state()
    assert params.seed is not None  # OmniDiffusionRequest draws one
    return torch.Generator().manual_seed(params.seed)


def _latents(request: OmniDiffusionRequest) -> torch.Tensor:
    latents = request.sampling_params.latents
    assert latents is not None  # requests of one key have them, or none has
    return latents


def _aborted(request: OmniDiffusionRequest) -> RequestAborted:
    return RequestAborted(f"request {request.request_id!r} was aborted")
