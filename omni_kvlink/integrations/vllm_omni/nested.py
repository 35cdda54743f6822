"""Takes the large tensors out of nested data: they travel as tensors, the rest as bytes.

vLLM-Omni's serializer walks the data. In the place of the bytes of a large tensor, array or image
it writes a placeholder: a MessagePack extension with a token and a number. Its deserializer
restores all else itself, so that the result is what it would make of the data without this module.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from msgspec.msgpack import Ext

from omni_kvlink import TensorTransferData
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.lowlevel import Region, byte_tensor

MIN_NBYTES = 128 << 10
"""Smaller tensors stay in the serializer's bytes: their copies cost less than a payload's entry."""
MAX_TAKEN = 1024
"""Further tensors stay there, too: a payload's header is bounded."""
TOKEN = "a3c7e91b5d2f8064"
"""The token of all placeholders, unless the data hold these characters, too: then a random one.

A token is 16 hexadecimal digits. In a placeholder no byte beside it is one: the bytes of the data
and of a placeholder cannot make a token together."""
AS_TENSOR, AS_BYTES = 1, 2
"""The extension codes of a placeholder: for a whole tensor, and for the bytes of something."""

ExtHook: TypeAlias = Callable[[int, memoryview], Any]


class Serializer(Protocol):
    """vLLM-Omni's serializer, which can leave bytes out."""

    def encode(self, data: Any, taken: TakenTensors | None = None) -> bytes:
        """Encode data; offer each tensor to `taken.take`, other bytes to `taken.take_bytes`."""

    def decode(self, data: memoryview, restore: ExtHook | None = None) -> Any:
        """Decode data, with what `restore` returns for each extension."""


class TakenTensors:
    """The tensors that were taken out of one payload, in the order of their placeholders."""

    def __init__(self, token: str):
        self.tensors: list[torch.Tensor] = []
        self._token = token.encode()

    def take(self, tensor: torch.Tensor) -> Ext | None:
        """A placeholder; or None: the tensor is small, or is left to the serializer."""
        if tensor.numel() * tensor.itemsize < MIN_NBYTES or len(self.tensors) >= MAX_TAKEN:
            return None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None  # a subclass may keep its elements elsewhere
        if tensor.device.type not in ("cpu", "cuda"):
            return None  # the serializer copies it to the CPU
        if not _can_send(tensor.dtype) or tensor.layout is not torch.strided or tensor.dim() > 8:
            return None
        return self._add(tensor.detach(), AS_TENSOR)

    def take_bytes(self, data: bytes) -> Ext | bytes:
        """A placeholder; or the bytes themselves, if they are few."""
        if len(data) < MIN_NBYTES or len(self.tensors) >= MAX_TAKEN:
            return data
        return self._add(bytes_tensor(data), AS_BYTES)

    def _add(self, tensor: torch.Tensor, code: int) -> Ext:
        self.tensors.append(tensor)
        return Ext(code, _name(self._token, len(self.tensors) - 1))


def take_out(data: Any, serializer: Serializer) -> tuple[bytes, list[torch.Tensor], str]:
    """Encode data; return the bytes with placeholders, the tensors, not copied, and the token.

    Data that look like a placeholder are not mistaken for one: the token is only in placeholders.
    """
    token = TOKEN
    while True:
        taken = TakenTensors(token)
        packed = serializer.encode(data, taken)
        if not taken.tensors or packed.count(token.encode()) == len(taken.tensors):
            return packed, taken.tensors, token
        token = secrets.token_hex(8)


def put_back(
    packed: memoryview, tensors: list[torch.Tensor], token: str, serializer: Serializer
) -> Any:
    """Decode what `take_out` encoded, with these tensors in the places of their placeholders.

    Raises:
        WireError: a tensor has no placeholder.
    """
    tensors_by_name = {
        _name(token.encode(), number): tensor for number, tensor in enumerate(tensors)
    }

    def restore(code: int, data: memoryview) -> Any:
        tensor = tensors_by_name.pop(bytes(data), None)
        if tensor is None:
            return Ext(code, bytes(data))  # the data's own
        return tensor if code == AS_TENSOR else tensor.numpy().data.toreadonly()

    result = serializer.decode(packed, restore)
    if tensors_by_name:
        raise WireError(
            f"{len(tensors_by_name)} of {len(tensors)} tensors have no place in the payload"
        )
    return result


def bytes_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """A tensor of the same memory, for reading only."""
    array = np.frombuffer(data, dtype=np.uint8)
    return byte_tensor(Region(array.ctypes.data, array.nbytes, array, readonly=True))


@functools.cache
def _can_send(dtype: torch.dtype) -> bool:
    try:
        TensorTransferData("empty", {"empty": torch.empty(0, dtype=dtype)})
    except SchemaError:
        return False
    return True


def _name(token: bytes, number: int) -> bytes:
    """The bytes that a placeholder holds."""
    return token + number.to_bytes(4, "big")
