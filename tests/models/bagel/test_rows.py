"""What enters the language model: latent rows and ViT rows, against their formulas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from .conftest import stored

if TYPE_CHECKING:
    from omni_kvlink.models.bagel import BagelPipeline


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _time(weights: dict[str, Tensor], t: float) -> Tensor:
    angles = torch.tensor([t * 10000 ** (-i / 128) for i in range(128)])
    inner = _linear(weights, "time_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()]))
    return _linear(weights, "time_embedder.mlp.2", inner * inner.sigmoid())


def _patches(image: Tensor, size: int) -> Tensor:
    _, height, width = image.shape
    cells = [
        image[:, top : top + size, left : left + size].permute(1, 2, 0).flatten()
        for top in range(0, height, size)
        for left in range(0, width, size)
    ]
    return torch.stack(cells)


def _table(weights: dict[str, Tensor], name: str, side: int, height: int, width: int) -> Tensor:
    table = weights[name].view(side, side, -1)
    return table[:height, :width].reshape(height * width, -1)


def test_latent_rows_are_projection_and_time_and_position(exact: BagelPipeline) -> None:
    weights = exact.model.state_dict()
    tokens = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    table = _table(weights, "latent_pos_embed.pos_embed", 16, 2, 3)
    expected = _linear(weights, "vae2llm", tokens) + _time(weights, 0.7) + table
    with torch.no_grad():
        got = exact.model.latent_rows(tokens, 2, 3, torch.tensor([0.7]))
    assert torch.allclose(got, expected, atol=1e-4)


def test_an_encoded_image_is_at_time_zero_and_uses_the_generation_expert(
    exact: BagelPipeline,
) -> None:
    weights, special_tokens = exact.model.state_dict(), exact.special_tokens
    latent = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0))
    table = _table(weights, "latent_pos_embed.pos_embed", 16, 2, 3)
    rows = _linear(weights, "vae2llm", _patches(latent, 2)) + _time(weights, 0.0) + table
    ends = weights["language_model.model.embed_tokens.weight"]
    first, last = ends[[special_tokens.start_of_image]], ends[[special_tokens.end_of_image]]
    start = exact.append_text(exact.empty_context(), [1, 2])
    with torch.no_grad():
        expected, _ = exact.model.extend(
            start, torch.cat([first, rows, last]), mode="gen", causal=False
        )
    got = exact.append_vae_latent(start, latent)
    assert (got.kv_lens, got.ropes) == (expected.kv_lens, expected.ropes)
    for layer in range(exact.num_layers):
        (_, one), (_, two) = stored(got, layer), stored(expected, layer)
        assert torch.allclose(one, two, atol=1e-3)


def test_vit_rows_are_the_encoder_the_connector_and_the_position(exact: BagelPipeline) -> None:
    """The encoder is written out here with one head at a time."""
    weights, vit = exact.model.state_dict(), exact.config.vit
    prefix, dim = "vit_model.vision_model.", vit.hidden_size // vit.num_attention_heads
    pixels = torch.rand(3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def norm(name: str, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        scaled: Tensor = x * weights[f"{prefix}{name}.weight"] + weights[f"{prefix}{name}.bias"]
        return scaled

    def mlp(name: str, x: Tensor) -> Tensor:
        inner = F.gelu(_linear(weights, f"{name}fc1", x), approximate="tanh")
        return _linear(weights, f"{name}fc2", inner)

    x = _linear(weights, f"{prefix}embeddings.patch_embedding", _patches(pixels, 8))
    x = x + _table(weights, f"{prefix}embeddings.position_embedding.weight", 8, 2, 3)
    for i in range(vit.layers_used):
        layer, heads = f"encoder.layers.{i}.", []
        normed = norm(f"{layer}layer_norm1", x)
        q, k, v = (
            _linear(weights, f"{prefix}{layer}self_attn.{part}_proj", normed) for part in "qkv"
        )
        for at in range(0, vit.hidden_size, dim):
            one = slice(at, at + dim)
            heads.append((q[:, one] @ k[:, one].T / math.sqrt(dim)).softmax(-1) @ v[:, one])
        x = x + _linear(weights, f"{prefix}{layer}self_attn.out_proj", torch.cat(heads, -1))
        x = x + mlp(f"{prefix}{layer}mlp.", norm(f"{layer}layer_norm2", x))
    x = mlp("connector.", norm("post_layernorm", x))
    expected = x + _table(weights, "vit_pos_embed.pos_embed", 8, 2, 3)
    with torch.no_grad():
        assert torch.allclose(exact.model.vit_rows(pixels), expected, atol=1e-4)
