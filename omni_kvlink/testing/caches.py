"""Random caches and bundles of every dtype and shape, made of random bytes: all NaNs too."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from omni_kvlink.link import Payload
from omni_kvlink.payload.branch import KV_DTYPES
from omni_kvlink.payload.bundle import KVCacheBundle, PrefixOf, SameAs
from omni_kvlink.payload.metadata import KVMetadata
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import TensorView, dense

Layers: TypeAlias = dict[tuple[str, int], list[TensorView]]
"""K and V, or one latent, by branch and layer."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What two processes need to make the same payload: JSON values only.

    Args:
        key: the request id.
        seed: of the bytes.
        bundle: three branches and an empty one, instead of one cache.
        tokens: of the cache, or of the bundle's longest branch; 0 for an empty one.
        latent: one tensor a layer instead of K and V; `heads` is not used then.
    """

    key: str
    seed: int = 0
    bundle: bool = False
    layers: int = 2
    tokens: int = 5
    heads: int = 2
    dim: int = 8
    dtype: str = "bfloat16"
    latent: bool = False

    def make(self) -> Payload:
        return make_bundle(self) if self.bundle else make_cache(self)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A tensor of random bytes; its floats include NaNs with payloads, infinities and zeros."""
    nbytes = torch.empty((), dtype=dtype).element_size()
    for size in shape:
        nbytes *= size
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def make_cache(recipe: Recipe, *, salt: int = 0, tokens: int | None = None) -> KVCacheTransferData:
    """One cache; `salt` makes another one of the same recipe."""
    tokens = recipe.tokens if tokens is None else tokens
    generator = torch.Generator().manual_seed(recipe.seed * 1009 + salt)
    shape = (tokens, recipe.dim) if recipe.latent else (tokens, recipe.heads, recipe.dim)
    dtype = getattr(torch, recipe.dtype)
    names = ("latent_cache",) if recipe.latent else ("key_cache", "value_cache")
    blocks: dict[str, list[torch.Tensor | None]] = {
        name: [
            random_tensor(shape, dtype, generator) if tokens else None for _ in range(recipe.layers)
        ]
        for name in names
    }
    metadata = KVMetadata(
        kv_lens=(tokens,),
        ropes=(tokens // 2 + 1,),
        num_layers=recipe.layers,
        dtype=recipe.dtype,
        layout="ND" if recipe.latent else "NHD",
        block_size=16,
        image_shape=(64, 48),
        extra={"seed": recipe.seed, "nested": {"list": [1, 2.5, None, "é"]}},
    )
    return KVCacheTransferData(recipe.key, blocks, range(recipe.seed % 5), metadata)


def make_bundle(recipe: Recipe) -> KVCacheBundle:
    """A cache, a prefix of it, the same again, another one, and an empty one."""
    whole = make_cache(recipe)
    prefix = max(1, recipe.tokens // 2)
    shorter = dataclasses.replace(
        whole.metadata, kv_lens=(prefix,), ropes=(prefix,), seq_len=prefix
    )
    return KVCacheBundle(
        recipe.key,
        {
            "gen": whole,
            "cfg_text": PrefixOf("gen", tokens=prefix, metadata=shorter),
            "cfg_img": SameAs("gen"),
            "other": make_cache(recipe, salt=1, tokens=recipe.tokens + 1),
            "empty": make_cache(recipe, salt=2, tokens=0),
        },
    )


def every_dtype(key: str, **fields: Any) -> list[Recipe]:
    """One recipe for each dtype that a cache may have."""
    return [
        Recipe(f"{key}-{name}", seed=seed, dtype=name, **fields)
        for seed, name in enumerate(KV_DTYPES)
    ]


def layers_of(data: Payload) -> Layers:
    """What `PutStream.write_layer` takes, in the order of the wire."""
    places = data.tensors()
    return {
        (branch.name, layer): places[numbers.start : numbers.stop]
        for branch, layer, numbers in data.plan().layers()
    }


def fingerprint(data: Payload) -> str:
    """SHA-256 over everything that must arrive: ids, metadata, and every byte of every branch."""
    found = hashlib.sha256()
    caches = (
        [(name, data[name]) for name in data] if isinstance(data, KVCacheBundle) else [("", data)]
    )
    for name, cache in caches:
        facts = [name, cache.request_id, cache.block_ids, cache.metadata.to_dict()]
        found.update(json.dumps(facts, sort_keys=True).encode())
        found.update(hash_tensors(cache.tensors()).encode())
    return found.hexdigest()


def hash_tensors(tensors: Sequence[TensorView]) -> str:
    """SHA-256 over dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
        found.update(dense(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
