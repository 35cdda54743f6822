"""Caches of random bytes, and payloads as they are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import KVCacheTransferData
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.views import TensorView, dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.manifest import Manifest

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")


def noise(seed: int, shape: Sequence[int], dtype: str = "float32") -> torch.Tensor:
    """Uniformly random bytes: NaNs with payloads, infinities and signed zeros included."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * kind.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    raw[::7] = 0xFF
    return raw.view(kind).view(tuple(shape))


def cache(
    request_id: str = "r",
    *,
    layers: int = 2,
    shape: Sequence[int] = (3, 2, 4),
    dtype: str = "float32",
    seed: int = 0,
    block_ids: Sequence[int] = (),
    **metadata: Any,
) -> KVCacheTransferData:
    """K and V of `shape`, or one latent a layer where the shape has two dimensions."""
    parts = ("key_cache", "value_cache") if len(shape) == 3 else ("latent_cache",)
    blocks = {
        part: [noise(seed + 10 * layer + number, shape, dtype) for layer in range(layers)]
        for number, part in enumerate(parts)
    }
    about = {
        "kv_lens": [shape[0]],
        "ropes": [shape[0]],
        "num_layers": layers,
        "layout": "NHD" if len(shape) == 3 else "ND",
        **metadata,
    }
    return KVCacheTransferData(request_id, blocks, block_ids, about)


def empty(request_id: str = "r", *, layers: int = 2, **metadata: Any) -> KVCacheTransferData:
    about = {"kv_lens": [0], "ropes": [0], "num_layers": layers, **metadata}
    blocks = {"key_cache": [None] * layers, "value_cache": [None] * layers}
    return KVCacheTransferData(request_id, blocks, (), about)


def written(data: Payload, *, digests: bool = True) -> tuple[Manifest, Mapping]:
    """The payload in memory: what a connector would publish."""
    plan = data.plan(digests=digests)
    mapping = Mapping.anonymous(plan.nbytes)
    manifest = plan.with_digests(TorchCopier().gather(data.tensors(), plan, mapping.region))
    mapping.region.view()[: plan.header_nbytes] = manifest.encode()
    return manifest, mapping


def bits(tensor: TensorView) -> bytes:
    """The tensor's bytes in row-major order."""
    plain = dense(tensor).detach().resolve_neg().reshape(-1)
    return plain.new_empty(plain.shape).copy_(plain).view(torch.uint8).numpy().tobytes()
