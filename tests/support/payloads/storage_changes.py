"""Changes of a tensor's storage, after which its address is no longer that of its bytes."""

from __future__ import annotations

import torch


def cut(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() // 2)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def replace_by_a_short_one(tensor: torch.Tensor) -> None:
    """Shape and strides stay, the storage is another one, which is then cut."""
    other = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    tensor.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())
    cut(tensor)
