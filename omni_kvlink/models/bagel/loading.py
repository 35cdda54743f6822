"""From a checkpoint directory to the networks of a stage.

Every name and shape is checked before any tensor is read.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import nn

from omni_kvlink.models.bagel.config import BagelConfig
from omni_kvlink.models.bagel.header import (
    CheckpointError,
    TensorInfo,
    complaints,
    join_names,
    read_header,
    unread,
)
from omni_kvlink.models.bagel.model import BagelModel, Stage
from omni_kvlink.models.bagel.shards import WHOLE, Split, cuts_of
from omni_kvlink.models.bagel.tokenizer import INSTALL
from omni_kvlink.models.bagel.vae import Autoencoder, GroupNorm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_M = TypeVar("_M", bound=nn.Module)
_log = logging.getLogger(__name__)

MODEL_FILE = "ema.safetensors"
AUTOENCODER_FILE = "ae.safetensors"


def load_config(directory: Path) -> BagelConfig:
    """Load the configuration, with the position tables' sizes taken from the weights."""
    config = BagelConfig.load(directory)
    tensors = read_header(directory / MODEL_FILE)
    latent = _table_side(tensors, "latent_pos_embed.pos_embed", config.max_latent_size)
    vit = _table_side(tensors, "vit_pos_embed.pos_embed", config.vit_max_num_patch_per_side)
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

    Raises ValueError if the model cannot be split like this.
    """
    with torch.device("meta"):
        model = BagelModel(config, stage, split)
        full_module = model if stage == "all" else BagelModel(config, "all")
    return _load(model, full_module, directory / MODEL_FILE, dtype, device)


def load_autoencoder(
    directory: Path, config: BagelConfig, stage: Stage, dtype: torch.dtype, device: torch.device
) -> Autoencoder:
    """Load the encoder, the decoder or both from `ae.safetensors`, as the stage needs."""
    with torch.device("meta"):
        autoencoder = Autoencoder(config.ae, encoder=stage != "dit", decoder=stage != "ar")
        full_module = Autoencoder(config.ae, encoder=True, decoder=True)
    return _load(autoencoder, full_module, directory / AUTOENCODER_FILE, dtype, device)


def _table_side(tensors: Mapping[str, TensorInfo], key: str, default: int) -> int:
    """Return the cells along one side of the square position table `key`, or the default."""
    if key not in tensors or not tensors[key].shape:
        return default
    rows = tensors[key].shape[0]
    side = math.isqrt(rows)
    if side**2 != rows:
        raise CheckpointError(f"{MODEL_FILE}: {key} has {rows} rows, which is no square")
    return side


def _load(
    module: _M, full_module: nn.Module, path: Path, dtype: torch.dtype, device: torch.device
) -> _M:
    """Load, as `dtype`, the tensors of a module that was built on the meta device.

    `full_module` has every name that any stage reads: one line is logged for the others. Group
    norms stay float32.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: names are missing, or tensors have other shapes or dtypes; lists all.
    """
    cuts, tensors = cuts_of(module), {}
    expected = {
        name: cuts[name].full_shape if name in cuts else tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
    }
    header = read_header(path)
    if wrong := complaints(header, expected):
        raise CheckpointError(f"{path.name}: {join_names(wrong, '; ')}")
    if extra := unread(header, full_module.state_dict().keys()):
        _log.warning("%s: nothing reads %d of its tensors: %s", path, len(extra), join_names(extra))
    with _open(path, str(device)) as file:
        for name in expected:
            in_float32 = isinstance(module.get_submodule(name.rpartition(".")[0]), GroupNorm)
            tensor = (
                file.get_slice(name)[cuts[name].index] if name in cuts else file.get_tensor(name)
            )
            tensors[name] = tensor.contiguous().to(torch.float32 if in_float32 else dtype)
    module.requires_grad_(False)
    module.load_state_dict(tensors, assign=True)
    return module.eval()


def _open(path: Path, device: str) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"reading a checkpoint needs safetensors: {INSTALL}") from error
    try:
        return safe_open(str(path), framework="pt", device=device)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
