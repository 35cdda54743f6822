"""Converts what vLLM-Omni hands to a connector into payloads and back; nothing is pickled.

There are four kinds. A KV cache that the manager has packed travels as its bytes and arrives as a
`Buffer`. A dict with K and V travels as its tensors. Anything else travels as the bytes of
vLLM-Omni's own serializer; large tensors in it travel as tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from omni_kvlink import Payload, Received, TensorTransferData, Verify
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.integrations.vllm_omni.nested import (
    Serializer,
    bytes_tensor,
    put_back,
    take_out,
)
from omni_kvlink.integrations.vllm_omni.packed import check_complete, check_packed, header_of

KIND = "vllm_omni"
"""The metadata key that says how a payload is read: one of `KINDS`."""
KINDS = ("packed", "object", "cache", "nested")
TOKEN_KEY = "token"
"""The metadata key of the token in the placeholders of a "nested" payload."""
SERIALIZER_ERRORS = (TypeError, ValueError, OverflowError, RuntimeError)
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


def payload_of(key: str, data: Any, serializer: Serializer) -> tuple[Payload, int]:
    """Describe data as a payload; return it with the bytes of its tensors, which are not copied.

    `serializer` is vLLM-Omni's, for what is not a KV cache.

    Raises:
        SchemaError: a KV cache is incomplete, or the serializer refuses the data.
    """
    if isinstance(data, Mapping) and isinstance(data.get("layer_blocks"), Mapping):
        payload = _from_dict(key, data, serializer)
    else:
        flat = _flat(data)
        header = None if flat is None else header_of(flat)
        if flat is not None and header is not None:
            check_packed(flat, *header)
            payload = TensorTransferData(key, {"bytes": flat}, {KIND: "packed"})
        else:
            payload = _from_object(key, data, serializer)
    return payload, sum(tensor.nbytes for tensor in payload.tensors())


def object_of(received: Received, serializer: Serializer, verify: Verify) -> tuple[Any, int]:
    """Restore what was sent; return it with the bytes of its tensors.

    Everything but a `Buffer` is a copy; the payload is released here, or with the `Buffer`, and
    after an error unread. With `verify="full"` every byte of a `Buffer` is checked first.
    `serializer` is vLLM-Omni's.

    Raises:
        WireError: the payload was not sent by this connector, or by a newer version of it.
        IntegrityError: the bytes differ from the committed ones.
    """
    try:
        result = _object_of(received, serializer, verify)
    except BaseException:
        received.release_unread()
        raise
    if not isinstance(result[0], Buffer):
        received.release()
    return result


def _object_of(received: Received, serializer: Serializer, verify: Verify) -> tuple[Any, int]:
    data = received.data
    kind = data.metadata.get(KIND) if isinstance(data, TensorTransferData) else None
    if not isinstance(data, TensorTransferData) or kind is None:
        raise WireError(f"payload {data.request_id!r} was not sent by a vLLM-Omni connector")
    if kind not in KINDS:
        raise WireError(
            f"payload {data.request_id!r} is of kind {kind!r}; this version reads "
            f"{', '.join(KINDS)}: use the same version of omni-kvlink on both sides"
        )
    if kind in ("cache", "nested"):
        return _restored(received, data, serializer)
    if verify == "full":
        received.verify()
    flat = data["bytes"]
    if kind == "packed":
        return Buffer(received, flat), flat.numel()
    return serializer.decode(flat.numpy().data), flat.numel()


def _from_dict(key: str, data: Mapping[str, Any], serializer: Serializer) -> TensorTransferData:
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
    try:
        packed = bytes_tensor(serializer.encode(other))
    except SERIALIZER_ERRORS as error:
        raise _refusal(data, error) from error
    tensors = {"key_cache": keys, "value_cache": values, "rest": packed}
    return TensorTransferData(key, tensors, {KIND: "cache"})


def _from_object(key: str, data: Any, serializer: Serializer) -> TensorTransferData:
    """Packed bytes; large tensors by reference, if there are any."""
    try:
        packed, tensors, token = take_out(data, serializer)
    except SERIALIZER_ERRORS as error:
        raise _refusal(data, error) from error
    packed_tensor = bytes_tensor(packed)
    if not tensors:
        return TensorTransferData(key, {"bytes": packed_tensor}, {KIND: "object"})
    metadata = {KIND: "nested", TOKEN_KEY: token}
    return TensorTransferData(key, {"tensors": tensors, "rest": packed_tensor}, metadata)


def _restored(
    received: Received, data: TensorTransferData, serializer: Serializer
) -> tuple[Any, int]:
    """Copy a "cache" or "nested" payload into tensors of its own, each byte checked.

    vLLM-Omni keeps what it gets while a request runs, and code that gets a tensor may write to it:
    views would be readonly, and would hold the link's memory for as long.
    """
    metadata, names = data.metadata, [name for name in data if name != "rest"]
    counts = [len(data[name]) for name in names]
    *tensors, packed_tensor = copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in data.tensors()
    ]
    received.scatter(copies)
    packed, nbytes = packed_tensor.numpy().data, sum(tensor.nbytes for tensor in copies)
    if metadata[KIND] == "nested":
        return put_back(packed, tensors, str(metadata.get(TOKEN_KEY)), serializer), nbytes
    tensor_iterator = iter(tensors)
    layers = {
        name: [*itertools.islice(tensor_iterator, n)] for name, n in zip(names, counts, strict=True)
    }
    return {**serializer.decode(packed), "layer_blocks": layers}, nbytes


def _flat(data: Any) -> torch.Tensor | None:
    """Bytes or a one-dimensional uint8 tensor as a tensor; None for anything else."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes_tensor(data) if len(data) else None
    if isinstance(data, torch.Tensor) and data.dtype == torch.uint8 and data.dim() == 1:
        return data.detach().contiguous()
    return None


def _shape(tensor: Any) -> torch.Size | None:
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise SchemaError(f"layer_blocks holds a {type(tensor).__name__}, expected tensors")
    return None if tensor is None else tensor.shape


def _refusal(data: Any, error: Exception) -> SchemaError:
    return SchemaError(f"{type(data).__name__} cannot be serialized: {error}")
