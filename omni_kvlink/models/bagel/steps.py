"""The steps of a request, one method each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import torch
from torch import Generator, Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.cache import (
    BagelContext,
    BagelContexts,
    ElsewhereCache,
    check_context,
)
from omni_kvlink.models.bagel.denoise import OnStep, denoise_rows
from omni_kvlink.models.bagel.embeddings import unpatchify
from omni_kvlink.models.bagel.hooks import DenoiseHooks
from omni_kvlink.models.bagel.loading import load_autoencoder, load_config, load_model
from omni_kvlink.models.bagel.model import BagelModel, Stage
from omni_kvlink.models.bagel.shards import WHOLE, Split
from omni_kvlink.models.bagel.tokenizer import BagelTokenizer, SpecialTokens, written_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.models.bagel.config import BagelConfig
    from omni_kvlink.models.bagel.sampling import DenoiseParams
    from omni_kvlink.models.bagel.vae import Autoencoder

_Steps = TypeVar("_Steps", bound="BagelSteps")


class BagelSteps:
    """A loaded checkpoint, or one stage's part of it.

    Attributes:
        config: the checkpoint's configuration.
        stage: "all"; "ar" reads prompts and writes text; "dit" denoises and decodes.
        hooks: an engine's callbacks in the denoising loop; none by default.
    """

    def __init__(
        self,
        config: BagelConfig,
        stage: Stage,
        model: BagelModel,
        autoencoder: Autoencoder,
        special_tokens: SpecialTokens,
        tokenizer: BagelTokenizer,
    ) -> None:
        self.config, self.stage = config, stage
        self.model, self.autoencoder = model, autoencoder
        self.special_tokens, self.tokenizer = special_tokens, tokenizer
        self.hooks = DenoiseHooks()

    @classmethod
    def from_pretrained(
        cls: type[_Steps],
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        stage: Stage = "all",
        split: Split = WHOLE,
    ) -> _Steps:
        """Load a checkpoint in the published layout.

        Args:
            directory: of the checkpoint.
            dtype: bfloat16 computes as the published model does; float32 is exact throughout.
            device: of the model.
            stage: which networks are built and read from the files.
            split: the rank of the language model.

        Raises:
            FileNotFoundError: a file is missing.
            SchemaError: a configuration file does not fit.
            CheckpointError: a weights file lacks what the stage needs.
            ValueError: the model cannot be split like this.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype is torch.bfloat16 or torch.float32, not {dtype}")
        if stage not in get_args(Stage):
            raise ValueError(f"stage is one of {get_args(Stage)}, not {stage!r}")
        root, where = Path(directory), torch.device(device)
        config = load_config(root)
        return cls(
            config,
            stage,
            load_model(root, config, stage, dtype, where, split),
            load_autoencoder(root, config, stage, dtype, where),
            SpecialTokens.load(root),
            BagelTokenizer(root),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of every cached tensor."""
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

    # Steps: each returns a new context; the given one and its tensors are not changed.

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text, between its begin and end markers."""
        special = self.special_tokens
        return [special.bos, *self.tokenizer.encode(text), special.eos]

    @torch.no_grad()
    def append_text(self, context: BagelContext, token_ids: Sequence[int]) -> BagelContext:
        """Read token ids (markers included): n tokens, n positions, causal."""
        ids = [int(token) for token in token_ids]
        if not ids or min(ids) < 0 or max(ids) >= self.config.llm.vocab_size:
            raise SchemaError(f"token ids must be within [0, {self.config.llm.vocab_size})")
        self._check("context", context)
        extended, _ = self.model.extend(context, self.model.embed(ids), mode="und", causal=True)
        return extended

    @torch.no_grad()
    def append_vae_latent(self, context: BagelContext, latent: Tensor) -> BagelContext:
        """Read an encoded image [z, H, W]: h * w + 2 tokens, one position."""
        z = self.config.ae.z_channels
        if latent.ndim != 3 or latent.shape[0] != z:
            raise SchemaError(f"a latent has shape [{z}, H, W], not {tuple(latent.shape)}")
        self._check("context", context)
        rows = self._between_markers(self.model.encoded_latent_rows(latent))
        return self.model.extend(context, rows, mode="gen", causal=False)[0]

    @torch.no_grad()
    def append_vit_image(self, context: BagelContext, pixels: Tensor) -> BagelContext:
        """Read pixels [3, H, W] in [-1, 1] through the ViT: h * w + 2 tokens, one position."""
        self._require("ViT", self.stage != "dit")
        patch = self.config.vit.patch_size
        if pixels.ndim != 3 or pixels.shape[0] != 3 or any(n % patch for n in pixels.shape[1:]):
            expected = f"[3, H, W] with H and W multiples of {patch}"
            raise SchemaError(f"pixels have shape {expected}, not {tuple(pixels.shape)}")
        self._check("context", context)
        rows = self._between_markers(self.model.vit_rows(pixels))
        return self.model.extend(context, rows, mode="und", causal=False)[0]

    @torch.no_grad()
    def encode_image(self, pixels: Tensor, generator: Generator | None = None) -> Tensor:
        """Sample the latent [z, H / d, W / d] float32 of pixels [3, H, W] in [-1, 1].

        Draws z * H / d * W / d random numbers, so that a seed alone no longer determines the noise
        that is drawn afterwards.
        """
        self._require("autoencoder's encoder", self.stage != "dit")
        return self.autoencoder.encode(pixels, generator)

    def initial_noise(
        self, image_shape: tuple[int, int] | None, generator: Generator | None = None
    ) -> Tensor:
        """Draw noise [h * w, patch_dim] float32 for an image on the generator's device."""
        height, width = self._grid(image_shape)
        origin = "cpu" if generator is None else generator.device
        shape = (height * width, self.config.patch_dim)
        return torch.randn(shape, generator=generator, device=origin)

    @torch.no_grad()
    def denoise(
        self,
        contexts: BagelContexts,
        noise: Tensor,
        params: DenoiseParams,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Denoise noise [h * w, patch_dim] to a latent [z, H / d, W / d] float32.

        Only the contexts that the parameters require are read; none is changed.

        Args:
            contexts: of the request.
            noise: see `initial_noise`.
            params: the schedule and the guidance.
            on_step: called after each step with (steps done, all steps).

        Raises:
            SchemaError: a context is incomplete or does not fit the model, or the noise does not
                have the shape for `contexts.image_shape`.
        """
        return self.denoise_batch([contexts], [noise], params, on_step)[0]

    @torch.no_grad()
    def denoise_batch(
        self,
        contexts: Sequence[BagelContexts],
        noise: Sequence[Tensor],
        params: DenoiseParams,
        on_step: OnStep | None = None,
    ) -> list[Tensor]:
        """Denoise several requests with images of one size in one pass.

        In float32 a latent differs from that of `denoise` by less than 1e-5 of its largest value:
        products of larger matrices may be summed in another order.

        Raises:
            SchemaError: as in `denoise`, or the images differ in size.
        """
        self._require("flow head", self.stage != "ar")
        shapes = {one.image_shape for one in contexts}
        if len(shapes) != 1:
            raise SchemaError(
                f"one batch for images of {sorted(map(str, shapes))}; they must have one size"
            )
        height, width = self._grid(contexts[0].image_shape)
        for one, own in zip(contexts, noise, strict=True):
            self.check_request(one, own, params)
        rows = denoise_rows(
            self.model,
            contexts,
            self._markers(),
            noise,
            (height, width),
            params,
            on_step,
            hooks=self.hooks,
        )
        patch = self.config.latent_patch_size
        return [unpatchify(own, height, width, patch) for own in rows]

    def check_request(self, contexts: BagelContexts, noise: Tensor, params: DenoiseParams) -> None:
        """Raise SchemaError unless `denoise` has all it needs for this request."""
        height, width = self._grid(contexts.image_shape)
        if tuple(noise.shape) != (height * width, self.config.patch_dim):
            expected = (height * width, self.config.patch_dim)
            raise SchemaError(f"the noise has shape {tuple(noise.shape)}, wanted {expected}")
        for name in params.branches(guided=True):
            context: BagelContext = getattr(contexts, name)
            if not isinstance(context.past_key_values, ElsewhereCache):
                self._check(name, context)

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """Decode a latent [z, H / d, W / d] to an image: uint8 [H, W, 3] on the CPU."""
        self._require("autoencoder's decoder", self.stage != "ar")
        image = self.autoencoder.decode(latent)
        levels = (image * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
        return levels.to(torch.uint8).cpu().contiguous()

    @torch.no_grad()
    def generate_text(
        self,
        context: BagelContext,
        *,
        max_length: int = 1000,
        do_sample: bool = False,
        temperature: float = 0.3,
        generator: Generator | None = None,
    ) -> str:
        """Continue a context with text until the end marker. The context is not changed.

        Args:
            context: to be continued.
            max_length: tokens at most, the begin marker included.
            do_sample: draw each token at `temperature`; otherwise take the most probable one.
            temperature: of the draws.
            generator: of the draws.
        """
        self._require("text head", self.stage != "dit")
        if max_length < 1 or (do_sample and not temperature > 0):
            raise ValueError(f"max_length {max_length} or temperature {temperature} is too small")
        self._check("context", context)
        context = context.snapshot()  # a discarded text must not claim rows in place
        token, written = self.special_tokens.bos, list[int]()
        while len(written) < max_length and not (written and token == self.special_tokens.eos):
            written.append(token)
            row = self.model.embed([token])
            context, hidden = self.model.extend(context, row, mode="und", causal=True)
            logits = self.model.language_model.lm_head(hidden)[0]
            token = _pick(logits, temperature if do_sample else None, generator)
        return written_text(self.tokenizer.decode(written))

    def _between_markers(self, rows: Tensor) -> Tensor:
        markers = self._markers()
        return torch.cat([markers[:1], rows, markers[1:]])

    def _markers(self) -> Tensor:
        special = self.special_tokens
        return self.model.embed([special.start_of_image, special.end_of_image])

    def _grid(self, image_shape: tuple[int, int] | None) -> tuple[int, int]:
        """Return the latent tokens down and across."""
        stride, side = self.config.latent_stride, self.config.max_latent_size
        if image_shape is None:
            raise SchemaError("the contexts have no image_shape")
        height, width = image_shape
        if any(n <= 0 or n % stride or n > stride * side for n in (height, width)):
            raise SchemaError(
                f"image_shape {(height, width)}: sides are multiples of {stride} "
                f"up to {stride * side}"
            )
        return height // stride, width // stride

    def _check(self, name: str, context: BagelContext) -> None:
        check_context(
            name,
            context,
            num_layers=self.num_layers,
            heads=len(self.model.kv_heads),
            head_dim=self.config.llm.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _require(self, part: str, present: bool) -> None:
        if not present:
            raise RuntimeError(f"this pipeline was loaded with stage={self.stage!r}: no {part}")


def _pick(logits: Tensor, temperature: float | None, generator: Generator | None) -> int:
    """Return the next token of logits [vocab]: drawn at a temperature, or the most probable."""
    if temperature is None:
        return int(logits.argmax())
    chances = (logits / temperature).float().softmax(-1)
    device = "cpu" if generator is None else generator.device
    return int(torch.multinomial(chances.to(device), 1, generator=generator))
