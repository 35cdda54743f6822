"""Reads an adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.models.bagel.header import join_names

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_WITHOUT_EFFECT = frozenset(
    (
        *("peft_version", "base_model_name_or_path", "revision", "task_type", "auto_mapping"),
        *("inference_mode", "lora_dropout", "eva_config", "megatron_core", "qalora_group_size"),
        # which layers were trained: the file has the matrices of just these
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    )
)
"""Fields of the configuration on which no output of a trained adapter depends."""

_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""


class _Config(msgspec.Struct, frozen=True):
    """The fields that are used here; all others must be off, see `_check_fields`."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = msgspec.field(default_factory=dict)
    alpha_pattern: dict[str, float] = msgspec.field(default_factory=dict)
    init_lora_weights: bool | str | None = True

    def rank(self, layer: str) -> int:
        return int(_by_pattern(self.rank_pattern, layer, self.r))

    def scaling(self, layer: str) -> float:
        rank, alpha = self.rank(layer), _by_pattern(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


@dataclasses.dataclass(frozen=True, eq=False)
class LoRAMatrices:
    """The matrices of the product that an adapter adds to a linear layer, `scaling * b @ a`.

    `a` is [rank, inputs] and `b` is [outputs, rank], float32 as PEFT computes with them.
    """

    a: Tensor
    b: Tensor
    scaling: float


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterFiles:
    """An adapter's matrices by layer, as its file names them, and a SHA-256 of what they do."""

    layers: dict[str, LoRAMatrices]
    digest: str


def read_adapter(path: str, *, max_rank: int) -> AdapterFiles:
    """Read and check an adapter; blocks while both files are read.

    Raises:
        EngineError: a file is missing or cannot be read.
        SchemaError: the files do not make an adapter, or one with something that is not supported.
        UnavailableError: safetensors is not installed.
    """
    directory = Path(path)
    config = _read_config(directory)
    raw = _read(directory, WEIGHTS_FILE)
    file = f"{directory / WEIGHTS_FILE}"
    pairs = _pairs(file, _tensors(file, raw))
    layers = {}
    for layer, (a, b) in pairs.items():
        expected = config.rank(layer)
        if a.shape[0] != expected or b.shape[1] != expected:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise SchemaError(f"{file}: {layer} has {shapes}, and rank {expected} by its config")
        if expected > max_rank:
            raise SchemaError(
                f"{file}: {layer} has rank {expected}, max_lora_rank is {max_rank}: raise it"
            )
        layers[layer] = LoRAMatrices(a.float(), b.float(), config.scaling(layer))
    scalings = sorted((layer, matrices.scaling) for layer, matrices in layers.items())
    digest = hashlib.sha256(raw)
    digest.update(msgspec.json.encode(scalings))
    return AdapterFiles(layers, digest.hexdigest())


def _read(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except OSError as error:
        raise EngineError(
            f"{directory}: {name} cannot be read ({error.strerror}); an adapter is a directory "
            "that PEFT's save_pretrained made, on the machine of every worker"
        ) from None


def _read_config(directory: Path) -> _Config:
    raw, file = _read(directory, CONFIG_FILE), f"{directory / CONFIG_FILE}"
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
        _check_fields(file, fields)
        config = msgspec.convert(fields, _Config)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"{file}: {error}") from None
    except UnicodeDecodeError as error:
        raise SchemaError(f"{file}: {error}") from None
    if config.peft_type != "LORA":
        raise SchemaError(f"{file}: peft_type {config.peft_type!r}, only LORA is supported")
    if config.init_lora_weights not in _INITIAL:
        raise SchemaError(
            f"{file}: init_lora_weights {config.init_lora_weights!r}: the base model has other "
            "weights then; convert it by PEFT's path_initial_model_for_weight_conversion"
        )
    if min([config.r, *config.rank_pattern.values()]) < 1:
        raise SchemaError(f"{file}: r {config.r}, rank_pattern {config.rank_pattern}: 1 or more")
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        try:
            re.compile(pattern)
        except re.error as error:  # noqa: PERF203 - it names its pattern
            raise SchemaError(f"{file}: pattern {pattern!r}: {error}") from None
    return config


def _check_fields(file: str, fields: Mapping[str, Any]) -> None:
    """Raises SchemaError if a field is on that is neither used nor without effect."""
    used = {*_Config.__struct_fields__, *_WITHOUT_EFFECT}
    for name in sorted(fields.keys() - used):
        value = fields[name]
        if value not in (None, False, "none") and value != {} and value != []:
            raise SchemaError(
                f"{file}: {name} {value!r:.60} is not supported; save the adapter without it, or "
                "merged into the model"
            )


def _tensors(file: str, raw: bytes) -> dict[str, Tensor]:
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError as error:
        text = f"adapters are safetensors: pip install 'omni-kvlink[bagel]' ({error})"
        raise UnavailableError(text) from error
    try:
        tensors: dict[str, Tensor] = safetensors.load(raw)
    except Exception as error:  # its own class of errors, and those of torch
        raise SchemaError(f"{file} is damaged, or no safetensors file: {error}") from error
    return tensors


def _pairs(file: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Both matrices of each layer, checked."""
    pairs: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in sorted(tensors.items()):
        if match := _NAME.fullmatch(name):
            pairs.setdefault(match["layer"], {})[match["matrix"]] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise SchemaError(
            f"{file}: {join_names(unknown)}: only lora_A.weight and lora_B.weight of linear "
            "layers are supported, no embeddings, biases, magnitudes or whole modules "
            "(save_pretrained has save_embedding_layers=False)"
        )
    if not pairs:
        raise SchemaError(f"{file} has no matrices")
    for layer, pair in pairs.items():
        if len(pair) < 2:
            raise SchemaError(f"{file}: {layer} has lora_{next(iter(pair))} alone")
        for matrix, tensor in pair.items():
            name = f"{layer}.lora_{matrix}.weight"
            if tensor.ndim != 2:
                shape = tuple(tensor.shape)
                raise SchemaError(f"{file}: {name} has shape {shape}, that of no linear layer")
            if tensor.dtype not in _DTYPES:
                raise SchemaError(f"{file}: {name} is {tensor.dtype}: float32, float16, bfloat16")
            if not tensor.isfinite().all():
                raise SchemaError(f"{file}: {name} has NaN or infinity")
    return {layer: (pair["A"], pair["B"]) for layer, pair in pairs.items()}


def _by_pattern(patterns: Mapping[str, float], layer: str, default: float) -> float:
    """The value for a layer: of the first pattern that its name ends with, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default
