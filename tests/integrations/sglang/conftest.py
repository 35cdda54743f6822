"""SGLang's modules are imported next to a torch without CUDA, too."""

from __future__ import annotations

from support.sglang.cpu import define_torchvision_operators

define_torchvision_operators()
