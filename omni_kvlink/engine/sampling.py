"""Sampling params of a request, and which of them decide whether requests share a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from omni_kvlink.engine.inputs.values import check_values, comparable


@dataclasses.dataclass
class OmniDiffusionSamplingParams:
    """How an image is to be generated; None leaves a choice to the model."""

    height: int | None = None  # in pixels
    width: int | None = None
    num_frames: int | None = None  # of a video
    num_inference_steps: int | None = None  # points of the denoising schedule
    guidance_scale: float | None = None  # by the text: BAGEL's cfg_text_scale
    guidance_scale_2: float | None = None  # by the images of the prompt: its cfg_img_scale
    true_cfg_scale: float | None = None  # by a negative prompt, of diffusers' pipelines that say so
    negative_prompt: str | None = None  # what an image is led away from, of diffusers' pipelines
    cfg_interval: tuple[float, float] | None = None  # (low, high] times that are guided
    cfg_renorm_type: str | None = None  # this and the next two: as in `DenoiseParams`
    cfg_renorm_min: float | None = None
    timestep_shift: float | None = None
    num_outputs_per_prompt: int = 1  # images, each from noise of its own
    seed: int | None = None  # of everything random in the request; drawn if None
    lora_int_id: int | None = None  # an adapter, and its weight
    lora_scale: float = 1.0
    max_tokens: int = 1000  # of the text that think mode writes
    temperature: float = 0.0  # of that text; 0 takes the likeliest token
    top_k: int = 0  # draws among so many likeliest tokens of that text; 0 and -1: among all
    top_p: float = 1.0  # and among the likeliest that have this probability together
    repetition_penalty: float = 1.0  # makes tokens of the prompt and the text less likely, above 1
    extra_args: dict[str, Any] | None = None  # other arguments of the pipeline, JSON values
    latents: torch.Tensor | None = None  # the initial noise, [num_outputs_per_prompt, …]
    generator: torch.Generator | None = None  # once the prompt was read; stays in its process

    def __post_init__(self) -> None:
        if self.num_outputs_per_prompt < 1:
            raise ValueError(f"num_outputs_per_prompt {self.num_outputs_per_prompt}: 1 or more")
        if self.num_frames is not None and self.num_frames < 1:
            raise ValueError(f"num_frames {self.num_frames}: 1 or more")
        if self.latents is not None or self.extra_args is not None:
            check_values(self.latents, self.extra_args, self.num_outputs_per_prompt)
        if type(self.top_k) is not int or self.top_k < -1:
            raise ValueError(f"top_k {self.top_k!r}: a number of tokens, or 0 for all")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.repetition_penalty > 0):
            raise ValueError(
                f"temperature {self.temperature}, top_p {self.top_p}, repetition_penalty "
                f"{self.repetition_penalty}: from 0, above 0 up to 1, and above 0"
            )


TEXT_PARAMS = frozenset(("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty"))
"""The params of the text that think mode writes."""

PIPELINE_PARAMS = frozenset(
    ("true_cfg_scale", "negative_prompt", "num_frames", "extra_args", "latents")
)
"""The params of diffusers' pipelines, which an AR stage has no use for."""

_OWN = {"seed", "generator", *TEXT_PARAMS}
_ALL = [field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)]
KEY_FIELDS = tuple(name for name in _ALL if name not in _OWN)
"""The params that requests of one batch have in common."""


class SamplingParamsKey(tuple[object, ...]):
    """The values of `KEY_FIELDS`, of a tensor its shape and dtype.

    Requests with equal keys may share a batch.
    """

    @classmethod
    def of(cls, params: OmniDiffusionSamplingParams) -> SamplingParamsKey:
        """The key of sampling params."""
        values = [getattr(params, name) for name in KEY_FIELDS]
        return cls(
            comparable(one) if isinstance(one, (dict, torch.Tensor)) else one for one in values
        )
