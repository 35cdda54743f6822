"""The image encoder: SigLIP for any height and width, and its connector."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from omni_kvlink.models.bagel.embeddings import blank_embedding, grid_ids, patchify

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import VisionConfig


class LayerNorm(nn.LayerNorm):
    """Layer norm in float32; the result has the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in float32."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class _VisionAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None] for t in projections)
        mixed = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        out: Tensor = self.out_proj(mixed)
        return out


class TwoLayerMLP(nn.Module):
    """Linear, tanh-approximated GELU, linear."""

    def __init__(self, in_size: int, inner_size: int, out_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_size, inner_size)
        self.fc2 = nn.Linear(inner_size, out_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows [..., in_size] to [..., out_size]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class _VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn = _VisionAttention(hidden, config.num_attention_heads)
        self.mlp = TwoLayerMLP(hidden, config.intermediate_size, hidden)
        self.layer_norm1 = LayerNorm(hidden, eps=eps)
        self.layer_norm2 = LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class _Embeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_size, hidden = config.patch_size, config.hidden_size
        side = config.image_size // config.patch_size
        # A convolution over patches, stored as the matrix that it is.
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, hidden)
        self.position_embedding = blank_embedding(side**2, hidden)

    def forward(self, pixels: Tensor, side: int) -> Tensor:
        patch = self.patch_size
        ids = grid_ids(pixels.shape[1] // patch, pixels.shape[2] // patch, side, pixels.device)
        patches = patchify(pixels, patch).to(self.patch_embedding.weight.dtype)
        out: Tensor = self.patch_embedding(patches) + self.position_embedding(ids)
        return out


class VisionModel(nn.Module):
    """SigLIP without its last layer and without a pooling head."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        layers = nn.Sequential(*(_VisionLayer(config) for _ in range(config.layers_used)))
        self.vision_model = nn.ModuleDict(
            {
                "embeddings": _Embeddings(config),
                "encoder": nn.Sequential(OrderedDict(layers=layers)),
                "post_layernorm": LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
            }
        )

    def forward(self, pixels: Tensor, side: int) -> Tensor:
        """Encode pixels [3, H, W] in [-1, 1] to features [h * w, hidden].

        `side` is the row length in which patches are numbered.
        """
        x = self.vision_model["embeddings"](pixels, side)
        out: Tensor = self.vision_model["post_layernorm"](self.vision_model["encoder"](x))
        return out
