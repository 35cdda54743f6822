"""From a checkpoint directory to the networks of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from omni_kvlink.models.bagel.config import BagelConfig
from omni_kvlink.models.bagel.model import BagelModel, Stage
from omni_kvlink.models.bagel.shards import WHOLE, Split, cuts_of
from omni_kvlink.models.bagel.vae import Autoencoder, GroupNorm
from omni_kvlink.models.bagel.weights import load_weights, table_side

if TYPE_CHECKING:
    from pathlib import Path

MODEL_FILE = "ema.safetensors"
AUTOENCODER_FILE = "ae.safetensors"


def load_config(directory: Path) -> BagelConfig:
    """Load the configuration, with the position tables' sizes taken from the weights."""
    config = BagelConfig.load(directory)
    path = directory / MODEL_FILE
    latent = table_side(path, "latent_pos_embed.pos_embed", config.max_latent_size)
    vit = table_side(path, "vit_pos_embed.pos_embed", config.vit_max_num_patch_per_side)
    return msgspec.structs.replace(config, max_latent_size=latent, vit_max_num_patch_per_side=vit)


def load_model(
    directory: Path,
    config: BagelConfig,
    stage: Stage,
    dtype: torch.dtype,
    device: torch.device,
    split: Split = WHOLE,
) -> BagelModel:
    """Load the tensors of `ema.safetensors` that this stage, and this rank of it, needs.

    Raises:
        ValueError: the model cannot be split like this.
    """
    with torch.device("meta"):
        model = BagelModel(config, stage, split)
        known = model if stage == "all" else BagelModel(config, "all")
    load_weights(
        model,
        directory / MODEL_FILE,
        known=known.state_dict().keys(),
        dtype=dtype,
        device=device,
        cuts=cuts_of(model),
    )
    return model


def load_autoencoder(
    directory: Path, config: BagelConfig, stage: Stage, dtype: torch.dtype, device: torch.device
) -> Autoencoder:
    """Load the encoder, the decoder or both from `ae.safetensors`, as the stage needs."""
    with torch.device("meta"):
        autoencoder = Autoencoder(config.ae, encoder=stage != "dit", decoder=stage != "ar")
        known = Autoencoder(config.ae, encoder=True, decoder=True)
    load_weights(
        autoencoder,
        directory / AUTOENCODER_FILE,
        known=known.state_dict().keys(),
        dtype=dtype,
        device=device,
        float32=_group_norms(autoencoder),
    )
    return autoencoder


def _group_norms(autoencoder: Autoencoder) -> frozenset[str]:
    return frozenset(
        f"{name}.{parameter}"
        for name, module in autoencoder.named_modules()
        if isinstance(module, GroupNorm)
        for parameter in ("weight", "bias")
    )
