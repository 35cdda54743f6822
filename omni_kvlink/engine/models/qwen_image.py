"""Qwen-Image behind the engine: how its prompts end, its sizes, and its defaults.

Sources: the model's card, and the executor of diffusers' pipelines that was proposed to vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.inputs.prompt import EmbedsPrompt
from omni_kvlink.engine.models.diffusers_executor import DiffusersPipelineExecutor
from omni_kvlink.engine.models.diffusers_pipeline import DiffusersPipeline
from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from omni_kvlink.engine.request import OmniDiffusionRequest

POSITIVE_MAGIC = {
    "en": ", Ultra HD, 4K, cinematic composition.",
    "zh": ", 超清，4K，电影级构图.",
}
"""The text that is appended to each prompt, by its language."""

ASPECT_RATIOS = {
    "1:1": (1328, 1328),
    "16:9": (1664, 928),
    "9:16": (928, 1664),
    "4:3": (1472, 1104),  # the proposal has 1140, which is no multiple of 16
    "3:4": (1104, 1472),
    "3:2": (1584, 1056),
    "2:3": (1056, 1584),
}
"""Width and height in pixels."""


def size_of(aspect_ratio: str) -> dict[str, int]:
    """Return `width` and `height`, as sampling params; raises SchemaError for an unknown ratio."""
    if aspect_ratio not in ASPECT_RATIOS:
        raise SchemaError(f"aspect_ratio {aspect_ratio!r}: one of {', '.join(ASPECT_RATIOS)}")
    width, height = ASPECT_RATIOS[aspect_ratio]
    return {"width": width, "height": height}


class QwenImage(DiffusersPipeline):
    """Qwen-Image as its card runs it: 50 steps, guided by 4.0 away from an empty prompt."""

    def text_of(self, request: OmniDiffusionRequest) -> str:
        """The prompt and its `POSITIVE_MAGIC`: "zh" if it has a Chinese character, "en" if not."""
        text = super().text_of(request)
        is_chinese = any("\u4e00" <= character <= "\u9fff" for character in text)
        return text + POSITIVE_MAGIC["zh" if is_chinese else "en"]

    def arguments_of(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        """The sampling params that are set, and the card's for the others."""
        params, prompt = request.sampling_params, request.prompt
        scale = 4.0 if params.true_cfg_scale is None else params.true_cfg_scale
        embeds = isinstance(prompt, EmbedsPrompt) and "negative_prompt_embeds" in prompt.tensors
        blank = " " if scale > 1 and not embeds else None  # up to 1 there is no guidance
        negative = blank if params.negative_prompt is None else params.negative_prompt
        params = dataclasses.replace(params, true_cfg_scale=scale, negative_prompt=negative)
        request = dataclasses.replace(request, sampling_params=params)
        return {"num_inference_steps": 50, **super().arguments_of(request)}


class QwenImageExecutor(DiffusersPipelineExecutor):
    """Runs a Qwen-Image of `config.model`."""

    pipeline_class = QwenImage
