"""Weight-only quantization of a model's layers, by torchao (https://github.com/pytorch/ao)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from omni_kvlink.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def quantize_layers(layers: Iterable[nn.Module]) -> None:
    """Replace the weight of each Linear by int8 values and one float32 scale for each row.

    The output of a Linear keeps its dtype; biases, and all that is no Linear, stay as they are.

    Raises:
        UnavailableError: torchao is missing.
    """
    try:
        ao = importlib.import_module("torchao.quantization")
    except ImportError as error:
        text = "quantization needs torchao: pip install 'omni-kvlink[quantization]'"
        raise UnavailableError(text) from error
    for layer in layers:
        ao.quantize_(layer, ao.Int8WeightOnlyConfig())


def clear_quantized(layers: Iterable[nn.Module]) -> None:
    """Give each quantized Linear a weight of its former dtype and no bytes, to be loaded again."""
    for module in (module for layer in layers for module in layer.modules()):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and is_traceable_wrapper_subclass(weight):
            empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
            module.weight = nn.Parameter(empty, requires_grad=False)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or the tensors that a quantized one consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))
