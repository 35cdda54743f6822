"""Tensors of several kinds, and what tells whether they arrived."""

from __future__ import annotations

import hashlib

import torch


def digest(tensors: list[torch.Tensor]) -> str:
    """A digest of dtypes, shapes and bytes."""
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return found.hexdigest()


def many_kinds() -> list[torch.Tensor]:
    """Tensors of several dtypes, shapes and strides."""
    torch.manual_seed(3)
    rows = torch.randn(64, 48)
    return [
        rows,
        rows.t(),
        rows[::3, 5:],
        rows.to(torch.bfloat16),
        torch.arange(12).reshape(3, 4).flip(0),
        torch.zeros(0, 7, dtype=torch.float16),
        torch.tensor(True),
        torch.nn.Parameter(rows[0]),
        rows[0].expand(4, 48),
    ]
