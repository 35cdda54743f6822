"""LoRA adapters in PEFT's format, of random weights, and what they are compared with."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from omni_kvlink.engine import LoRARequest
from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
from omni_kvlink.models.bagel.lora import lora_layers
from support.engine.fixtures import checkpoint, pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "task_type": None,
    "revision": None,
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "bias": "none",
    "fan_in_fan_out": False,
    "target_modules": ["q_proj"],
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "loftq_config": {},
    "init_lora_weights": True,
    "lora_bias": False,
    "inference_mode": True,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "layer_replication": None,
}
"""What PEFT 0.21.2 writes, in part."""
Shapes = dict[str, tuple[int, int]]


def bagel_shapes() -> Shapes:
    """Outputs and inputs of each linear layer of the tests' language model."""
    layers = lora_layers(pipeline().model).items()
    sizes = {
        name: part.cut.full_shape for name, part in layers if name.startswith("language_model.")
    }
    return {name: (size[0], size[1]) for name, size in sizes.items()}


def make_matrices(
    shapes: Mapping[str, tuple[int, int]], seed: int = 1, ranks: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Matrices of some layers, as PEFT names them; both change the outputs visibly."""
    made = {}
    for name, (outputs, inputs) in shapes.items():
        rank = (ranks or {}).get(name, CONFIG["r"])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        root = f"base_model.model.{name}"
        made[f"{root}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.1
        made[f"{root}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1
    return made


def write_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], **config: Any
) -> LoRARequest:
    """Write an adapter's two files; its number is the one that its directory's name ends with."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return request_of(directory)


def request_of(directory: Path) -> LoRARequest:
    return LoRARequest(directory.name, int(directory.name.rpartition("-")[2]), str(directory))


def bagel_adapter(directory: Path, number: int = 1, **config: Any) -> LoRARequest:
    """An adapter of all linear layers of the tests' language model; each number has its own."""
    tensors = make_matrices(bagel_shapes(), seed=number)
    return write_adapter(directory / f"style-{number}", tensors, **config)


def merged(tmp: Path, lora: LoRARequest, scale: float = 1.0) -> OmniBagelPipeline:
    """The whole model with an adapter merged into its weights, in float32."""
    target = tmp / f"merged-{lora.lora_int_id}-{scale}"
    shutil.copytree(checkpoint(), target)
    file = target / "ema.safetensors"
    weights = {name: tensor.float() for name, tensor in load_file(file).items()}
    tensors = load_file(Path(lora.lora_path) / "adapter_model.safetensors")
    factor = scale * CONFIG["lora_alpha"] / CONFIG["r"]
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"] += factor * b @ a
    save_file(weights, file)
    return OmniBagelPipeline.from_pretrained(target, dtype=torch.float32)
