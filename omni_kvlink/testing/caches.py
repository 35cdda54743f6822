"""Payloads of random bytes, in every dtype and many shapes, and fingerprints of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle, Payload, PrefixOf, SameAs
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.views import TensorView, dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.link import Allocation, ReceivedChunk

MIB = 1 << 20
Layers: TypeAlias = dict[tuple[str, int], list[TensorView]]
"""The tensors of each layer, by branch and layer: K and V, one latent, or one tensor."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arguments, JSON values, with which two processes make the same payload.

    A `bundle` has several branches instead of one cache, `latent` one tensor a layer instead of K
    and V; `tensors` are nested ones of every dtype instead of a cache, or a branch of the bundle.
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
    tensors: bool = False

    def make(self, *, contiguous: bool = False) -> Payload:
        """Make the payload; if `contiguous`, every tensor of a `TensorTransferData` is dense."""
        if self.bundle:
            return make_bundle(self, contiguous=contiguous)
        return make_tensors(self, contiguous=contiguous) if self.tensors else make_cache(self)

    def to_dict(self) -> dict[str, Any]:
        """The arguments of the recipe."""
        return dataclasses.asdict(self)


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Make a tensor of random bytes: floats include NaNs with payloads; bools are 0 or 1."""
    high, nbytes = 2 if dtype == torch.bool else 256, math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def make_cache(recipe: Recipe, *, salt: int = 0, tokens: int | None = None) -> KVCacheTransferData:
    """Make one cache; another `salt` makes another one of the same recipe."""
    tokens = recipe.tokens if tokens is None else tokens
    generator = torch.Generator().manual_seed(recipe.seed * 1009 + salt)
    shape = (tokens, recipe.dim) if recipe.latent else (tokens, recipe.heads, recipe.dim)
    dtype = getattr(torch, recipe.dtype)
    names = ("latent_cache",) if recipe.latent else ("key_cache", "value_cache")
    blocks = {
        name: [random_tensor(shape, dtype, generator) for _ in range(recipe.layers)]
        if tokens
        else [None] * recipe.layers
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


def make_tensors(recipe: Recipe, *, contiguous: bool = False) -> TensorTransferData:
    """Make nested tensors: of every dtype, without dimensions or elements, strided and paged."""
    generator = torch.Generator().manual_seed(recipe.seed * 1009 + 5)
    tokens, dim = recipe.tokens, recipe.dim

    def leaf(*shape: int, dtype: str = "float32") -> torch.Tensor:
        return random_tensor(shape, getattr(torch, dtype), generator)

    strided = leaf(dim, tokens, dtype="bfloat16").t()
    blocks = tokens // 4 + 1
    table = BlockTable.of_blocks(list(reversed(range(blocks))), tokens=tokens + 1, block_size=4)
    paged = PagedTensor(leaf(blocks + 1, 4, dim, dtype="float16"), table)
    tree = {
        "nested": [leaf(tokens, dim), {"mask": leaf(tokens, dtype="bool"), "é": [leaf(1, 2, 3)]}],
        "scalars": {"step": leaf(dtype="int64"), "flag": leaf(dtype="bool")},
        "no elements": [leaf(0, 3), leaf(tokens, 0, dtype="uint8")],
        "dtypes": {name: leaf(3, 5, dtype=name) for name in KV_DTYPES},
        "strided": strided.contiguous() if contiguous else strided,
        "paged": dense(paged) if contiguous else paged,
        "last": leaf(tokens, dim, dtype="uint8"),
    }
    metadata = {"seed": recipe.seed, "nested": {"list": [1, 2.5, None, "é"], "empty": {}}}
    return TensorTransferData(recipe.key, tree, metadata)


def make_bundle(recipe: Recipe, *, contiguous: bool = False) -> KVCacheBundle:
    """Make a bundle: a cache, a prefix of it, the same again, another one, and an empty one."""
    cache = make_cache(recipe)
    prefix = max(1, recipe.tokens // 2)
    shorter = dataclasses.replace(
        cache.metadata, kv_lens=(prefix,), ropes=(prefix,), seq_len=prefix
    )
    branches: dict[str, BundleBranch] = {
        "gen": cache,
        "cfg_text": PrefixOf("gen", tokens=prefix, metadata=shorter),
        "cfg_img": SameAs("gen"),
        "other": make_cache(recipe, salt=1, tokens=recipe.tokens + 1),
        "empty": make_cache(recipe, salt=2, tokens=0),
    }
    if recipe.tensors:
        branches["extra"] = make_tensors(recipe, contiguous=contiguous)
    return KVCacheBundle(recipe.key, branches)


NESTED = Recipe("t", tensors=True, tokens=11)
MIXED = Recipe("t", tensors=True, bundle=True, tokens=9)
TENSORS = (
    NESTED,
    MIXED,
    Recipe("t", tensors=True, tokens=0),
    Recipe("t", tensors=True, tokens=1025, dim=600),
)
"""Nested tensors of every dtype; beside caches; mostly empty ones; more than one digest chunk."""


def sized(key: str, nbytes: int, *, seed: int = 0) -> Recipe:
    """A recipe of a cache of about `nbytes` bytes."""
    tokens = max(1, nbytes // (2 * 2 * 1024))
    return Recipe(key, seed=seed, layers=2, tokens=tokens, heads=4, dim=256, dtype="uint8")


def every_dtype(key: str, **fields: Any) -> list[Recipe]:
    """Recipes of a cache of each dtype that a cache may have."""
    return [
        Recipe(f"{key}-{name}", seed=seed, dtype=name, **fields)
        for seed, name in enumerate(KV_DTYPES)
    ]


def fill(allocation: Allocation, data: Payload) -> None:
    """Write a payload's tensors into allocated memory, as an engine does."""
    for target, source in zip(allocation.data.tensors(), data.tensors(), strict=True):
        flat = dense(source).contiguous().view(-1)
        dense(target).view(-1).view(torch.uint8).copy_(flat.view(torch.uint8))


