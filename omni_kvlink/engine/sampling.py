"""How an image is to be made, and which of these wishes may share a batch."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class OmniDiffusionSamplingParams:
    """Wishes of one request; None leaves a choice to the model.

    Attributes:
        height, width: of the image, in pixels.
        num_inference_steps: points of the denoising schedule.
        guidance_scale: guidance by the text (BAGEL's cfg_text_scale).
        guidance_scale_2: guidance by the images of the prompt (BAGEL's cfg_img_scale).
        cfg_interval: (low, high] times that are guided.
        cfg_renorm_type, cfg_renorm_min, timestep_shift: as in `DenoiseParams`.
        num_outputs_per_prompt: images, each of noise of its own.
        seed: of everything random in the request; drawn if None.
        lora_int_id, lora_scale: which adapter, and how much of it.
        max_tokens: of the text that think mode writes.
        temperature: of that text; 0 takes the likeliest token.
        generator: where the noise comes from, once the prompt has been read. Stays in its process.
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


@dataclasses.dataclass(frozen=True)
class SamplingParamsKey:
    """Requests with equal keys fit into one batch: one shape, one schedule, one guidance."""

    height: int | None
    width: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    cfg_interval: tuple[float, float] | None
    cfg_renorm_type: str | None
    cfg_renorm_min: float | None
    timestep_shift: float | None
    num_outputs_per_prompt: int
    lora_int_id: int | None
    lora_scale: float

    @classmethod
    def of(cls, params: OmniDiffusionSamplingParams) -> SamplingParamsKey:
        """The key of a request's wishes; seeds and texts are the request's own."""
        return cls(**{field.name: getattr(params, field.name) for field in dataclasses.fields(cls)})
