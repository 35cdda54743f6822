"""The language model: Qwen2 with two experts in every layer (mixture of transformers).

The understanding expert ("und") reads text, ViT patches and the two marker rows around every image
block; the generation expert (names ending in `_moe_gen`) reads the latent patches between the
markers. Attention is shared. Rows are [n, hidden], of one sequence or of several concatenated
texts; a batch of images of one size is [n, batch, hidden]. Each sequence has a past of its own:
everything but attention runs once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omni_kvlink.models.bagel.cache import Layer, LayerCache, NaiveCache, joined, layer_tensors
from omni_kvlink.models.bagel.embeddings import Rotary, blank_embedding, rotary_tables, rotate
from omni_kvlink.models.bagel.hooks import RunLayers
from omni_kvlink.models.bagel.shards import WHOLE, CutLinear, Split

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import LanguageConfig

Mode = Literal["und", "gen"]
Merge: TypeAlias = Callable[[Tensor, Tensor], Layer]
"""Takes new rows of a layer's K and V, returns all rows of both."""
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes new rows of q, k and v; returns the attention of each row, [..., heads * dim]."""
Through: TypeAlias = Callable[[Tensor, RunLayers, int], Tensor]
"""Runs all or some of the layers: `through(x, run, count)`."""


def by_expert(
    mode: Mode, x: Tensor, und: Callable[[Tensor], Tensor], gen: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply `und` to all rows; in mode "gen", apply `gen` to all but the first and last row."""
    if mode == "und":
        return und(x)
    markers = und(x[[0, -1]])
    return torch.cat([markers[:1], gen(x[1:-1]), markers[1:]])


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
        out: Tensor = self.weight * wide.to(x.dtype)
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


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of q [n, heads, dim] over k, v [m, kv_heads, dim]: [n, heads * dim].

    The queries are the last n of the m tokens; a causal query attends to itself and all before it.
    """
    n, m = q.shape[0], k.shape[0]
    groups = q.shape[1] // k.shape[1]
    # Repeated by hand, because older torch has no grouped attention.
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mask = None
    if causal and 1 < n < m:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal and 1 < n == m
    )
    return out[0].transpose(0, 1).reshape(n, -1)


def attend_merged(q: Tensor, k: Tensor, v: Tensor, *, merge: Merge, causal: bool) -> Tensor:
    """Run `attend` over a sequence's past and its new rows."""
    return attend(q, *merge(k, v), causal=causal)


