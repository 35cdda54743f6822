"""`LoadedStage`: the networks and the tokenizer of a checkpoint, or one stage's part of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import torch
from torch import Tensor

from omni_kvlink.models.bagel.cache import BagelContext
from omni_kvlink.models.bagel.config import BagelConfig
from omni_kvlink.models.bagel.loading import load_autoencoder, load_config, load_model
from omni_kvlink.models.bagel.model import BagelModel, Stage
from omni_kvlink.models.bagel.shards import WHOLE, Split
from omni_kvlink.models.bagel.tokenizer import BagelTokenizer, SpecialTokens
from omni_kvlink.models.bagel.vae import Autoencoder

_Loaded = TypeVar("_Loaded", bound="LoadedStage")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VAE_DTYPE = torch.float32  # as the published app loads the autoencoder, whatever the model has


@dataclass(eq=False, repr=False)
class LoadedStage:
    """A loaded checkpoint, or one stage's part of it.

    Attributes:
        config: the checkpoint's configuration.
        stage: "all"; "ar" reads prompts and writes text; "dit" denoises and decodes.
    """

    config: BagelConfig
    stage: Stage
    model: BagelModel
    autoencoder: Autoencoder
    special_tokens: SpecialTokens
    tokenizer: BagelTokenizer

    @classmethod
    def from_pretrained(
        cls: type[_Loaded],
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        vae_dtype: torch.dtype = VAE_DTYPE,
        device: str | torch.device = "cpu",
        stage: Stage = "all",
        split: Split = WHOLE,
    ) -> _Loaded:
        """Load a checkpoint in the published layout; of the files, only what `stage` needs.

        float32 is exact throughout. With a model in bfloat16 the autoencoder stays in float32, as
        the published app loads it; that app runs it under autocast, whose convolutions are in
        bfloat16. float16 has the range of 65504: a trained model may leave it.

        Raises:
            FileNotFoundError: a file is missing.
            SchemaError: a configuration file does not fit.
            CheckpointError: a weights file lacks what the stage needs.
            ValueError: a dtype is none of bfloat16, float16 and float32, or the language model
                cannot be split like this.
        """
        for name, value in (("dtype", dtype), ("vae_dtype", vae_dtype)):
            if value not in DTYPES:
                raise ValueError(f"{name} {value}; there are {', '.join(map(str, DTYPES))}")
        if stage not in get_args(Stage):
            raise ValueError(f"stage is one of {get_args(Stage)}, not {stage!r}")
        root, device = Path(directory), torch.device(device)
        config = load_config(root)
        return cls(
            config,
            stage,
            load_model(root, config, stage, dtype, device, split),
            load_autoencoder(root, config, stage, vae_dtype, device),
            SpecialTokens.load(root),
            BagelTokenizer(root),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, but the autoencoder's, and of every cached tensor."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def num_layers(self) -> int:
        """Number of layers of the language model."""
        return self.config.llm.num_hidden_layers

    def empty_context(self) -> BagelContext:
        """Return a context without tokens."""
        return BagelContext.empty(self.num_layers)

    def _markers(self) -> Tensor:
        special = self.special_tokens
        return self.model.embed([special.start_of_image, special.end_of_image])

    def _require(self, part: str, present: bool) -> None:
        if not present:
            raise RuntimeError(f"this pipeline was loaded with stage={self.stage!r}: no {part}")
