"""A pipeline of diffusers behind the engine: requests of several users, generated in batches.

Without a checkpoint, a tiny Stable Diffusion 3 with random weights is made from configurations
alone. Every image is then generated again by the pipeline itself, without an engine.

    python examples/diffusers_executor.py                     # tiny random weights
    python examples/diffusers_executor.py --checkpoint DIR    # a directory of `save_pretrained`

Needs `pip install 'omni-kvlink[diffusers]'`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from omni_kvlink.engine import (
    DiffusionEngine,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
    OmniDiffusionSamplingParams,
)

_WIDTH, _HEADS, _TOKENS = 32, 4, 32
_ENDS = ("<|startoftext|>", "<|endoftext|>")


def make_tiny_pipeline(directory: Path) -> Path:
    """A Stable Diffusion 3 of a few thousand random weights, which reads any ASCII text."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(0)
    text_encoder_3, tokenizer_3 = _t5()
    (text_encoder, tokenizer), (text_encoder_2, tokenizer_2) = _clip(), _clip()
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=_WIDTH // _HEADS,
            num_attention_heads=_HEADS,
            caption_projection_dim=_WIDTH,
            joint_attention_dim=2 * _WIDTH,
            pooled_projection_dim=2 * _WIDTH,
        ),
        vae=AutoencoderKL(
            block_out_channels=(4, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.06,
            scaling_factor=1.5,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
    ).save_pretrained(directory)
    return directory


def _clip() -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    characters = [chr(code) for code in range(33, 127)]
    vocabulary = [*characters, *(f"{character}</w>" for character in characters), *_ENDS]
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        projection_dim=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        max_position_embeddings=_TOKENS,
        bos_token_id=len(vocabulary) - 2,
        eos_token_id=len(vocabulary) - 1,
        pad_token_id=len(vocabulary) - 1,
    )
    vocab = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = CLIPTokenizer(vocab, [], model_max_length=_TOKENS)
    return CLIPTextModelWithProjection(config), tokenizer


def _t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    vocabulary = ["<pad>", "</s>", "<unk>", "▁", *(chr(code) for code in range(33, 127))]
    config = T5Config(
        vocab_size=len(vocabulary),
        d_model=2 * _WIDTH,
        d_kv=_WIDTH // _HEADS,
        d_ff=_WIDTH,
        num_layers=1,
        num_heads=_HEADS,
    )
    tokenizer = T5Tokenizer(vocab=[(word, 0.0) for word in vocabulary], extra_ids=0)
    return T5EncoderModel(config), tokenizer


def generate_images(args: argparse.Namespace, checkpoint: Path) -> list[torch.Tensor]:
    """Every request's image, uint8 [H, W, 3], by the engine."""
    config = OmniDiffusionConfig(
        str(checkpoint),
        dtype="float32",
        max_num_seqs=args.batch,
        request_batch_max_wait_ms=50.0,
        distributed_executor_backend="diffusers",
    )
    requests = [
        OmniDiffusionRequest(
            args.prompt,
            OmniDiffusionSamplingParams(
                args.size, args.size, num_inference_steps=args.steps, seed=seed
            ),
            f"request-{seed}",
        )
        for seed in range(args.requests)
    ]
    with DiffusionEngine(config) as engine:
        outputs = engine.generate(requests, timeout=args.timeout)
        print(f"{len(outputs)} requests in {engine.stats()['steps']} batches")
    return [output.result()[0] for output in outputs]


def compare(args: argparse.Namespace, checkpoint: Path, images: list[torch.Tensor]) -> int:
    """Levels of 255 by which an image differs from the pipeline's own; in batches, at most one."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(
        checkpoint, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    pipe.set_progress_bar_config(disable=True)
    worst = 0
    for seed, image in enumerate(images):
        floats = pipe(
            args.prompt,
            height=args.size,
            width=args.size,
            num_inference_steps=args.steps,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images[0]
        expected = torch.from_numpy(floats).mul(255).round().int()
        worst = max(worst, int((expected - image.int()).abs().max()))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="tiny and random if none")
    parser.add_argument("--prompt", default="a red fox in the snow")
    parser.add_argument("--size", default=32, type=int, help="height and width in pixels")
    parser.add_argument("--requests", default=8, type=int)
    parser.add_argument("--batch", default=4, type=int, help="requests generated at once")
    parser.add_argument("--steps", default=8, type=int, help="denoising steps")
    parser.add_argument("--timeout", default=300.0, type=float, help="seconds for all")
    parser.add_argument("--out", default=Path("out"), type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or make_tiny_pipeline(Path(scratch) / "tiny")
        images = generate_images(args, checkpoint)
        again = generate_images(args, checkpoint)
        worst = compare(args, checkpoint, images)
    same = all(map(torch.equal, images, again))
    different = len({image.numpy().tobytes() for image in images}) == len(images)
    args.out.mkdir(parents=True, exist_ok=True)
    Image.fromarray(images[0].numpy()).save(args.out / "diffusers.png")
    print(f"{args.out / 'diffusers.png'}: {args.prompt!r}, seed 0")
    print(f"same seeds, same images: {same}; other seeds, other images: {different}")
    print(f"as the pipeline alone: at most {worst} of 255 levels apart")
    return 0 if same and different and worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
