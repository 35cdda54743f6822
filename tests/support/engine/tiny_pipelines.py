"""Pipelines of diffusers with a few thousand random weights, by the class that they are of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from support.engine.tiny_qwen_image import make_tiny_qwen_image, qwen_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 16
_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": WIDTH}


class TinyProcessor:
    """Texts and images for a Qwen2.5-VL, without torchvision, which transformers' own needs."""

    def __init__(self, tokenizer: Any):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.tokenizer = tokenizer
        self.images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=4 * 28 * 28)

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        seen = self.images(images, return_tensors=return_tensors)
        counts = iter(seen["image_grid_thw"].prod(-1) // 4)
        parts = [each.split("<|image_pad|>") for each in text]
        long = [
            "".join([part[0], *(int(next(counts)) * "<|image_pad|>" + rest for rest in part[1:])])
            for part in parts
        ]
        tokens = self.tokenizer(long, padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **seen})


def shrink_images(patch: Any) -> None:
    """Have Qwen-Image-Edit see images of 64² pixels, not of 1024²; `patch` is a MonkeyPatch."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as one
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as several

    sizes = one.calculate_dimensions
    patch.setattr(one, "calculate_dimensions", lambda _, ratio: sizes(64 * 64, ratio))
    patch.setattr(several, "CONDITION_IMAGE_SIZE", 64 * 64)
    patch.setattr(several, "VAE_IMAGE_SIZE", 64 * 64)


def make_tiny_qwen_image_edit(directory: Path, name: str) -> Any:
    """A pipeline of this class, around the networks of a tiny Qwen-Image."""
    import diffusers

    make_tiny_qwen_image(directory)
    parts = diffusers.QwenImagePipeline.from_pretrained(directory).components
    return getattr(diffusers, name)(**parts, processor=TinyProcessor(parts["tokenizer"]))


def make_tiny_wan(directory: Path, *, two: bool = False) -> str:
    """A Wan2.2 for texts; with `two` transformers, for early and late steps, as its A14B."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

    torch.manual_seed(0)
    text_encoder, tokenizer = _umt5()
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_spatial=2,
        scale_factor_temporal=2,
    )
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=_wan_transformer(),
        transformer_2=_wan_transformer() if two else None,
        boundary_ratio=0.5 if two else None,
    ).save_pretrained(directory)
    return str(directory)


def make_tiny_ovis(directory: Path) -> str:
    """An Ovis-Image."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        OvisImagePipeline,
        OvisImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    config = Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=len(tokenizer),
        bos_token_id=len(tokenizer) - 3,
        eos_token_id=len(tokenizer) - 1,
    )
    transformer = OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        axes_dims_rope=(4, 6, 6),
        **_HEADS,
    )
    transformer.proj_out.weight.data *= 30  # random weights: else no prompt shows in 255 levels
    OvisImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        text_encoder=Qwen3Model(config),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(directory)
    return str(directory)


def make_tiny_longcat(directory: Path) -> str:
    """A LongCat-Image; its tokenizer is its text processor, too, which rewrites prompts."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        LongCatImagePipeline,
        LongCatImageTransformer2DModel,
        QwenImagePipeline,
    )

    make_tiny_qwen_image(directory / "qwen")
    parts = QwenImagePipeline.from_pretrained(directory / "qwen").components
    torch.manual_seed(0)
    transformer = LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=[4, 6, 6],
        **_HEADS,
    )
    transformer.proj_out.weight.data *= 30
    LongCatImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(16),  # the pipeline knows no other number
        text_encoder=parts["text_encoder"],
        tokenizer=parts["tokenizer"],
        text_processor=parts["tokenizer"],
        transformer=transformer,
    ).save_pretrained(directory)
    return str(directory)


def _wan_transformer() -> Any:
    from diffusers import WanTransformer3DModel

    made = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=WIDTH,
        freq_dim=WIDTH,
        ffn_dim=WIDTH,
        num_layers=2,
        rope_max_seq_len=32,
    )
    made.proj_out.weight.data *= 30
    return made


def _vae(channels: int = 4) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )


def _umt5() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: at for at, token in enumerate(["<pad>", "</s>", "<unk>", *characters])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    config = UMT5Config(
        vocab_size=math.ceil(len(vocabulary) / 8) * 8,
        d_model=WIDTH,
        d_kv=8,
        d_ff=WIDTH,
        num_layers=1,
        num_heads=2,
    )
    return UMT5EncoderModel(config), tokenizer
