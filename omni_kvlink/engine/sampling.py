"""Sampling params of a request, and which of them decide whether requests share a batch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import torch

from omni_kvlink.engine.inputs.prompt import check_values, comparable
from omni_kvlink.engine.lora.request import LoRARequest, checked_id
from omni_kvlink.engine.tokens.sampling import TEXT_DEFAULTS, TextSamplingParams, check_text_params
from omni_kvlink.settings import Instance, Integer


@dataclasses.dataclass
class OmniDiffusionSamplingParams(TextSamplingParams):
    """The parameters by which an image, or a text, is generated; None leaves one to the model."""

    height: int | None = None  # in pixels
    width: int | None = None
    num_frames: Annotated[int, Integer(1)] | None = None  # of a video
    num_inference_steps: int | None = None  # points of the denoising schedule
    guidance_scale: float | None = None  # by the text: BAGEL's cfg_text_scale
    guidance_scale_2: float | None = None  # by the images of the prompt: its cfg_img_scale
    true_cfg_scale: float | None = None  # by a negative prompt, of diffusers' pipelines that say so
    negative_prompt: str | None = None  # what an image is led away from, of diffusers' pipelines
    cfg_interval: tuple[float, float] | None = None  # (low, high] times that are guided
    cfg_renorm_type: str | None = None  # this and the next two: as in `DenoiseParams`
    cfg_renorm_min: float | None = None
    timestep_shift: float | None = None
    num_outputs_per_prompt: Annotated[int, Integer(1)] = 1  # images, each from noise of its own
    seed: int | None = None  # of everything random in the request; drawn if None
    lora_request: Annotated[LoRARequest, Instance(LoRARequest)] | None = None  # loaded if need be
    lora_int_id: int | None = None  # its number; alone, of an adapter that was added before
    lora_scale: float = 1.0  # how strongly the adapter acts; 0 for not at all
    extra_args: Annotated[dict[str, Any], Instance(dict)] | None = None  # JSON, for the pipeline
    latents: Annotated[torch.Tensor, Instance(torch.Tensor)] | None = None  # noise of all outputs
    generator: Annotated[torch.Generator, Instance(torch.Generator)] | None = None  # here only

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(getattr(self, name) != default for name, default in TEXT_DEFAULTS.items()):
            check_text_params(self)
        if self.lora_request is not None or self.lora_scale != 1.0:
            self.lora_int_id = checked_id(self.lora_request, self.lora_int_id, self.lora_scale)
        if self.latents is not None or self.extra_args is not None:
            check_values(self.latents, self.extra_args, self.num_outputs_per_prompt)


TEXT_PARAMS = frozenset(TEXT_DEFAULTS.keys() - {"modalities"})
"""The params of a request's text, which may differ within a batch."""

PIPELINE_PARAMS = frozenset(
    ("true_cfg_scale", "negative_prompt", "num_frames", "extra_args", "latents")
)
"""The params of diffusers' pipelines, which an AR stage has no use for."""

_NAMES = [field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)]
KEY_FIELDS = tuple(name for name in _NAMES if name not in TEXT_PARAMS | {"seed", "generator"})
"""The params that requests of one batch have in common."""
_OWN_STEPS = {"num_inference_steps", "timestep_shift", "num_outputs_per_prompt", "latents"}
STEP_KEY_FIELDS = tuple(name for name in KEY_FIELDS if name not in _OWN_STEPS)
"""The params that requests of one denoising step have in common."""


class SamplingParamsKey(tuple[object, ...]):
    """The values of `KEY_FIELDS`, of a tensor its shape and dtype.

    Requests with equal keys may share a batch.
    """

    @classmethod
    def of(
        cls, params: OmniDiffusionSamplingParams, fields: tuple[str, ...] = KEY_FIELDS
    ) -> SamplingParamsKey:
        """The key of sampling params."""
        values = [getattr(params, name) for name in fields]
        return cls(
            comparable(item) if isinstance(item, (dict, torch.Tensor)) else item for item in values
        )
