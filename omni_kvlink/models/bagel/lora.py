"""Which layers of a BAGEL model a LoRA adapter may change, and by which names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from omni_kvlink.models.bagel.model import BagelModel
from omni_kvlink.models.bagel.shards import Cut, CutLinear

ROOTS = ("language_model.", "language_model.model.")
"""What the names of an adapter leave out if it was trained on the language model alone, or on its
decoder."""


@dataclass(frozen=True, eq=False)
class LinearPart:
    """A linear layer's `cut` that a stage's rank holds as `module`; None if it holds nothing."""

    module: nn.Linear | None
    cut: Cut


def lora_layers(model: BagelModel) -> dict[str, LinearPart]:
    """Return every linear layer of the whole model by name: both experts, head, ViT, embedders."""
    with torch.device("meta"):
        whole = BagelModel(model.config, "all")
    own = dict(model.named_modules())
    found = {}
    for name, layer in whole.named_modules():
        if isinstance(layer, nn.Linear):
            shape, part = (layer.out_features, layer.in_features), own.get(name)
            cut = part.cuts["weight"] if isinstance(part, CutLinear) else Cut(shape, (_ALL, _ALL))
            found[name] = LinearPart(part if isinstance(part, nn.Linear) else None, cut)
    return found


_ALL = slice(None)
