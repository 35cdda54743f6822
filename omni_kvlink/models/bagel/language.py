"""The language model: Qwen2 with two experts in every layer (mixture of transformers).

The understanding expert ("und") reads text, ViT patches and the two marker rows around every image
block; the generation expert (names ending in `_moe_gen`) reads the latent patches between the
markers. Attention is shared. Rows are [n, hidden]; a batch of sequences with as many new rows each,
but pasts of their own, is [n, batch, hidden]: everything but attention then runs once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omni_kvlink.models.bagel.attention import DenseAttention, attend, attend_each
from omni_kvlink.models.bagel.cache import Layer, LayerCache, NaiveCache, joined, layer_tensors
from omni_kvlink.models.bagel.embeddings import Rotary, blank_embedding, rotary_tables, rotate
from omni_kvlink.models.bagel.hooks import RunLayers
from omni_kvlink.models.bagel.shards import WHOLE, CutLinear, Split

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import LanguageConfig

Mode = Literal["und", "gen", "gen_start", "gen_middle", "gen_end"]
"""The expert of the rows: "gen" has a marker row before and after latent rows; the last three are
parts of such rows."""
_MARKERS = {"gen": (1, 1), "gen_start": (1, 0), "gen_middle": (0, 0), "gen_end": (0, 1)}
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes q, k, v [n, …, heads, dim] of new rows, returns their attention [n, …, heads * dim]."""
Regions: TypeAlias = tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]
"""The functions of a layer before and after attention."""
Through: TypeAlias = Callable[[Tensor, RunLayers, int], Tensor]
"""Runs all or some of the layers: `through(x, run, count)`."""


