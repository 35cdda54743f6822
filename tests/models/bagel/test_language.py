"""The cached, block-wise language model against one plain forward pass without any cache.

The reference below takes the weights by their published names and computes every row of a whole
prompt at once, with an explicit mask: nothing of the model's own code is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from .conftest import stored

if TYPE_CHECKING:
    from omni_kvlink.models.bagel import BagelPipeline


@dataclass
class Block:
    """Consecutive rows of a prompt. `latent` blocks have a marker row at each end."""

    rows: Tensor
    causal: bool
    latent: bool = False


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _mask_and_positions(blocks: list[Block]) -> tuple[Tensor, list[int], list[bool]]:
    total = sum(len(block.rows) for block in blocks)
    mask = torch.zeros(total, total, dtype=torch.bool)
    positions, latent, at, position = [], [], 0, 0
    for block in blocks:
        n = len(block.rows)
        for i in range(n):
            mask[at + i, : at + (i + 1 if block.causal else n)] = True
            positions.append(position + i if block.causal else position)
            latent.append(block.latent and 0 < i < n - 1)
        at, position = at + n, position + (n if block.causal else 1)
    return mask, positions, latent


def reference(
    pipeline: BagelPipeline, blocks: list[Block]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Normed hidden rows of all blocks, and K and V of every layer."""
    weights, llm = pipeline.model.state_dict(), pipeline.config.llm
    heads, kv_heads, dim = llm.num_attention_heads, llm.num_key_value_heads, llm.head_dim
    mask, positions, latent = _mask_and_positions(blocks)
    x = torch.cat([block.rows for block in blocks])
    keys, values = [], []

    def rowwise(name: str, x: Tensor) -> Tensor:
        """Applies a layer row by row, each row with the weights of its expert."""
        out = []
        for row, gen in zip(x, latent, strict=True):
            full = f"language_model.model.{name}{'_moe_gen' * gen}"
            if "norm" in name:
                out.append(_norm(row, weights[f"{full}.weight"]))
            else:
                bias = weights.get(f"{full}.bias", torch.zeros(()))
                out.append(weights[f"{full}.weight"] @ row + bias)
        return torch.stack(out)

    def turn(x: Tensor) -> Tensor:
        angles = torch.tensor(
            [[p / llm.rope_theta ** (2 * i / dim) for i in range(dim // 2)] for p in positions]
        )[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def mlp(layer: str, x: Tensor) -> Tensor:
        out = []
        for row, gen in zip(x, latent, strict=True):
            name = f"language_model.model.{layer}.mlp{'_moe_gen' * gen}"
            gated, up = (weights[f"{name}.{part}_proj.weight"] @ row for part in ("gate", "up"))
            out.append(weights[f"{name}.down_proj.weight"] @ (gated * gated.sigmoid() * up))
        return torch.stack(out)

    for i in range(llm.num_hidden_layers):
        layer = f"layers.{i}"
        normed = rowwise(f"{layer}.input_layernorm", x)
        q, k, v = (rowwise(f"{layer}.self_attn.{part}_proj", normed) for part in "qkv")
        q = turn(rowwise(f"{layer}.self_attn.q_norm", q.view(-1, heads, dim)))
        k = turn(rowwise(f"{layer}.self_attn.k_norm", k.view(-1, kv_heads, dim)))
        v = v.view(-1, kv_heads, dim)
        keys.append(k)
        values.append(v)
        mixed = torch.empty(len(x), heads, dim)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = (q[:, head] @ k[:, kv].T / math.sqrt(dim)).masked_fill(~mask, -math.inf)
            mixed[:, head] = scores.softmax(-1) @ v[:, kv]
        x = x + rowwise(f"{layer}.self_attn.o_proj", mixed.flatten(1))
        x = x + mlp(layer, rowwise(f"{layer}.post_attention_layernorm", x))
    return rowwise("norm", x), keys, values


def _blocks(pipeline: BagelPipeline, seed: int = 0) -> list[Block]:
    """Text, latent, ViT-like and text rows, of the size that real rows have."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(5, True, False), (8, False, True), (6, False, False), (4, True, False)]
    hidden = pipeline.config.llm.hidden_size
    return [
        Block(torch.randn(n, hidden, generator=made), causal, latent)
        for n, causal, latent in shapes
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_cache_and_hidden_rows_equal_one_forward_without_a_cache(
    exact: BagelPipeline, count: int
) -> None:
    blocks = _blocks(exact)[:count]
    context, hidden = exact.empty_context(), torch.empty(0)
    for block in blocks:
        with torch.no_grad():
            context, hidden = exact.model.extend(
                context, block.rows, mode="gen" if block.latent else "und", causal=block.causal
            )
    expected, keys, values = reference(exact, blocks)
    assert torch.allclose(hidden, expected[-len(hidden) :], atol=1e-3)
    for layer in range(exact.num_layers):
        got_keys, got_values = stored(context, layer)
        assert torch.allclose(got_keys, keys[layer], atol=1e-3)
        assert torch.allclose(got_values, values[layer], atol=1e-3)


def test_velocity_is_the_generation_experts_view_of_all_before(exact: BagelPipeline) -> None:
    *before, _ = blocks = [*_blocks(exact)[:2], Block(_blocks(exact, 1)[1].rows, False, True)]
    context = exact.empty_context()
    with torch.no_grad():
        for block in before:
            context, _ = exact.model.extend(
                context, block.rows, mode="gen" if block.latent else "und", causal=block.causal
            )
        flow = exact.model.velocity(context, blocks[-1].rows)
        hidden = reference(exact, blocks)[0][-7:-1]
        expected = hidden @ exact.model.llm2vae.weight.T + exact.model.llm2vae.bias
    assert torch.allclose(flow, expected, atol=1e-3)


def test_one_token_at_a_time_gives_the_cache_of_one_block(exact: BagelPipeline) -> None:
    ids = exact.encode_prompt("one by one")
    whole = exact.append_text(exact.empty_context(), ids)
    single = exact.empty_context()
    for token in ids:
        single = exact.append_text(single, [token])
    assert (single.kv_lens, single.ropes) == (whole.kv_lens, whole.ropes)
    for layer in range(exact.num_layers):
        (one, _), (all_, _) = stored(single, layer), stored(whole, layer)
        assert torch.allclose(one, all_, atol=1e-4)


def test_the_cache_has_the_models_dtype(pipeline: BagelPipeline) -> None:
    context = pipeline.append_text(pipeline.empty_context(), [1, 2, 3])
    context = pipeline.append_vae_latent(context, torch.randn(4, 4, 4))
    for layer in range(pipeline.num_layers):
        for tensor in stored(context, layer):
            assert tensor.dtype == pipeline.dtype
            assert tensor.is_contiguous()


def test_float32_has_no_bfloat16_rounding_inside(exact: BagelPipeline) -> None:
    context = exact.prefill("exact", image_shape=(8, 8)).gen
    context = exact.append_vae_latent(context, torch.randn(4, 4, 4))
    for layer in range(exact.num_layers):
        for tensor in stored(context, layer):
            low_bits = tensor.view(torch.int32) & 0xFFFF
            # A value that went through bfloat16 has sixteen zero bits at its end.
            assert (low_bits != 0).float().mean() > 0.99


def _first_keys(pipeline: BagelPipeline, rows: Tensor, expert: str) -> Tensor:
    """What the first layer's key projection makes of rows [n, hidden]: [n, kv_heads, head_dim]."""
    layer, dim = pipeline.model.language_model.model.layers[0], pipeline.config.llm.head_dim
    normed = layer.get_submodule(f"input_layernorm{expert}")(rows)
    keys: Tensor = layer.get_submodule(f"self_attn.k_proj{expert}")(normed)
    return keys.view(len(rows), -1, dim)


@pytest.mark.parametrize("expert", ["", "_moe_gen"])
def test_bfloat16_rounds_where_the_published_model_does(short: BagelPipeline, expert: str) -> None:
    """In text, norm and rotation round at every operation; in a latent block, once at the end."""
    rows = _blocks(short)[1].rows.bfloat16()
    at = 3
    start = short.append_text(short.empty_context(), [1] * at)
    with torch.no_grad():
        context, _ = short.model.extend(start, rows, mode="gen" if expert else "und", causal=False)
        raw = _first_keys(short, rows[1:-1], expert)
    layer = short.model.language_model.model.layers[0]
    weight = layer.get_parameter(f"self_attn.k_norm{expert}.weight")
    work = torch.float32 if expert else torch.bfloat16
    wide = raw.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    keys = (weight * wide.to(work)).to(work)
    llm, half = short.config.llm, short.config.llm.head_dim // 2
    angles = at / llm.rope_theta ** (torch.arange(half) / half)
    cos, sin = (wave.repeat(2).bfloat16() for wave in (angles.cos(), angles.sin()))
    swapped = torch.cat([-keys[..., half:], keys[..., :half]], -1)
    expected = (keys * cos + swapped * sin).bfloat16()
    got = stored(context, 0)[0][at + 1 : -1]
    assert torch.equal(got, expected)
