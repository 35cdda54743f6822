"""What vLLM-Omni hands to a connector, as payloads of a link, and back; nothing is pickled.

Three kinds: a KV cache packed by the manager travels as the bytes it is and arrives as a `Buffer`;
a dict with K and V travels as the tensors they are; anything else as vLLM-Omni's own msgpack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.integrations.vllm_omni.packed import check_complete, check_packed, header_of
from omni_kvlink.link import Payload, Received
from omni_kvlink.link.received import Verify
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.dtypes import byte_tensor
from omni_kvlink.payload.metadata import KVMetadata
from omni_kvlink.payload.schema import KVCacheTransferData

Pack: TypeAlias = Callable[[Any], bytes]
Unpack: TypeAlias = Callable[[memoryview], Any]

KIND = "vllm_omni"
"""The key in `extra` that says how the bytes are to be read: "packed" or "object"."""
CACHE, REST = "cache", "rest"
"""The branches of a dict: its K and V, and what else it had."""


class Buffer:
    """A packed cache as it lies in the link's memory: the manager reads it there, and releases it.

    Attributes:
        tensor: uint8 `[nbytes]`; readonly memory, valid until `release`.
    """

    def __init__(self, received: Received, tensor: torch.Tensor):
        self.tensor = tensor
        self._received = received

    def release(self) -> None:
        """Let go of it; memory that tensors still use stays until they are gone."""
        self._received.release()
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.tensor.numel()


def payload_of(key: str, data: Any, pack: Pack) -> tuple[Payload, int]:
    """What is to be sent, borrowed where it lies, and how many bytes it has.

    Args:
        pack: vLLM-Omni's serializer, for what is no KV cache.

    Raises:
        SchemaError: a KV cache that is not complete, or what the serializer does not take.
    """
    if isinstance(data, Mapping) and isinstance(data.get("layer_blocks"), Mapping):
        return _from_dict(key, data, pack)
    flat = _flat(data)
    header = None if flat is None else header_of(flat)
    if flat is not None and header is not None:
        check_packed(flat, *header)
        return _opaque(key, flat, "packed"), flat.numel()
    flat = _bytes(_packed(data, pack))
    return _opaque(key, flat, "object"), flat.numel()


def object_of(received: Received, unpack: Unpack, verify: Verify) -> tuple[Any, int]:
    """What was sent, and how many bytes it had; all that is not a `Buffer` is a copy.

    Raises:
        WireError: no connector of this kind sent it.
        IntegrityError: not the bytes that were sent.
    """
    data = received.data
    if isinstance(data, KVCacheBundle):
        return _to_dict(received, data, unpack)
    kind = data.metadata.extra.get(KIND)
    if kind not in ("packed", "object"):
        raise WireError(f"payload {data.request_id!r} was not sent by a vLLM-Omni connector")
    if verify == "full":
        received.verify()
    latent = data.layer_blocks["latent_cache"][0]
    assert isinstance(latent, torch.Tensor)
    flat = latent.view(-1)
    if kind == "packed":
        return Buffer(received, flat), flat.numel()
    try:
        return unpack(_view(flat)), flat.numel()
    finally:
        received.release()


def _from_dict(key: str, data: Mapping[str, Any], pack: Pack) -> tuple[Payload, int]:
    """K and V by reference; the other fields beside them, as they were."""
    blocks = data["layer_blocks"]
    keys, values = (list(blocks.get(name) or ()) for name in ("key_cache", "value_cache"))
    if set(blocks) != {"key_cache", "value_cache"} or len(keys) != len(values):
        raise SchemaError(
            f"layer_blocks has {sorted(map(str, blocks))}, {len(keys)} and {len(values)} layers; "
            "wanted as many in key_cache as in value_cache, and nothing else"
        )
    shapes = [tuple(map(_shape, pair)) for pair in zip(keys, values, strict=True)]
    check_complete(shapes, data.get("block_ids") or (), data.get("metadata") or {})
    tokens = int(keys[0].shape[0])
    # Positions are in the rest, if the manager knew any; of these nobody reads them.
    about = KVMetadata(kv_lens=(tokens,), ropes=(0,), num_layers=len(keys))
    cache = KVCacheTransferData(key, {"key_cache": keys, "value_cache": values}, (), about)
    other = {name: value for name, value in data.items() if name != "layer_blocks"}
    rest = _opaque(key, _bytes(_packed(other, pack)), "object")
    nbytes = sum(place.nbytes for payload in (cache, rest) for place in payload.tensors())
    return KVCacheBundle(key, {CACHE: cache, REST: rest}), nbytes


def _to_dict(received: Received, bundle: KVCacheBundle, unpack: Unpack) -> tuple[Any, int]:
    """The dict with tensors of its own, each byte checked while it is copied."""
    if list(bundle) != [CACHE, REST]:
        raise WireError(f"payload {bundle.request_id!r} was not sent by a vLLM-Omni connector")
    places = [torch.empty_like(place) for place in bundle.tensors()]  # type: ignore[arg-type]
    received.scatter(places)
    received.release()
    *cache, rest = places
    result = unpack(_view(rest.view(-1)))
    layers = {"key_cache": cache[::2], "value_cache": cache[1::2]}
    return {**result, "layer_blocks": layers}, sum(place.nbytes for place in places)


def _opaque(key: str, flat: torch.Tensor, kind: str) -> KVCacheTransferData:
    """Bytes as one latent: what they mean, `kind` says."""
    about = KVMetadata(kv_lens=(1,), ropes=(0,), num_layers=1, layout="ND", extra={KIND: kind})
    return KVCacheTransferData(key, {"latent_cache": [flat.view(1, -1)]}, (), about)


def _flat(data: Any) -> torch.Tensor | None:
    """Bytes, or a uint8 tensor of one dimension, as a tensor; None for anything else."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return _bytes(data) if len(data) else None
    if isinstance(data, torch.Tensor) and data.dtype == torch.uint8 and data.dim() == 1:
        return data.detach().contiguous()
    return None


def _bytes(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """The same memory, to be read only."""
    array = np.frombuffer(data, dtype=np.uint8)
    return byte_tensor(Region(array.ctypes.data, array.nbytes, array, readonly=True))


def _view(flat: torch.Tensor) -> memoryview:
    array: Any = flat.numpy()
    return memoryview(array)


def _packed(data: Any, pack: Pack) -> bytes:
    try:
        return pack(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SchemaError(f"{type(data).__name__} cannot be sent: {error}") from error


def _shape(tensor: Any) -> torch.Size | None:
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise SchemaError(f"layer_blocks holds a {type(tensor).__name__}, wanted tensors")
    return None if tensor is None else tensor.shape