def by_expert(
    mode: Mode, x: Tensor, und: Callable[[Tensor], Tensor], gen: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply `und` to all rows; in other modes, `gen` to latent rows and `und` to markers alone."""
    if mode == "und":
        return und(x)
    head, tail = _MARKERS[mode]
    latent = gen(x[head : len(x) - tail])
    if not head + tail:
        return latent
    markers = und(x[[0, -1][1 - head : 1 + tail]])
    return torch.cat([markers[:head], latent, markers[head:]])


def _mode_of(part: slice, count: int) -> Mode:
    """The mode of some of `count` rows in mode "gen"."""
    has_start, has_end = part.start == 0 < part.stop, part.stop == count > part.start
    modes: dict[tuple[bool, bool], Mode] = {
        (True, True): "gen",
        (True, False): "gen_start",
        (False, True): "gen_end",
    }
    return modes.get((has_start, has_end), "gen_middle")


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        out: Tensor = self.weight * wide.to(x.dtype)  # rounded before the product, as in Qwen2
        return out


class MLP(nn.Module):
    """SwiGLU; with a split, this rank's part of the sum."""

    def __init__(self, config: LanguageConfig, split: Split) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        local = split.part(inner)
        self.gate_proj = CutLinear(hidden, inner, rows=local)
        self.up_proj = CutLinear(hidden, inner, rows=local)
        self.down_proj = CutLinear(inner, hidden, columns=local)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows [..., hidden] to rows of the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """This rank's part of grouped-query attention; projections and norms exist once per expert."""

    def __init__(self, config: LanguageConfig, split: Split) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim, self.qk_norm = dim, config.qk_norm
        q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
        q_rows = split.part(config.num_attention_heads, dim)
        kv_rows = split.part(config.num_key_value_heads, dim)
        for expert in ("", "_moe_gen"):
            self.add_module(f"q_proj{expert}", CutLinear(hidden, q_size, bias=True, rows=q_rows))
            for name in ("k_proj", "v_proj"):
                linear = CutLinear(hidden, kv_size, bias=True, rows=kv_rows)
                self.add_module(f"{name}{expert}", linear)
            self.add_module(f"o_proj{expert}", CutLinear(q_size, hidden, columns=q_rows))
            for name in ("q_norm", "k_norm") if config.qk_norm else ():
                self.add_module(f"{name}{expert}", RMSNorm(dim, config.rms_norm_eps))

    def qkv(self, x: Tensor, rotary: Rotary, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
        """Map rows [n, hidden] to q [n, heads, dim], and k and v [n, kv_heads, dim]."""
        # The cached dtype is the model's, whatever norm and rotation widened to.
        q = rotate(self._normed("q", x, mode), rotary).to(x.dtype)
        k = rotate(self._normed("k", x, mode), rotary).to(x.dtype)
        return q, k, self._heads("v", x, mode)

    def output(self, mixed: Tensor, mode: Mode) -> Tensor:
        """Map what was attended to, [n, heads * dim], to rows [n, hidden]."""
        return self._project("o", mixed, mode)

    def _project(self, kind: str, x: Tensor, mode: Mode) -> Tensor:
        und, gen = self._experts(f"{kind}_proj")
        return by_expert(mode, x, und, gen)

    def _heads(self, kind: str, x: Tensor, mode: Mode) -> Tensor:
        rows: Tensor = self._project(kind, x, mode).unflatten(-1, (-1, self.head_dim))
        return rows

    def _normed(self, kind: str, x: Tensor, mode: Mode) -> Tensor:
        heads = self._heads(kind, x, mode)
        if mode != "und":
            heads = heads.float()  # with latent rows, norm and rotation stay wide
        if not self.qk_norm:
            return heads
        und, gen = self._experts(f"{kind}_norm")
        return by_expert(mode, heads, und, gen)

    def _experts(self, name: str) -> tuple[nn.Module, nn.Module]:
        return self.get_submodule(name), self.get_submodule(f"{name}_moe_gen")


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, summed over all ranks and added to its input."""

    def __init__(self, config: LanguageConfig, split: Split) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._total = split.total
        self._compiled: Regions | None = None
        self.self_attn = Attention(config, split)
        self.mlp = MLP(config, split)
        self.mlp_moe_gen = MLP(config, split)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.input_layernorm_moe_gen = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm_moe_gen = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, mode: Mode) -> Tensor:
        """Map rows [n, hidden], or in a batch [n, batch, hidden], to rows of the same shape."""
        before_attention, after_attention = self._regions()
        q, k, v = before_attention(x, rotary, mode)
        return after_attention(x, attend(q, k, v), mode)

    def before_attention(
        self, x: Tensor, rotary: Rotary, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map rows x [n, hidden] to q, k and v; see `Attention.qkv`."""
        normed = by_expert(mode, x, self.input_layernorm, self.input_layernorm_moe_gen)
        return self.self_attn.qkv(normed, rotary, mode)

    def after_attention(self, x: Tensor, mixed: Tensor, mode: Mode) -> Tensor:
        """Return the layer's result for its input x and what its rows attended to."""
        x = x + self._total(self.self_attn.output(mixed, mode))
        return x + self._total(by_expert(mode, x, self._und_mlp, self._gen_mlp))

    def compile_regions(self, **options: Any) -> None:
        """Compile what is before and after attention with `torch.compile(..., **options)`.

        The cache, whose tensors come from elsewhere, and sums over ranks stay outside. While a part
        of the layer has forward hooks, such as those of a LoRA adapter, the layer runs uncompiled:
        compiled code would leave them out.
        """
        if self._total is not WHOLE.total:
            self._total = torch.compiler.disable(self._total)
        self._compiled = (
            torch.compile(self.before_attention, **options),
            torch.compile(self.after_attention, **options),
        )
        self._parts = [*self.modules()][1:]

    def _regions(self) -> Regions:
        if self._compiled and not any(part._forward_hooks for part in self._parts):
            return self._compiled
        return self.before_attention, self.after_attention

    def _und_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.post_attention_layernorm(x))
        return out

    def _gen_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(x))
        return out


