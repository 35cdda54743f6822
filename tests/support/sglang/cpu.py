"""What SGLang's modules need so that they can be imported next to a torch without CUDA."""

from __future__ import annotations

import contextlib

from torch import library

_operators = library.Library("torchvision", "FRAGMENT")
"""Kept: what it has defined ends with it."""


def define_torchvision_operators() -> None:
    """Define two operators that a build of torchvision for CUDA lacks next to such a torch.

    Without them it cannot be imported; SGLang's configurations import it, and host pools those.
    """
    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # it is defined
            _operators.define(f"{name}{signature}")
