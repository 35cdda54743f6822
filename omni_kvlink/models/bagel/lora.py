"""The layers of a BAGEL model that a LoRA adapter may change, and their names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from omni_kvlink.models.bagel.model import BagelModel
from omni_kvlink.models.bagel.shards import Cut, CutLinear

ROOTS = ("language_model.", "language_model.model.")
"""Prefixes that an adapter's names lack if it was trained on the language model alone, or on its
decoder."""


@dataclass(frozen=True, eq=False)
class LinearPart:
    """A linear layer's `cut` that a stage's rank holds as `module`; None if it holds nothing."""

    module: nn.Linear | None
    cut: Cut


def lora_layers(model: BagelModel) -> dict[str, LinearPart]:
    """Return every linear layer of the whole model by name: both experts, head, ViT, embedders."""
    with torch.device("meta"):
        full_model = BagelModel(model.config, "all")
    modules = dict(model.named_modules())
    layers = {}
    for name, layer in full_model.named_modules():
        if isinstance(layer, nn.Linear):
            shape, part = (layer.out_features, layer.in_features), modules.get(name)
            cut = part.cuts["weight"] if isinstance(part, CutLinear) else Cut(shape, (_ALL, _ALL))
            layers[name] = LinearPart(part if isinstance(part, nn.Linear) else None, cut)
    return layers


_ALL = slice(None)
