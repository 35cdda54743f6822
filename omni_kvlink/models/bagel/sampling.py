"""Denoising: the parameters, the schedule and classifier-free guidance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

RenormType = Literal["global", "channel", "text_channel"]
BRANCHES = ("gen", "cfg_text", "cfg_img")
"""The contexts of a request, in the order in which a step reads them."""


@dataclass(frozen=True)
class DenoiseParams:
    """The parameters of an image's denoising, by default those of plain text-to-image.

    Attributes:
        cfg_text_scale: guidance away from the prompt without its last text; 1 or less disables all
            guidance, whatever `cfg_img_scale` is.
        cfg_img_scale: guidance away from the prompt without its images; 1 or less disables it.
        cfg_interval: guidance at times t with low < t <= high; time runs from 1 down to 0.
        cfg_renorm_min: lower bound of the factor that reduces a guided flow to the unguided norm.
        cfg_renorm_type: what that norm is computed over: all numbers, each row, or each row before
            image guidance.
        timestep_shift: above 1, more of the steps are spent at high noise.
        num_timesteps: points of the schedule; one more than the steps taken.
    """

    cfg_text_scale: float = 4.0
    cfg_img_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.4, 1.0)
    cfg_renorm_min: float = 0.0
    cfg_renorm_type: RenormType = "global"
    timestep_shift: float = 3.0
    num_timesteps: int = 50

    def __post_init__(self) -> None:
        if self.cfg_renorm_type not in get_args(RenormType):
            raise ValueError(
                f"cfg_renorm_type is one of {get_args(RenormType)}, not {self.cfg_renorm_type!r}"
            )
        for name in ("cfg_text_scale", "cfg_img_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if len(self.cfg_interval) != 2 or not self.cfg_interval[0] <= self.cfg_interval[1]:
            raise ValueError(f"cfg_interval must be (low, high), not {self.cfg_interval}")
        if not 0 <= self.cfg_renorm_min <= 1:
            raise ValueError(f"cfg_renorm_min must be within [0, 1], not {self.cfg_renorm_min}")
        if not (math.isfinite(self.timestep_shift) and self.timestep_shift > 0):
            raise ValueError(f"timestep_shift must be positive, not {self.timestep_shift}")
        if self.num_timesteps < 2:
            raise ValueError(f"num_timesteps must be 2 or more, not {self.num_timesteps}")

    @classmethod
    def for_text_to_image(cls) -> DenoiseParams:
        """Return the published defaults for a prompt without an image."""
        return cls()

    @classmethod
    def for_edit(cls) -> DenoiseParams:
        """Return the published defaults for a prompt with an image."""
        return cls(cfg_img_scale=2.0, cfg_interval=(0.0, 1.0), cfg_renorm_type="text_channel")

    @property
    def num_steps(self) -> int:
        """Number of denoising steps."""
        return self.num_timesteps - 1

    @property
    def needs_cfg_text(self) -> bool:
        """Whether the `cfg_text` context is ever read."""
        return self.cfg_text_scale > 1

    @property
    def needs_cfg_img(self) -> bool:
        """Whether the `cfg_img` context is ever read; image guidance requires text guidance."""
        return self.needs_cfg_text and self.cfg_img_scale > 1

    def branches(self, *, guided: bool) -> list[str]:
        """Return the contexts that a step with, or without, guidance reads."""
        if not (guided and self.needs_cfg_text):
            return ["gen"]
        return list(BRANCHES if self.needs_cfg_img else BRANCHES[:2])

    def guided_at(self, t: Tensor) -> bool:
        """Whether there is guidance at time t (0-dim float32)."""
        low, high = self.cfg_interval
        return bool(t > low) and bool(t <= high)


def schedule(params: DenoiseParams) -> tuple[Tensor, Tensor]:
    """Return times and time steps, [num_steps] float32 each, always computed on the CPU.

    A GPU's linspace may differ in the last bit; two processes must agree.
    """
    times = torch.linspace(1, 0, params.num_timesteps, dtype=torch.float32)
    times = params.timestep_shift * times / (1 + (params.timestep_shift - 1) * times)
    return times[:-1], times[:-1] - times[1:]


def guide(flow: Tensor, text: Tensor, image: Tensor | None, params: DenoiseParams) -> Tensor:
    """Combine the flows [n, patch_dim] of the three contexts: `gen`, `cfg_text` and `cfg_img`.

    Without the last one there is no image guidance.
    """
    guided = text + params.cfg_text_scale * (flow - text)
    if params.cfg_renorm_type == "text_channel":
        guided = guided * _shrink(flow, guided, params)
    if image is not None:
        guided = image + params.cfg_img_scale * (guided - image)
    if params.cfg_renorm_type != "text_channel":
        guided = guided * _shrink(flow, guided, params)
    return guided


def _shrink(flow: Tensor, guided: Tensor, params: DenoiseParams) -> Tensor:
    """Return the factor, float32, that reduces `guided` to the norm of `flow`, never above 1."""
    if params.cfg_renorm_type == "global":
        norm, guided_norm = flow.float().norm(), guided.float().norm()
    else:
        norm = flow.float().norm(dim=-1, keepdim=True)
        guided_norm = guided.float().norm(dim=-1, keepdim=True)
    factor: Tensor = norm / (guided_norm + 1e-8)
    return factor.clamp(min=params.cfg_renorm_min, max=1.0)
