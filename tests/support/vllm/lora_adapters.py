"""Random adapters (LoRA) for the model of these tests, as PEFT saves them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8
SIZES = {"q_proj": 256, "v_proj": 128}
"""The modules that an adapter changes, and the size of what they compute."""


def make_adapter(path: Path, seed: int) -> str:
    """Save an adapter, always the same for a seed; return its path."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for module, size in SIZES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in {"A": (RANK, 256), "B": (size, RANK)}.items():
                rows = torch.randn(shape, generator=generator) * 0.3
                weights[f"{name}.lora_{part}.weight"] = rows
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*SIZES]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)
