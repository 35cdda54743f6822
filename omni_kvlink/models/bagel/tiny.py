"""A complete checkpoint with random weights, small enough for a test and a demo."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from omni_kvlink.models.bagel.config import (
    AutoencoderConfig,
    BagelConfig,
    LanguageConfig,
    VisionConfig,
)
from omni_kvlink.models.bagel.embeddings import sincos_table
from omni_kvlink.models.bagel.loading import AUTOENCODER_FILE, MODEL_FILE
from omni_kvlink.models.bagel.model import BagelModel
from omni_kvlink.models.bagel.tokenizer import INSTALL
from omni_kvlink.models.bagel.vae import Autoencoder

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("Ġ", "the"), ("in", "g")]

# Random weights alone give too weak attention for the prompt to be visible in the image.
_GAINS = {"self_attn.q_norm": 3.0, "self_attn.v_proj": 2.0, "self_attn.o_proj": 6.0}


def tiny_config() -> BagelConfig:
    """Return 3 layers, 2 KV heads of 16; images up to 64 x 64, a latent token per 4 x 4."""
    return BagelConfig(
        latent_patch_size=2,
        max_latent_size=16,
        vit_max_num_patch_per_side=8,
        vae_image_size=(64, 32),
        vit_image_size=(64, 32),
        llm=LanguageConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=288,
        ),
        vit=VisionConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=3,
            image_size=64,
            patch_size=8,
        ),
        ae=AutoencoderConfig(ch=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=4),
    )


def make_tiny_checkpoint(
    directory: str | Path, seed: int = 0, config: BagelConfig | None = None
) -> Path:
    """Write a checkpoint in the published layout and return its directory, created if missing.

    The same seed gives the same bytes. Weights are bfloat16, the autoencoder's float32, as
    published. They are scaled so that an image varies from cell to cell and depends on the prompt,
    the noise and every layer of the cache. A `config` of other sizes than `tiny_config`'s must have
    its vocabulary. Raises ImportError if tokenizers or safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(f"writing a checkpoint needs safetensors: {INSTALL}") from error
    root, config = Path(directory), config or tiny_config()
    root.mkdir(parents=True, exist_ok=True)
    _write_configs(root, config)
    _write_tokenizer(root)
    model = _weights(BagelModel(config, "all"), seed)
    save_file({name: t.to(torch.bfloat16) for name, t in model.items()}, root / MODEL_FILE)
    autoencoder = Autoencoder(config.ae, encoder=True, decoder=True)
    save_file(_weights(autoencoder, seed), root / AUTOENCODER_FILE)
    return root


def _write_configs(root: Path, config: BagelConfig) -> None:
    fields: dict[str, Any] = msgspec.structs.asdict(config)
    parts = {f"{name}_config": fields.pop(name) for name in ("llm", "vit", "ae")}
    for name, part in {**parts, "config": {"model_type": "bagel", **fields}}.items():
        text = msgspec.json.format(msgspec.json.encode(part), indent=2)
        (root / f"{name}.json").write_bytes(text + b"\n")


def _write_tokenizer(root: Path) -> None:
    """A byte-level BPE: the 256 bytes, a few merges, the markers."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError(f"writing a tokenizer needs the tokenizers package: {INSTALL}") from error
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in _MERGES)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.save(str(root / "tokenizer.json"))


def _weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    return {name: _weight(name, tensor, seed) for name, tensor in module.state_dict().items()}


def _weight(name: str, like: Tensor, seed: int) -> Tensor:
    """Draw random numbers that depend on name and seed only, at a scale that fits the role."""
    if name.endswith("pos_embed"):
        return sincos_table(math.isqrt(like.shape[0]), like.shape[1])
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    noise = torch.randn(like.shape, generator=generator)
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    if "norm" in name and name.endswith("weight"):
        return gain * (1 + 0.1 * noise)
    if like.ndim == 1:
        return 0.1 * noise
    if "embed" in name and "patch" not in name:
        return noise
    return gain * noise / math.sqrt(like[0].numel())