def layers_of(data: Payload) -> Layers:
    """The tensors that `PutStream.write_layer` takes, in the order of the wire."""
    views = data.tensors()
    return {
        (branch.name, layer): views[numbers.start : numbers.stop]
        for branch, layer, numbers in data.plan().layers()
    }


def fingerprint(data: Payload) -> str:
    """SHA-256 over all that must arrive: ids, metadata, structure, and every byte."""
    digest = hashlib.sha256()
    for name, part in parts_of(data).items():
        fields: list[Any] = [name, part.request_id]
        if isinstance(part, TensorTransferData):
            fields += [part.metadata, _structure(part.tree)]
        else:
            fields += [part.block_ids, part.metadata.to_dict()]
        digest.update(json.dumps(fields, sort_keys=True).encode())
        digest.update(hash_tensors(part.tensors()).encode())
    return digest.hexdigest()


def parts_of(data: Payload) -> dict[str, KVCacheTransferData | TensorTransferData]:
    """The branches of a bundle, or the payload itself under an empty name."""
    if isinstance(data, KVCacheBundle):
        return {**{name: data[name] for name in data}, **data.tensor_data}
    return {"": data}


def _structure(node: Any) -> Any:
    """Nested dicts and lists as pairs of their kind and their items, which keep their order."""
    if isinstance(node, dict):
        return ["dict", *([key, _structure(child)] for key, child in node.items())]
    if isinstance(node, list):
        return ["list", *map(_structure, node)]
    return "tensor"


def hash_tensors(tensors: Sequence[TensorView]) -> str:
    """SHA-256 over the dtype, shape and bytes of every tensor."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(dense(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


Tensors = dict[str, Any]
"""The nested tensors of a chunk of an append stream."""


def chunk(number: int, rows: int = 5) -> Tensors:
    """The tensors of a chunk, of three dtypes, nested; the same for each call."""
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(rows, 24, generator=generator).to(torch.bfloat16)
    tokens = torch.randint(0, 1000, (rows,), generator=generator)
    return {"hidden": hidden, "more": [tokens, {"scale": torch.rand(rows, 1, generator=generator)}]}


def identify(received: ReceivedChunk) -> tuple[int, str]:
    """The number of a chunk that was received, and the hash of its tensors."""
    return received.number, hash_tensors(received.data.tensors())


def hash_chunk(tensors: Tensors) -> str:
    """The hash of a chunk's tensors, in the order of the wire."""
    tokens, nested = tensors["more"]
    return hash_tensors([tensors["hidden"], tokens, nested["scale"]])