def attend_each(q: Tensor, k: Tensor, v: Tensor, *, merges: Sequence[Merge]) -> Tensor:
    """Run `attend` for each sequence of a batch over its own past: [n, batch, heads * dim]."""
    rows = [
        attend(q[:, i], *merge(k[:, i], v[:, i]), causal=False) for i, merge in enumerate(merges)
    ]
    return torch.stack(rows, dim=1)


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, merges: Sequence[Merge], seq_lens: Sequence[int]
) -> Tensor:
    """Run `attend` for each of several concatenated sequences over its own past, causally."""
    parts = zip(*(rows.split(list(seq_lens)) for rows in (q, k, v)), merges, strict=True)
    return torch.cat([attend(q, *merge(k, v), causal=True) for q, k, v, merge in parts])


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

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, mode: Mode) -> Tensor:
        """Map rows to rows of the same shape; `attend` says which rows each attends to."""
        # The cached dtype is the model's, whatever norm and rotation widened to.
        q = rotate(self._normed("q", x, mode), rotary).to(x.dtype)
        k = rotate(self._normed("k", x, mode), rotary).to(x.dtype)
        v = self._heads("v", x, mode)
        return self._project("o", attend(q, k, v), mode)

    def _project(self, which: str, x: Tensor, mode: Mode) -> Tensor:
        und, gen = self._experts(f"{which}_proj")
        return by_expert(mode, x, und, gen)

    def _heads(self, which: str, x: Tensor, mode: Mode) -> Tensor:
        return self._project(which, x, mode).view(*x.shape[:-1], -1, self.head_dim)

    def _normed(self, which: str, x: Tensor, mode: Mode) -> Tensor:
        heads = self._heads(which, x, mode)
        if mode == "gen":
            heads = heads.float()  # with latent rows, norm and rotation stay wide
        if not self.qk_norm:
            return heads
        und, gen = self._experts(f"{which}_norm")
        return by_expert(mode, heads, und, gen)

    def _experts(self, name: str) -> tuple[nn.Module, nn.Module]:
        return self.get_submodule(name), self.get_submodule(f"{name}_moe_gen")


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, summed over all ranks and added to its input."""

    def __init__(self, config: LanguageConfig, split: Split) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._total = split.total
        self.self_attn = Attention(config, split)
        self.mlp = MLP(config, split)
        self.mlp_moe_gen = MLP(config, split)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.input_layernorm_moe_gen = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm_moe_gen = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, mode: Mode) -> Tensor:
        """Map rows [..., hidden] to rows of the same shape."""
        normed = by_expert(mode, x, self.input_layernorm, self.input_layernorm_moe_gen)
        x = x + self._total(self.self_attn(normed, rotary, attend, mode))
        return x + self._total(by_expert(mode, x, self._und_mlp, self._gen_mlp))

    def _und_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.post_attention_layernorm(x))
        return out

    def _gen_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(x))
        return out


class TextDecoder(nn.Module):
    """Embeddings, layers and the final norms; only the layers are split over ranks."""

    def __init__(self, config: LanguageConfig, split: Split) -> None:
        super().__init__()
        split.check(config)
        self.config = config
        self.embed_tokens = blank_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, split) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        past: LayerCache,
        *,
        mode: Mode,
        causal: bool,
        into: NaiveCache,
    ) -> Tensor:
        """Run rows x [n, hidden] after the cached tokens, which are only read; return them normed.

        Every layer is merged into `into`, which `past.after(n)` returned.
        """
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for i, layer in enumerate(self.layers):
            merge = partial(into.merge, i, layer_tensors(past, i))
            x = layer(x, rotary, partial(attend_merged, merge=merge, causal=causal), mode)
        return by_expert(mode, x, self.norm, self.norm_moe_gen)

    def forward_each(
        self,
        x: Tensor,
        positions: Tensor,
        pasts: Sequence[LayerCache],
        into: Sequence[NaiveCache],
        seq_lens: Sequence[int],
    ) -> Tensor:
        """Run text rows x [n, hidden] of several sequences, each after its own cached tokens.

        The first `seq_lens[0]` rows are of the first sequence, and so on. As `forward`, with a
        cache and an `into` for each sequence.
        """
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for i, layer in enumerate(self.layers):
            merges = [
                partial(own.merge, i, layer_tensors(past, i))
                for own, past in zip(into, pasts, strict=True)
            ]
            attend = partial(attend_varlen, merges=merges, seq_lens=seq_lens)
            x = layer(x, rotary, attend, "und")
        out: Tensor = self.norm(x)
        return out

    def denoise(
        self, x: Tensor, positions: Tensor, pasts: Sequence[LayerCache], through: Through | None
    ) -> Tensor:
        """Run latent rows between their markers and return them normed; stores nothing.

        Rows x are [n, hidden] with positions [n]; in a batch, which has a cache for each sequence,
        [n, batch, hidden] with positions [n, batch]. `through` decides which layers run.
        """
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, x.dtype)

        def run(rows: Tensor, start: int, stop: int) -> Tensor:
            for i in range(start, stop):
                merges = [partial(joined, layer_tensors(past, i)) for past in pasts]
                attend = (
                    partial(attend_each, merges=merges)
                    if rows.ndim == 3
                    else partial(attend_merged, merge=merges[0], causal=False)
                )
                rows = self.layers[i](rows, rotary, attend, "gen")
            return rows

        count = len(self.layers)
        x = run(x, 0, count) if through is None else through(x, run, count)
        return by_expert("gen", x, self.norm, self.norm_moe_gen)


class LanguageModel(nn.Module):
    """The decoder and, for a stage that writes text, the head that predicts the next token."""

    def __init__(self, config: LanguageConfig, *, head: bool, split: Split = WHOLE) -> None:
        super().__init__()
        self.model = TextDecoder(config, split)
        if head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
