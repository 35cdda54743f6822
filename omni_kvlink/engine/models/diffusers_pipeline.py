"""`DiffusersPipeline`: a pipeline of diffusers with the interface of the engine."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.errors import EngineError, RequestAborted, RequestFailed
from omni_kvlink.engine.lora.adapter import LoRATarget, LoRATargets
from omni_kvlink.engine.lora.request import LORA_PARAMS
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.engine.sampling import KEY_FIELDS, TEXT_PARAMS, OmniDiffusionSamplingParams
from omni_kvlink.errors import KVLinkError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMES = {"num_outputs_per_prompt": "num_images_per_prompt"}
"""Sampling params that diffusers calls by another name."""


class DiffusersPipeline:
    """Generates images for texts; all noise of a request comes from a generator with its seed.

    The pipeline of diffusers takes a `prompt` and a `generator`, and returns `images`.
    `supports_request_batch` says whether it takes lists of prompts and generators.
    """

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.name = type(pipe).__name__
        self._parameters = inspect.signature(type(pipe).__call__).parameters
        lacking = {"prompt", "generator", "output_type"} - self._parameters.keys()
        if lacking:
            raise EngineError(f"{self.name} takes no {', '.join(sorted(lacking))}: choose another")
        self.supports_request_batch = self._takes_list("prompt") and self._takes_list("generator")
        pipe.set_progress_bar_config(disable=True)

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The networks by name."""
        components = self.pipe.components.items()
        return {name: each for name, each in components if isinstance(each, torch.nn.Module)}

    def lora_targets(self, device: torch.device) -> LoRATargets | None:
        """The denoiser's linear layers; None if the pipeline has no `transformer` or `unet`."""
        modules = self.modules()
        name = next((one for one in ("transformer", "unet") if one in modules), None)
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
            self.text_of(request)
            self.arguments_of(request.sampling_params)
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
        return [self._output(*pair) for pair in zip(requests, images, strict=True)]

    def _run(self, requests: Sequence[OmniDiffusionRequest]) -> tuple[torch.Tensor, ...]:
        """Each request's images, float [num_outputs_per_prompt, H, W, 3] from 0 to 1."""

        def on_step_end(pipe: Any, step: int, time: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if all(request.is_cancelled() for request in requests):
                raise RequestAborted(f"aborted after step {step + 1}")
            return kept

        params = requests[0].sampling_params
        each = params.num_outputs_per_prompt
        texts = [self.text_of(request) for request in requests]
        # A request's images draw from one generator in turn, whatever else is in the batch.
        noise = [random for request in requests for random in [_generator(request)] * each]
        many = self.supports_request_batch
        how: dict[str, Any] = {
            "prompt": texts if many else texts[0],
            "generator": noise if many else noise[0],
            "output_type": "np",
            **self.arguments_of(params),
        }
        if many and "negative_prompt" in how:
            how["negative_prompt"] = [how["negative_prompt"]] * len(texts)
        if "callback_on_step_end" in self._parameters:
            how["callback_on_step_end"] = on_step_end
        found = getattr(self.pipe(**how), "images", None)
        if found is None:
            raise EngineError(f"{self.name} gives no images")
        images = torch.as_tensor(found).float().cpu()
        if len(images) != each * len(requests):
            raise EngineError(f"{self.name} gave {len(images)} images, not {each * len(requests)}")
        return images.reshape(-1, each, *images.shape[1:]).unbind()

    def _output(self, request: OmniDiffusionRequest, images: torch.Tensor) -> DiffusionOutput:
        params, size = request.sampling_params, images.shape[1:3]
        expected = params.height or size[0], params.width or size[1]
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

    def text_of(self, request: OmniDiffusionRequest) -> str:
        """The text that the pipeline reads; raises SchemaError unless the prompt is just one."""
        prompt = request.prompt
        items = [prompt] if isinstance(prompt, (str, torch.Tensor)) else list(prompt)
        if len(items) == 1 and isinstance(items[0], str):
            return items[0]
        raise SchemaError(f"request {request.request_id!r}: a pipeline of diffusers reads one text")

    def arguments_of(self, params: OmniDiffusionSamplingParams) -> dict[str, Any]:
        """The sampling params that are set, as arguments of the pipeline.

        Raises:
            EngineError: the pipeline takes no such argument.
            SchemaError: one of `true_cfg_scale` and `negative_prompt` would have no effect.
        """
        default, found = OmniDiffusionSamplingParams(), {}
        for field in sorted(TEXT_PARAMS - {"stream"}):
            if getattr(params, field) != getattr(default, field):
                raise EngineError(f"{self.name} writes no text: leave {field} as it is")
        for field in [name for name in KEY_FIELDS if name not in LORA_PARAMS]:
            value, name = getattr(params, field), _NAMES.get(field, field)
            if value == getattr(default, field):
                continue
            if name not in self._parameters:
                raise EngineError(f"{self.name} takes no {name}: leave {field} as it is")
            found[name] = value
        scale = found.get("true_cfg_scale")
        if scale is not None and scale > 1 and "negative_prompt" not in found:
            raise SchemaError("true_cfg_scale has no effect without a negative_prompt: give ' '")
        if scale is not None and scale <= 1 and "negative_prompt" in found:
            raise SchemaError(
                f"negative_prompt has no effect with true_cfg_scale {scale:g}: give more than 1"
            )
        return found

    def _takes_list(self, name: str) -> bool:
        return "list[" in str(self._parameters[name].annotation).lower()


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


def _aborted(request: OmniDiffusionRequest) -> RequestAborted:
    return RequestAborted(f"request {request.request_id!r} was aborted")
