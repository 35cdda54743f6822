"""Sampling params of a request, and which of them decide whether requests share a batch."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class OmniDiffusionSamplingParams:
    """How an image is to be generated; None leaves a choice to the model.

    Attributes:
        height, width: of the image, in pixels.
        num_inference_steps: points of the denoising schedule.
        guidance_scale: guidance by the text (BAGEL's cfg_text_scale).
        guidance_scale_2: guidance by the images of the prompt (BAGEL's cfg_img_scale).
        cfg_interval: (low, high] times that are guided.
        cfg_renorm_type, cfg_renorm_min, timestep_shift: as in `DenoiseParams`.
        num_outputs_per_prompt: how many images, each from noise of its own.
        seed: of everything random in the request; drawn if None.
        lora_int_id, lora_scale: an adapter, and its weight.
        max_tokens: of the text that think mode writes.
        temperature: of that text; 0 takes the likeliest token.
        generator: the source of noise, once the prompt has been read. It never leaves its process.
    """

    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    cfg_interval: tuple[float, float] | None = None
    cfg_renorm_type: str | None = None
    cfg_renorm_min: float | None = None
    timestep_shift: float | None = None
    num_outputs_per_prompt: int = 1
    seed: int | None = None
    lora_int_id: int | None = None
    lora_scale: float = 1.0
    max_tokens: int = 1000
    temperature: float = 0.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.num_outputs_per_prompt < 1:
            raise ValueError(f"num_outputs_per_prompt {self.num_outputs_per_prompt}: 1 or more")


_OWN = ("seed", "max_tokens", "temperature", "generator")
KEY_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(OmniDiffusionSamplingParams)
    if field.name not in _OWN
)
"""The params that requests of one batch have in common."""


class SamplingParamsKey(tuple[object, ...]):
    """The values of `KEY_FIELDS`; requests with equal keys may share a batch."""

    @classmethod
    def of(cls, params: OmniDiffusionSamplingParams) -> SamplingParamsKey:
        """The key of sampling params."""
        return cls(getattr(params, name) for name in KEY_FIELDS)
