"""Pipelines of diffusers that a configuration or a deploy file may name, instead of BAGEL."""

from __future__ import annotations

PIPELINE_CLASSES = {
    "FluxPipeline": "FluxPipeline",
    "LongCatImagePipeline": "LongCatImagePipeline",
    "OvisImagePipeline": "OvisImagePipeline",
    "QwenImageEditPipeline": "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline": "QwenImageEditPlusPipeline",
    "QwenImagePipeline": "QwenImagePipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3Pipeline",
    "Wan22Pipeline": "WanPipeline",
    "WanPipeline": "WanPipeline",
}
"""Names of vLLM-Omni and of diffusers, and diffusers' class for each."""

VIDEO_CLASSES = frozenset(("WanPipeline",))
"""The classes that generate videos."""
