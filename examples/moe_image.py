"""A small transformer that reads a prompt and denoises an image, shaped like HunyuanImage-3.0.

What it has of that model (Tencent-Hunyuan/HunyuanImage-3.0, `modeling_hunyuan_image_3.py`, and its
tokenizer): one decoder for text and image; grouped-query attention whose q and k are rotated, then
normalized; positions in two dimensions, an image's grid centred on the tokens it stands for; a
shared expert and the best `moe_topk` of `num_experts`, chosen in float32; a timestep token before
the image tokens; convolutions modulated by the timestep from latents to tokens and back; attention
that is causal in the text and in both directions in the image; guidance away from a prompt of as
many `<cfg>` tokens; Euler steps along a flow with a shifted schedule. K and V of the text do not
depend on the image: they are computed once, and each denoising step reads them.

It does not load that model's checkpoint, and its weights are random. All code is this project's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

BRANCHES = ("gen", "cfg_text")
"""The prompt's cache, and that of the unconditional prompt."""
BOS, BOI, CFG = 256, 257, 258  # tokens after those of the 256 bytes

KV: TypeAlias = list[tuple[Tensor, Tensor]]
"""K and V of each layer, [tokens, kv_heads, head_dim]."""


@dataclasses.dataclass(frozen=True)
class MoeImageConfig:
    hidden_size: int = 64
    intermediate_size: int = 48  # of an expert
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    num_experts: int = 4
    moe_topk: int = 2
    vocab_size: int = 259
    latent_channels: int = 4
    patch_channels: int = 32  # of the convolutions between latents and tokens
    vae_downsample_factor: int = 4
    rope_theta: float = 10000.0


def encode(prompt: str) -> dict[str, list[int]]:
    """The token ids of each branch: as many tokens in both."""
    text = list(prompt.encode())
    return {"gen": [BOS, *text, BOI], "cfg_text": [BOS, *[CFG] * len(text), BOI]}


