"""Converts what vLLM-Omni hands to a connector into payloads and back; nothing is pickled.

There are three kinds. A KV cache that the manager has packed travels as its bytes and arrives as a
`Buffer`. A dict with K and V travels as its tensors. Anything else travels as the bytes of
vLLM-Omni's own serializer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from omni_kvlink import Payload, Received, TensorTransferData, Verify
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.integrations.vllm_omni.packed import check_complete, check_packed, header_of
from omni_kvlink.lowlevel import Region, byte_tensor

Pack: TypeAlias = Callable[[Any], bytes]
Unpack: TypeAlias = Callable[[memoryview], Any]

KIND = "vllm_omni"
"""The metadata key that says how a payload is read: "packed", "object" or "cache"."""
PARTS = ("key_cache", "value_cache")


class Buffer:
    """A packed cache in the link's memory; the manager reads it there and releases it.

    `tensor` is uint8 `[nbytes]` of readonly memory, valid until `release`.
    """

    def __init__(self, received: Received, tensor: torch.Tensor):
        self.tensor, self._received = tensor, received

    def release(self) -> None:
        """Release the payload; its memory lives until the last tensor on it is gone."""
        self._received.release()
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.tensor.numel()


def payload_of(key: str, data: Any, pack: Pack) -> tuple[Payload, int]:
    """Describe data as a payload; return it with the bytes of its tensors, which are not copied.

    `pack` is vLLM-Omni's serializer, for what is not a KV cache.

    Raises:
        SchemaError: a KV cache is incomplete, or the serializer refuses the data.
    """
    if isinstance(data, Mapping) and isinstance(data.get("layer_blocks"), Mapping):
        payload = _from_dict(key, data, pack)
    else:
        flat = _flat(data)
        header = None if flat is None else header_of(flat)
        if flat is not None and header is not None:
            check_packed(flat, *header)
            payload = TensorTransferData(key, {"bytes": flat}, {KIND: "packed"})
        else:
            flat = _bytes(_packed(data, pack))
            payload = TensorTransferData(key, {"bytes": flat}, {KIND: "object"})
    return payload, sum(tensor.nbytes for tensor in payload.tensors())


def object_of(received: Received, unpack: Unpack, verify: Verify) -> tuple[Any, int]:
    """Restore what was sent; return it with the bytes of its tensors.

    Everything but a `Buffer` is a copy; the payload is released here, or with the `Buffer`. With
    `verify="full"` every byte of a `Buffer` is checked first. `unpack` is vLLM-Omni's
    deserializer.

    Raises:
        WireError: the payload was not sent by this connector.
        IntegrityError: the bytes differ from the committed ones.
    """
    data = received.data
    kind = data.metadata.get(KIND) if isinstance(data, TensorTransferData) else None
    if not isinstance(data, TensorTransferData) or kind not in ("packed", "object", "cache"):
        raise WireError(f"payload {data.request_id!r} was not sent by a vLLM-Omni connector")
    if kind == "cache":
        return _to_dict(received, data, unpack)
    if verify == "full":
        received.verify()
    flat = data["bytes"]
    if kind == "packed":
        return Buffer(received, flat), flat.numel()
    try:
        return unpack(flat.numpy().data), flat.numel()
    finally:
        received.release()


def _from_dict(key: str, data: Mapping[str, Any], pack: Pack) -> TensorTransferData:
    """K and V by reference, and the other fields as packed bytes."""
    blocks = data["layer_blocks"]
    keys, values = (list(blocks.get(name) or ()) for name in PARTS)
    if set(blocks) != set(PARTS) or len(keys) != len(values):
        raise SchemaError(
            f"layer_blocks has {sorted(map(str, blocks))}, {len(keys)} and {len(values)} layers; "
            "expected key_cache and value_cache with the same number of layers"
        )
    shapes = [tuple(map(_shape, pair)) for pair in zip(keys, values, strict=True)]
    check_complete(shapes, data.get("block_ids") or (), data.get("metadata") or {})
    other = {name: value for name, value in data.items() if name != "layer_blocks"}
    rest = _bytes(_packed(other, pack))
    tensors = {"key_cache": keys, "value_cache": values, "rest": rest}
    return TensorTransferData(key, tensors, {KIND: "cache"})


def _to_dict(received: Received, data: TensorTransferData, unpack: Unpack) -> tuple[Any, int]:
    """The dict with tensors of its own; each byte is checked while it is copied."""
    layers = {name: [torch.empty_like(tensor) for tensor in data[name]] for name in PARTS}
    rest = torch.empty_like(data["rest"])
    copy = TensorTransferData(data.request_id, {**layers, "rest": rest}, data.metadata)
    received.scatter(copy)
    received.release()
    nbytes = sum(tensor.nbytes for tensor in copy.tensors())
    return {**unpack(rest.numpy().data), "layer_blocks": layers}, nbytes


def _flat(data: Any) -> torch.Tensor | None:
    """Bytes or a one-dimensional uint8 tensor as a tensor; None for anything else."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return _bytes(data) if len(data) else None
    if isinstance(data, torch.Tensor) and data.dtype == torch.uint8 and data.dim() == 1:
        return data.detach().contiguous()
    return None


def _bytes(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """A tensor of the same memory, for reading only."""
    array = np.frombuffer(data, dtype=np.uint8)
    return byte_tensor(Region(array.ctypes.data, array.nbytes, array, readonly=True))


def _packed(data: Any, pack: Pack) -> bytes:
    try:
        return pack(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SchemaError(f"{type(data).__name__} cannot be serialized: {error}") from error


def _shape(tensor: Any) -> torch.Size | None:
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise SchemaError(f"layer_blocks holds a {type(tensor).__name__}, expected tensors")
    return None if tensor is None else tensor.shape
