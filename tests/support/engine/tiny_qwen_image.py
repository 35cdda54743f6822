"""A Qwen-Image of a few thousand random weights, which reads any text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

_ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def make_tiny_qwen_image(directory: Path) -> str:
    """Save one, and return its directory."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    transformer.proj_out.weight.data *= 30  # random weights: else no prompt shows in 255 levels
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    text_encoder, tokenizer = _qwen_vl()
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(directory)
    return str(directory)


def qwen_tokenizer() -> Any:
    """A token for each byte, and the special ones."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = [*sorted(ByteLevel.alphabet()), *_VISION, *_ENDS]
    tokenizer = Qwen2Tokenizer(vocab={name: n for n, name in enumerate(tokens)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(_VISION)})
    return tokenizer


def _qwen_vl() -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    text = {
        **sizes,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "rope_parameters": rope,
        "bos_token_id": len(tokenizer) - 3,
        "eos_token_id": len(tokenizer) - 1,
    }
    vision = {**sizes, "depth": 1, "num_heads": 2, "out_hidden_size": 16}
    seen = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            tokenizer.convert_tokens_to_ids(list(_VISION)),
            strict=True,
        )
    )
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **seen)
    return Qwen2_5_VLForConditionalGeneration(config), tokenizer
