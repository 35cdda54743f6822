"""Small random models whose layers have several kinds of caches, written with transformers."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

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
    _save(Gemma3ForCausalLM, config, path, tokenizer)


def make_mamba2(path: Path, tokenizer: Path) -> None:
    """Two layers with a recurrent state, and no attention."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=64,
        state_size=16,
        n_groups=1,
    )
    _save(Mamba2ForCausalLM, config, path, tokenizer)


def make_falcon_h1(path: Path, tokenizer: Path) -> None:
    """Two layers, each with a recurrent state beside full attention."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **COMMON,
        num_hidden_layers=2,
        head_dim=64,
        mamba_d_ssm=512,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=16,
        mamba_n_groups=1,
    )
    _save(FalconH1ForCausalLM, config, path, tokenizer)


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
    _save(DeepseekV2ForCausalLM, config, path, tokenizer)


def make_qwen2(path: Path, tokenizer: Path) -> None:
    """One layer, for drafts that another model mostly rejects."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    _save(Qwen2ForCausalLM, Qwen2Config(**COMMON, num_hidden_layers=1), path, tokenizer)


def make_llama(path: Path, tokenizer: Path) -> None:
    """Two layers, and below `eagle` an EAGLE head for them, of one more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _save(LlamaForCausalLM, LlamaConfig(**COMMON, num_hidden_layers=2), path, tokenizer)
    _save(LlamaForCausalLM, LlamaConfig(**COMMON, num_hidden_layers=1), path / "eagle", tokenizer)

    def head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        layers = {
            name.removeprefix("model."): each
            for name, each in weights.items()
            if ".layers." in name and ".input_layernorm." not in name
        }
        return {**layers, "fc.weight": _projection()}

    _change_weights(path / "eagle", head)


def make_mimo(path: Path, tokenizer: Path) -> None:
    """Two layers of a Qwen2, and one that predicts a further token (MTP)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    _save(Qwen2ForCausalLM, Qwen2Config(**COMMON, num_hidden_layers=2), path, tokenizer)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))

    def with_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = {
            name.replace("model.layers.1.", "model.mtp_layers.0."): each.clone()
            for name, each in weights.items()
            if name.startswith("model.layers.1.")
        }
        norm = weights["model.norm.weight"]
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            head[f"model.mtp_layers.0.{name}.weight"] = norm.clone()
        head["model.mtp_layers.0.input_proj.weight"] = _projection()
        return {**weights, **head}

    _change_weights(path, with_head)


def _projection() -> torch.Tensor:
    """Of a token and a hidden state, one behind the other, to a hidden state."""
    import torch

    size = COMMON["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 2 * size, generator=generator) * 0.05


def _change_weights(
    path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def _save(kind: Any, config: Any, path: Path, tokenizer: Path) -> None:
    """Save a model with random weights, always the same; the tokenizer is another model's."""
    import torch

    torch.manual_seed(0)
    model = kind(config)  # which draws the vectors, as the steps of a state
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.08)
    model.save_pretrained(path)
    for each in tokenizer.glob("*token*.json"):
        shutil.copy(each, path)
