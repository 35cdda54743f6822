"""A BAGEL checkpoint's configuration: the four JSON files, read and validated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.images import ResizeRule, shape_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T", bound=msgspec.Struct)


class LanguageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`llm_config.json`: a Qwen2 decoder with two experts a layer (mixture of transformers)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: dict[str, Any] | None = None
    hidden_act: str = "silu"
    qk_norm: bool = True
    layer_module: str = "Qwen2MoTDecoderLayer"
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        _positive(self, *sizes, "num_attention_heads", "num_key_value_heads")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError("hidden_size must be an even multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        # A silently ignored variant would give a plausible, wrong image.
        _require(self, hidden_act="silu", layer_module="Qwen2MoTDecoderLayer", rope_scaling=None)


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`vit_config.json`: a SigLIP encoder. One layer less than it names is built and used."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    num_channels: int = 3
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"

    @property
    def layers_used(self) -> int:
        """Layers that are built; the checkpoint lacks the last one."""
        return self.num_hidden_layers - 1

    def __post_init__(self) -> None:
        _positive(self, "hidden_size", "intermediate_size", "num_attention_heads", "patch_size")
        _require(self, hidden_act="gelu_pytorch_tanh", num_channels=3)
        if self.num_hidden_layers < 2:
            raise ValueError("num_hidden_layers must be 2 or more: the last one is not used")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")


class AutoencoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`ae_config.json`, an optional file: its defaults are the published autoencoder's values."""

    in_channels: int = 3
    out_ch: int = 3
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    scale_factor: float = 0.3611
    shift_factor: float = 0.1159

    @property
    def downsample(self) -> int:
        """Image pixels per latent cell, along one side."""
        return int(2 ** (len(self.ch_mult) - 1))

    def __post_init__(self) -> None:
        _positive(self, "ch", "num_res_blocks", "z_channels")
        _require(self, in_channels=3, out_ch=3)
        if not self.ch_mult or self.ch % 32:
            raise ValueError("ch must be a multiple of 32 (group norm) and ch_mult not empty")


class _Root(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json`: how the parts fit together. Unknown fields are ignored."""

    latent_patch_size: int = 2
    max_latent_size: int = 64
    vit_max_num_patch_per_side: int = 70
    connector_act: str = "gelu_pytorch_tanh"
    interpolate_pos: bool = False
    # (longest side, shortest side) in pixels that an input image is resized into.
    vae_image_size: tuple[int, int] = (1024, 512)
    vit_image_size: tuple[int, int] = (980, 224)

    def __post_init__(self) -> None:
        _positive(self, "latent_patch_size", "max_latent_size", "vit_max_num_patch_per_side")
        _require(self, connector_act="gelu_pytorch_tanh", interpolate_pos=False)


class BagelConfig(_Root, frozen=True, kw_only=True):
    """A checkpoint's whole configuration."""

    llm: LanguageConfig
    vit: VisionConfig
    ae: AutoencoderConfig

    @property
    def latent_stride(self) -> int:
        """Image pixels per latent token, along one side."""
        return self.ae.downsample * self.latent_patch_size

    @property
    def patch_dim(self) -> int:
        """Numbers per latent token."""
        return self.latent_patch_size**2 * self.ae.z_channels

    @property
    def vae_resize(self) -> ResizeRule:
        """The size of an image before the autoencoder's encoder."""
        return ResizeRule(*self.vae_image_size, self.latent_stride)

    @property
    def vit_resize(self) -> ResizeRule:
        """The size of an image before the ViT."""
        return ResizeRule(*self.vit_image_size, self.vit.patch_size)

    def latent_grid(self, image_shape: Sequence[int] | None) -> tuple[int, int]:
        """Return the latent tokens down and across; SchemaError for a size that is not made."""
        stride, side = self.latent_stride, self.max_latent_size
        if image_shape is None:
            raise SchemaError("the contexts have no image_shape")
        height, width = shape_pair(image_shape)
        if any(n <= 0 or n % stride or n > stride * side for n in (height, width)):
            allowed = f"multiples of {stride} up to {stride * side}"
            raise SchemaError(f"image_shape {(height, width)}: sides are {allowed}")
        return height // stride, width // stride

    @classmethod
    def load(cls, directory: str | Path) -> BagelConfig:
        """Read the JSON files of a checkpoint.

        Raises SchemaError if one is not JSON, lacks a field or names an unsupported variant.
        """
        root = Path(directory)
        parts = msgspec.structs.asdict(_read(root / "config.json", _Root))
        ae_file = root / "ae_config.json"
        return cls(
            llm=_read(root / "llm_config.json", LanguageConfig),
            vit=_read(root / "vit_config.json", VisionConfig),
            ae=_read(ae_file, AutoencoderConfig) if ae_file.exists() else AutoencoderConfig(),
            **parts,
        )


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"{path.name}: {error}") from error


def _positive(config: msgspec.Struct, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be positive, not {getattr(config, name)}")


def _require(config: msgspec.Struct, **supported: object) -> None:
    for name, value in supported.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} {getattr(config, name)!r} is not supported, only {value!r}")