class TextDecoder(nn.Module):
    """Embeddings, layers and the final norms; only the layers are split over ranks.

    In place of a layer of another pipeline rank there is an `nn.Identity`, so that the names are
    those of the whole model. `dense` computes attention; see `attention_backends`.
    """

    def __init__(self, config: LanguageConfig, split: Split) -> None:
        super().__init__()
        split.check(config)
        self.dense: DenseAttention = attend
        self.config, self._sequence, self._pipeline = config, split.sequence, split.pipeline
        layers = self._pipeline.layers(config.num_hidden_layers)
        self.start_layer, self.end_layer = layers.start, layers.stop
        self.embed_tokens = blank_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, split) if i in layers else nn.Identity()
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def own_layers(self) -> list[DecoderLayer]:
        """The layers of this rank, in their order."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        pasts: Sequence[LayerCache],
        into: Sequence[NaiveCache],
        seq_lens: Sequence[int],
        *,
        mode: Mode,
        causal: bool,
    ) -> Tensor:
        """Run rows x [n, hidden] of sequences, each after its cached tokens; return them normed.

        The first `seq_lens[0]` rows are of the first sequence, and so on. Pasts are only read;
        every layer is merged into `into`, which `past.after(n)` returned for each.
        """
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for i, layer in enumerate(self.layers):
            merges = [
                partial(cache.merge, i, layer_tensors(past, i))
                for cache, past in zip(into, pasts, strict=True)
            ]
            each = partial(
                attend_each, merges=merges, dense=self.dense, seq_lens=seq_lens, causal=causal
            )
            x = layer(x, rotary, each, mode)
        return by_expert(mode, x, self.norm, self.norm_moe_gen)

    def denoise(
        self, x: Tensor, positions: Tensor, pasts: Sequence[LayerCache], through: Through | None
    ) -> Tensor:
        """Run latent rows between their markers and return them normed; stores nothing.

        Rows x are [n, hidden] with positions [n]; in a batch, which has a cache for each sequence,
        [n, batch, hidden] with positions [n, batch]. `through` decides which layers run.
        """
        n, count = len(x), len(self.layers)
        part = self._sequence.rows(n)
        mode, theta = _mode_of(part, n), self.config.rope_theta
        rotary = rotary_tables(positions[part], self.config.head_dim, theta, x.dtype)

        def run_own(rows: Tensor, start: int, stop: int) -> Tensor:
            for i in range(start, stop):
                past = [layer_tensors(cache, i - self.start_layer) for cache in pasts]
                rows = self.layers[i](rows, rotary, partial(self._attend, past, n), mode)
            return rows

        def run(rows: Tensor, start: int, stop: int) -> Tensor:
            if mode != "gen":  # a view of all rows would be compiled code of its own
                rows = rows[part]
            rows = self._pipeline.run(rows, start, stop, count, run_own)
            return self._sequence.gather(rows, n)

        x = run(x, 0, count) if through is None else through(x, run, count)
        return by_expert("gen", x, self.norm, self.norm_moe_gen)

    def _attend(
        self, pasts: Sequence[Layer | None], count: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention of some of `count` rows in `denoise`, with a past for each sequence."""
        if self._sequence.degree == 1:
            merges, lens = [partial(joined, past) for past in pasts], [len(q)]
            return attend_each(q, k, v, merges, self.dense, seq_lens=lens if q.ndim == 3 else None)
        attend_rows = partial(self._sequence.attend, pasts=pasts, count=count, dense=self.dense)
        if q.ndim == 4:
            return attend_rows(q, k, v)
        return attend_rows(*(t.unsqueeze(1) for t in (q, k, v))).squeeze(1)


class LanguageModel(nn.Module):
    """The decoder and, for a stage that writes text, the head that predicts the next token."""

    def __init__(self, config: LanguageConfig, *, head: bool, split: Split = WHOLE) -> None:
        super().__init__()
        self.model = TextDecoder(config, split)
        if head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
