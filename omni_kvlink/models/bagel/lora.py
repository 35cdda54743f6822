"""Which layers of a BAGEL model a LoRA adapter may change, and by which names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from omni_kvlink.models.bagel.shards import CutLinear

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.model import BagelModel

HEAD = "language_model.lm_head"
"""The text head, which only a stage that writes text holds."""

ROOTS = ("language_model.", "language_model.model.")
"""What the names of an adapter leave out if it was trained on the language model alone, or on its
decoder."""


def lora_layers(model: BagelModel) -> dict[str, nn.Linear]:
    """Return the linear layers of the language model, those of both experts, by name."""
    found: dict[str, nn.Linear] = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, CutLinear) or (name == HEAD and isinstance(layer, nn.Linear))
    }
    return found