class Segment:
    """The rows of one sequence in a pass: where they are, what they see, and their own K and V.

    Args:
        positions: (y, x) of each row, [rows, 2].
        mask: which of the past and of these rows each row sees, bool [rows, past + rows].
        past: K and V of the tokens before.
    """

    def __init__(self, config: MoeImageConfig, positions: Tensor, mask: Tensor, past: KV | None):
        pairs = torch.arange(config.head_dim // 2, device=positions.device)
        rates = config.rope_theta ** (-pairs / len(pairs))
        angles = (positions[:, pairs % 2] * rates).repeat(1, 2)[:, None]  # y and x in turn
        self.cos, self.sin = angles.cos(), angles.sin()
        self.mask, self.past = mask, past
        self.own: KV = []

    def rotate(self, rows: Tensor) -> Tensor:
        low, high = rows.float().chunk(2, -1)
        turned = rows.float() * self.cos + torch.cat([-high, low], -1) * self.sin
        return turned.to(rows.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a layer, [rows, heads, head_dim]; keeps its K and V."""
        layer, group = len(self.own), q.shape[1] // k.shape[1]
        self.own.append((k, v))
        if self.past is not None:
            k, v = (torch.cat(each) for each in zip(self.past[layer], (k, v), strict=True))
        k, v = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (k, v))
        found = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=self.mask)
        return found.transpose(0, 1)


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x)


class Expert(nn.Module):
    def __init__(self, config: MoeImageConfig):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(F.silu(left) * right)
        return out


class Experts(nn.Module):
    def __init__(self, config: MoeImageConfig):
        super().__init__()
        self.top_k = config.moe_topk
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.shared = Expert(config)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x.float(), self.router.weight.float()).softmax(-1)
        weights, chosen = scores.topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out: Tensor = self.shared(x)
        for number, expert in enumerate(self.experts):
            rows, at = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, at, None])
        return out


class Layer(nn.Module):
    def __init__(self, config: MoeImageConfig):
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.q_size = config.num_attention_heads * config.head_dim
        self.kv_size = config.num_key_value_heads * config.head_dim
        self.input_norm, self.post_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.qkv_proj = nn.Linear(hidden, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)
        self.mlp = Experts(config)

    def forward(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        sizes = [self.q_size, self.kv_size, self.kv_size]
        parts = self.qkv_proj(self.input_norm(x)).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        found, start = [], 0
        for each in segments:
            rows = slice(start, start := start + len(each.mask))
            turned = (self.q_norm(each.rotate(q[rows])), self.k_norm(each.rotate(k[rows])))
            found.append(each.attend(*turned, v[rows]))
        x = x + self.o_proj(torch.cat(found).flatten(1))
        out: Tensor = x + self.mlp(self.post_norm(x))
        return out


class TimeEmbedding(nn.Module):
    def __init__(self, config: MoeImageConfig):
        super().__init__()
        hidden = config.hidden_size
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def forward(self, times: Tensor) -> Tensor:
        """[images] within 0…1 to [images, hidden]."""
        first = self.mlp[0]
        assert isinstance(first, nn.Linear)
        half = first.in_features // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=times.device) / half)
        angles = 1000 * times[:, None] * rates
        found: Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(first.weight))
        return found


class TimedBlock(nn.Module):
    """Two convolutions and a skip; the timestep scales and shifts what is between them."""

    def __init__(self, before: int, after: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.modulation = nn.Linear(hidden, 2 * after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.modulation(F.silu(time))[..., None, None].chunk(2, 1)
        inner = self.norm2(self.conv1(F.silu(self.norm1(x))))
        out: Tensor = self.skip(x) + self.conv2(F.silu(inner * (1 + scale) + shift))
        return out


class MoeImageModel(nn.Module):
    """The transformer; `stage` "ar" has what reads text, "dit" what denoises, "all" both."""

    def __init__(self, config: MoeImageConfig, stage: str = "all"):
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        if stage != "dit":
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if stage != "ar":
            inner = config.patch_channels
            self.time_in, self.time_out = TimeEmbedding(config), TimeEmbedding(config)
            self.time_token = TimeEmbedding(config)
            self.conv_in = nn.Conv2d(config.latent_channels, inner, 3, padding=1)
            self.patch_embed = TimedBlock(inner, hidden, hidden)
            self.norm = RMSNorm(hidden)
            self.final_layer = TimedBlock(hidden, inner, hidden)
            self.conv_out = nn.Conv2d(inner, config.latent_channels, 3, padding=1)

    def prefill(self, token_ids: Sequence[int]) -> KV:
        """K and V of a text, which is read in one pass."""
        x = self.embed_tokens(torch.tensor(token_ids, device=self.embed_tokens.weight.device))
        where = torch.arange(len(x), device=x.device)
        mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()
        segment = Segment(self.config, where[:, None].expand(-1, 2), mask, None)
        for layer in self.layers:
            x = layer(x, [segment])
        return segment.own

    def velocity(self, latents: Tensor, times: Tensor, pasts: Sequence[KV]) -> Tensor:
        """The flow [images, channels, h, w] of images at their times, each after its own text."""
        count, _, *grid = latents.shape
        x = self.conv_in(latents.to(self.conv_in.weight.dtype))
        x = self.patch_embed(x, self.time_in(times)).flatten(2).transpose(1, 2)
        x = torch.cat([self.time_token(times)[:, None], x], 1).flatten(0, 1)
        segments = [self._image_segment(past, (grid[0], grid[1])) for past in pasts]
        for layer in self.layers:
            x = layer(x, segments)
        x = self.norm(x).unflatten(0, (count, -1))[:, 1:].transpose(1, 2).unflatten(2, grid)
        flow: Tensor = self.conv_out(F.silu(self.final_layer(x, self.time_out(times))))
        return flow.float()

    def _image_segment(self, past: KV, grid: tuple[int, int]) -> Segment:
        """A timestep token, which sees the text and itself, and image tokens, which see all."""
        (height, width), text, device = grid, len(past[0][0]), past[0][0].device
        first = torch.tensor([[text, text]], device=device)
        corner = torch.tensor([height, width], device=device)
        corner = text + 1 + (height * width - corner) // 2
        rows, columns = (torch.arange(size, device=device) for size in grid)
        image = torch.cartesian_prod(rows, columns) + corner
        mask = torch.ones(1 + len(image), text + 1 + len(image), dtype=torch.bool, device=device)
        mask[0, text + 1 :] = False
        return Segment(self.config, torch.cat([first, image]), mask, past)


class Decoder(nn.Module):
    """From latents [1, channels, h, w] to an image."""

    def __init__(self, config: MoeImageConfig):
        super().__init__()
        self.conv_in = nn.Conv2d(config.latent_channels, 32, 3, padding=1)
        doublings = int(math.log2(config.vae_downsample_factor))
        self.up = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(doublings))
        self.conv_out = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """uint8 [H, W, 3]."""
        x = self.conv_in(latents.to(self.conv_in.weight.dtype))
        for conv in self.up:
            x = F.silu(conv(F.interpolate(x, scale_factor=2.0)))
        image: Tensor = self.conv_out(x)[0].float().clamp(-1, 1)
        return ((image / 2 + 0.5) * 255).round().to(torch.uint8).permute(1, 2, 0)


def schedule(steps: int, shift: float) -> Tensor:
    """The times of the flow, from 1 (noise) to 0: float32 [steps + 1]."""
    times = torch.linspace(1, 0, steps + 1)
    return shift * times / (1 + (shift - 1) * times)


def guided(flows: dict[str, Tensor], scale: float) -> Tensor:
    """The flow away from the unconditional prompt, if there is one."""
    if "cfg_text" not in flows:
        return flows["gen"]
    return flows["cfg_text"] + scale * (flows["gen"] - flows["cfg_text"])


@torch.inference_mode()
def generate(
    model: MoeImageModel,
    decoder: Decoder,
    prompt: str,
    *,
    seed: int = 0,
    size: tuple[int, int] = (32, 32),
    steps: int = 50,
    guidance_scale: float = 5.0,
    shift: float = 3.0,
) -> Tensor:
    """The image of a prompt in this process, without an engine: uint8 [H, W, 3]."""
    branches = BRANCHES if guidance_scale > 1 else BRANCHES[:1]
    pasts = {name: model.prefill(encode(prompt)[name]) for name in branches}
    factor, channels = model.config.vae_downsample_factor, model.config.latent_channels
    shape = (1, channels, size[0] // factor, size[1] // factor)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    times = schedule(steps, shift)
    for now, after in itertools.pairwise(times):
        flows = {name: model.velocity(latents, now[None], [pasts[name]]) for name in branches}
        latents = latents + guided(flows, guidance_scale) * (after - now)
    image: Tensor = decoder(latents)
    return image


def load(
    directory: str | Path,
    stage: str,
    dtype: torch.dtype = torch.float32,
    vae_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[MoeImageModel, Decoder | None]:
    """Read what a stage needs of a checkpoint; an AR stage decodes nothing."""
    root = Path(directory)
    config = MoeImageConfig(**json.loads((root / "config.json").read_text()))
    with torch.device("meta"):
        model = MoeImageModel(config, stage)
        decoder = None if stage == "ar" else Decoder(config)
    with safe_open(str(root / "model.safetensors"), framework="pt", device=str(device)) as file:
        for name, module, own in (("model", model, dtype), ("decoder", decoder, vae_dtype)):
            if module is not None:
                keys = module.state_dict().keys()
                # Copied: torch aligns its memory, and some sums are ordered by the alignment.
                found = {key: file.get_tensor(f"{name}.{key}") for key in keys}
                tensors = {key: tensor.to(own, copy=True) for key, tensor in found.items()}
                module.requires_grad_(False).load_state_dict(tensors, assign=True)
    return model, decoder


def make_tiny_checkpoint(directory: str | Path, seed: int = 0) -> Path:
    """Write random weights, by which an image depends on all of its prompt."""
    root, config = Path(directory), MoeImageConfig()
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    parts: dict[str, nn.Module] = {"model": MoeImageModel(config), "decoder": Decoder(config)}
    for part, module in parts.items():
        for name, like in module.state_dict().items():
            noise = torch.randn(like.shape, generator=generator)
            gain = 3.0 if "o_proj" in name or "q_norm" in name else 1.0
            if "norm" in name and name.endswith("weight"):
                noise = 1 + 0.1 * noise
            elif like.ndim == 1:
                noise = 0.1 * noise
            elif "embed_tokens" not in name:
                noise = noise / math.sqrt(like[0].numel())
            tensors[f"{part}.{name}"] = gain * noise
    save_file(tensors, str(root / "model.safetensors"))
    return root
