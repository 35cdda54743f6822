"""What SGLang's modules need so that they can be imported next to a torch without CUDA."""

from __future__ import annotations

import contextlib

import torch


def define_torchvision_operators() -> None:
    """Define two operators of torchvision, which its wheel for CUDA cannot load here.

    It refuses to be imported without them; SGLang's configurations import it, and host pools those.
    """
    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # it is defined
            torch.library.define(f"torchvision::{name}", signature)
