"""Small random models whose layers have several kinds of caches, written with transformers."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def make_gemma3(path: Path, tokenizer: Path, window: int) -> None:
    """Four layers, every second one with a sliding window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    _save(Gemma3ForCausalLM(config), path, tokenizer)


def make_lfm2(path: Path, tokenizer: Path) -> None:
    """Four layers, every second one with the state of a short convolution."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
        conv_dim=256,
        block_dim=256,
    )
    _save(Lfm2ForCausalLM(config), path, tokenizer)


def make_deepseek(path: Path, tokenizer: Path) -> None:
    """Two layers of latent attention (MLA), without experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **{**COMMON, "num_key_value_heads": 4},
        num_hidden_layers=2,
        first_k_dense_replace=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    _save(DeepseekV2ForCausalLM(config), path, tokenizer)


def _save(model: Any, path: Path, tokenizer: Path) -> None:
    """Save a model with random weights; the tokenizer is another model's."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.08)
    model.save_pretrained(path)
    for each in tokenizer.glob("*token*.json"):
        shutil.copy(each, path)
