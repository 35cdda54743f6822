"""Checks and comparisons of sampling params that are tensors or maps."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from omni_kvlink.errors import SchemaError


def check_values(latents: object, extra_args: object, count: int) -> None:
    """Raise SchemaError unless latents are noise of `count` outputs, and extra_args JSON values."""
    try:
        json.dumps(extra_args, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"extra_args {extra_args!r:.60}: JSON values ({error})") from None
    if extra_args is not None and not isinstance(extra_args, Mapping):
        raise SchemaError(f"extra_args {extra_args!r:.60}: a map of arguments")
    if latents is None:
        return
    if not isinstance(latents, torch.Tensor) or not latents.is_floating_point():
        kind = latents.dtype if isinstance(latents, torch.Tensor) else type(latents).__name__
        raise SchemaError(f"latents: a tensor of floating-point numbers, not {kind}")
    if latents.ndim < 2 or latents.shape[0] != count:
        raise SchemaError(
            f"latents of shape {[*latents.shape]} for num_outputs_per_prompt {count}: "
            "the first dimension is that number"
        )


def comparable(value: object) -> object:
    """The value itself; of a tensor its shape and dtype, of a map its JSON."""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
