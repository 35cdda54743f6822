"""The network of a checkpoint, with the published names, whole or one stage's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.attention import DenseAttention, attend
from omni_kvlink.models.bagel.cache import BagelContext, NaiveCache
from omni_kvlink.models.bagel.embeddings import PositionEmbedding, TimestepEmbedder, patchify
from omni_kvlink.models.bagel.language import LanguageModel, Mode, Through
from omni_kvlink.models.bagel.shards import WHOLE, Split
from omni_kvlink.models.bagel.vision import TwoLayerMLP, VisionModel

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import BagelConfig

Stage = Literal["all", "ar", "dit"]


class BagelModel(nn.Module):
    """Everything in `ema.safetensors`: "ar" reads prompts and writes text, "dit" denoises.

    Both stages hold both experts: an AR stage reads latent patches of an input image, and in the
    DiT stage the marker rows run through the understanding expert. Only the language model is
    split over ranks; all other networks are whole on each. A cache on this rank has the `kv_heads`
    and the layers of `kv_layers`.
    """

    def __init__(self, config: BagelConfig, stage: Stage, split: Split = WHOLE) -> None:
        super().__init__()
        hidden, sequence = config.llm.hidden_size, split.sequence
        if stage != "dit" and split.pipeline.degree > 1:
            raise ValueError(
                f"pipeline_parallel_size {split.pipeline.degree}: stage {stage!r} reads prompts "
                'through all layers; layers are divided in stage "dit"'
            )
        self.config, self._ring_degree = config, sequence.ring_degree
        self.kv_heads = split.part(config.llm.num_key_value_heads)
        if stage == "dit":  # a prompt's cache comes with the heads that it is read with
            self.kv_heads = self.kv_heads[sequence.heads(len(self.kv_heads))]
        self.kv_layers = split.pipeline.layers(config.llm.num_hidden_layers)
        self.language_model = LanguageModel(config.llm, head=stage != "dit", split=split)
        self.time_embedder = TimestepEmbedder(hidden)
        self.vae2llm = nn.Linear(config.patch_dim, hidden)
        self.latent_pos_embed = PositionEmbedding(config.max_latent_size, hidden)
        if stage != "ar":
            self.llm2vae = nn.Linear(hidden, config.patch_dim)
        if stage != "dit":
            self.vit_model = VisionModel(config.vit)
            self.connector = TwoLayerMLP(config.vit.hidden_size, hidden, hidden)
            self.vit_pos_embed = PositionEmbedding(config.vit_max_num_patch_per_side, hidden)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.language_model.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.language_model.model.embed_tokens.weight.device

    def compile_layers(self, **options: Any) -> None:
        """Compile this rank's decoder layers with `torch.compile(..., **options)`, when called.

        The layers share their compiled code. In float32 results differ by rounding.
        """
        for layer in self.language_model.model.own_layers:
            layer.compile_regions(**options)

    def set_attention(self, dense: DenseAttention) -> None:
        """Compute the language model's attention by what `attention_backend` returned.

        That of the ViT stays torch's. Raises ValueError if the ranks of a ring compute it.
        """
        if dense is not attend and self._ring_degree > 1:
            raise ValueError(f"ring_degree {self._ring_degree}: a ring has no other attention")
        self.language_model.model.dense = dense

    def check_context(self, name: str, context: BagelContext) -> None:
        """Raise SchemaError unless the context is complete and fits the model.

        An incomplete cache would give a plausible, wrong image.
        """
        if len(context.kv_lens) != 1 or len(context.ropes) != 1:
            raise SchemaError(f"{name}: kv_lens and ropes must have one entry each (one request)")
        tokens, cache = context.kv_lens[0], context.past_key_values
        if tokens < 0 or context.ropes[0] < 0:
            raise SchemaError(f"{name}: kv_lens {context.kv_lens} and ropes {context.ropes}")
        dtype, device, count = self.dtype, self.device, len(self.kv_layers)
        expected = (tokens, len(self.kv_heads), self.config.llm.head_dim)
        for kind, layers in (("K", cache.key_cache), ("V", cache.value_cache)):
            if len(layers) != count:
                raise SchemaError(f"{name}: {kind} has {len(layers)} layers, the model {count}")
            if isinstance(layers, Mapping) and (missing := set(range(count)) - set(layers)):
                raise SchemaError(f"{name}: {kind} has no layer {min(missing)} among {[*layers]}")
            for layer in range(count):
                tensor, label = layers[layer], f"{name}: {kind} of layer {layer}"
                if tensor is None:
                    if tokens:
                        raise SchemaError(f"{label} is missing, kv_lens says {tokens} tokens")
                elif tuple(tensor.shape) != expected:
                    raise SchemaError(f"{label} has shape {tuple(tensor.shape)}, wanted {expected}")
                elif tensor.dtype != dtype:
                    raise SchemaError(f"{label} is {tensor.dtype}, the model computes in {dtype}")
                elif tensor.device != device:
                    raise SchemaError(f"{label} is on {tensor.device}, the model is on {device}")

    def embed(self, token_ids: list[int]) -> Tensor:
        """Return the embeddings [n, hidden] of token ids."""
        ids = torch.tensor(token_ids, dtype=torch.long, device=self.device)
        rows: Tensor = self.language_model.model.embed_tokens(ids)
        return rows

    def latent_rows(self, tokens: Tensor, height: int, width: int, t: Tensor) -> Tensor:
        """Embed latent tokens [n, patch_dim] of a grid at time t [1] as rows [n, hidden].

        In a batch, [n, batch, patch_dim] as [n, batch, hidden], at one time or at t [batch].
        """
        rows: Tensor = self.vae2llm(tokens.to(self.dtype)) + self.time_embedder(t)
        position_rows = self.latent_pos_embed(height, width)
        rows = rows + (position_rows if rows.ndim == 2 else position_rows[:, None])
        return rows

    def encoded_latent_rows(self, latent: Tensor) -> Tensor:
        """Embed a noiseless latent [z, H, W] of an input image as rows [h * w, hidden]."""
        patch = self.config.latent_patch_size
        height, width = latent.shape[1] // patch, latent.shape[2] // patch
        clean = torch.zeros(1, device=self.device)
        return self.latent_rows(patchify(latent.to(self.device), patch), height, width, clean)

    def vit_rows(self, pixels: Tensor) -> Tensor:
        """Embed pixels [3, H, W] in [-1, 1] as rows [h * w, hidden]."""
        patch, positions = self.config.vit.patch_size, self.vit_pos_embed
        height, width = pixels.shape[1] // patch, pixels.shape[2] // patch
        position_rows = positions(height, width)  # first: it refuses an image that is too large
        features = self.vit_model(pixels.to(self.device), positions.side)
        rows: Tensor = self.connector(features) + position_rows
        return rows

    def extend(
        self, context: BagelContext, x: Tensor, *, mode: Mode, causal: bool
    ) -> tuple[BagelContext, Tensor]:
        """Run rows x [n, hidden] after a context; see `extend_each`."""
        (longer,), hidden = self.extend_each([context], x, [len(x)], mode=mode, causal=causal)
        return longer, hidden

    def extend_each(
        self,
        contexts: Sequence[BagelContext],
        x: Tensor,
        seq_lens: Sequence[int],
        *,
        mode: Mode = "und",
        causal: bool = True,
    ) -> tuple[list[BagelContext], Tensor]:
        """Run rows x [n, hidden] after contexts in one pass; return those longer, and hidden rows.

        The first `seq_lens[0]` rows continue the first context, and so on. Text (causal) takes one
        position per row; an image block, which is alone, takes one for all rows. In float32 a row
        differs from that of a pass of its own by rounding: products of larger matrices may be
        summed otherwise.
        """
        ropes = [context.ropes[0] for context in contexts]
        stops = [at + (n if causal else 1) for at, n in zip(ropes, seq_lens, strict=True)]
        positions = torch.cat(
            [
                torch.arange(at, stop, device=self.device).expand(n)
                for at, stop, n in zip(ropes, stops, seq_lens, strict=True)
            ]
        )
        pasts = [context.past_key_values for context in contexts]
        caches = [_cache_after(context, n) for context, n in zip(contexts, seq_lens, strict=True)]
        hidden = self.language_model.model(
            x, positions, pasts, caches, seq_lens, mode=mode, causal=causal
        )
        states = [
            None if context.hidden is None else context.hidden.after(rows)
            for context, rows in zip(contexts, hidden.split(list(seq_lens)), strict=True)
        ]
        longer = [
            BagelContext([context.kv_lens[0] + n], [stop], cache, state)
            for context, n, stop, cache, state in zip(
                contexts, seq_lens, stops, caches, states, strict=True
            )
        ]
        return longer, hidden

    def velocity(
        self,
        context: BagelContext | Sequence[BagelContext],
        x: Tensor,
        through: Through | None = None,
    ) -> Tensor:
        """Return the flow [n, patch_dim] at rows x: marker, n latent rows, marker. Caches nothing.

        In a batch, rows [n + 2, batch, hidden] and a context each: [n, batch, patch_dim].
        """
        contexts = [context] if isinstance(context, BagelContext) else context
        ropes = torch.tensor([item.ropes[0] for item in contexts], device=self.device)
        positions = ropes.expand(x.shape[0], -1) if x.ndim == 3 else ropes.expand(x.shape[0])
        pasts = [item.past_key_values for item in contexts]
        hidden = self.language_model.model.denoise(x, positions, pasts, through)
        flow: Tensor = self.llm2vae(hidden[1:-1])
        return flow


def _cache_after(context: BagelContext, rows: int) -> NaiveCache:
    """Return the cache for the rows of a context and so many new ones; see `NaiveCache.after`."""
    past = context.past_key_values
    cache = past if isinstance(past, NaiveCache) else NaiveCache(len(past.key_cache))
    return cache.after(rows)
