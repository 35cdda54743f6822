"""Tiny random transformers models, the same in every process of one version."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

STEPS = 32
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOW = 16
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2-half": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "head_dim": 16}),
}
"""All layers full, half of them sliding, all of them, every other."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, as JSON values."""

    kind: str
    dtype: str
    attention: str

    def make(self) -> Any:
        """The model.

        Raises:
            ValueError: this transformers has no such attention for it, or no DynamicCache.
        """
        family, own = KINDS[self.kind]
        if family == "Gemma2" and transformers.__version__.startswith("4.50."):
            raise ValueError("transformers 4.50 runs Gemma2 on a HybridCache")
        config = getattr(transformers, f"{family}Config")(**SIZES, **own)
        # A model that its own class makes, not `AutoModel`, takes it from the config alone.
        config._attn_implementation = self.attention
        torch.manual_seed(7)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        return model.to(getattr(torch, self.dtype)).eval()


def decode(
    model: Any, cache: Any, token: torch.Tensor, ropes: list[int], mask: torch.Tensor
) -> torch.Tensor:
    """Logits `[steps, batch, 1, vocabulary]` of greedy steps; `token` `[batch, 1]` is the first."""
    logits, positions = [], torch.tensor(ropes)[:, None]
    for _ in range(STEPS):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        step, token = forward(model, cache, token, positions, mask)
        logits.append(step)
        positions = positions + 1
    return torch.stack(logits)


def forward(
    model: Any, cache: Any, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last token's logits, and the token that they choose.

    Without padding the model asks the cache how many tokens it has seen, and takes no positions.
    """
    with torch.no_grad():
        # By place: the cache is called `past_key_values`, from transformers 5.24 on `cache`.
        positions_or_none = None if bool(mask.all()) else positions
        out = model(tokens, mask, positions_or_none, cache, use_cache=True, logits_to_keep=1)
    return out.logits, out.logits[:, -1:].argmax(-1)
