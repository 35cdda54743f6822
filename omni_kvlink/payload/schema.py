"""`KVCacheTransferData`: one KV cache, complete and consistent, or it cannot be constructed."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from omni_kvlink.errors import ClosedError, SchemaError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.branch import KV_DTYPES, RANKS, Branch, check_branches
from omni_kvlink.payload.dtypes import dtype_name, tensor_views
from omni_kvlink.payload.manifest import PART_WORDS, PARTS, Manifest, kind_of, tensor_name
from omni_kvlink.payload.metadata import KVMetadata
from omni_kvlink.payload.paged import PagedTensor, check_strided
from omni_kvlink.payload.pools import IndexLike, PoolLayers, paged_layers, pages_of
from omni_kvlink.payload.views import TensorView, first_tokens
from omni_kvlink.payload.views import same_bytes as same_bytes

_REQUEST_ID = re.compile("[^\ud800-\udfff]{1,1024}", re.DOTALL)


def check_request_id(request_id: object) -> None:
    """Raise SchemaError unless the wire can carry the request id."""
    if not isinstance(request_id, str) or not _REQUEST_ID.fullmatch(request_id):
        raise SchemaError("request_id: a string of 1 to 1024 characters, no lone surrogates")


LayerBlocks = Mapping[str, Sequence[TensorView | None]]
Reserve = tuple[str, str, tuple[int, ...]]

SINGLE = "kv"
"""The branch name of a payload that is one cache and no bundle."""

CACHES = {"key": "key_cache", "value": "value_cache", "latent": "latent_cache"}
"""The RFC's names of `layer_blocks`, by the wire's name of the part."""


class KVCacheTransferData:
    """One KV cache on its way between two stages; borrows its tensors and never writes to them.

    Args:
        request_id: names the payload; the consumer asks for it.
        layer_blocks: `{"key_cache": [...], "value_cache": [...]}`, one tensor
            `[tokens, kv_heads, head_dim]` a layer; or `{"latent_cache": [...]}`, one tensor
            `[tokens, latent_dim]` a layer (MLA). All None means an empty cache. Any strides and
            devices, or a `PagedTensor` in a tensor's stead; all have one shape and dtype.
        block_ids: the blocks the cache came from; empty for dense tensors.
        metadata: `KVMetadata`, or the RFC's dict of the same.

    Raises:
        SchemaError: anything does not fit; names layer, K or V, what was found and wanted.
    """

    def __init__(
        self,
        request_id: str,
        layer_blocks: LayerBlocks,
        block_ids: Sequence[int] = (),
        metadata: KVMetadata | Mapping[str, Any] | None = None,
    ):
        check_request_id(request_id)
        if not isinstance(metadata, (KVMetadata, Mapping)):
            raise SchemaError("metadata is missing: kv_lens, ropes and num_layers at least")
        if not isinstance(metadata, KVMetadata):
            metadata = KVMetadata.from_dict(metadata)
        self.request_id = request_id
        try:
            self.block_ids = [operator.index(block) for block in block_ids]
        except TypeError as error:
            raise SchemaError(f"block_ids: {error}") from None
        self._blocks: dict[str, list[TensorView | None]] | None
        self._blocks = _complete_layers(layer_blocks, metadata)
        self.metadata = _fit_metadata(metadata, self._blocks)
        check_branches([self.as_branch(SINGLE)], bundle=False, error=SchemaError)

    @property
    def layer_blocks(self) -> dict[str, list[TensorView | None]]:
        """The tensors, by the RFC's names.

        Raises:
            ClosedError: this was received, and its `with` block is over.
        """
        if self._blocks is None:
            raise ClosedError(
                f"payload {self.request_id!r} was given back at the end of its `with` block; "
                "keep the tensors you need, or clone them, inside it"
            )
        return self._blocks

    @property
    def is_empty(self) -> bool:
        return self.metadata.seq_len == 0

    def tensors(self) -> list[TensorView]:
        """All layers in the order of the wire: layer by layer, K before V.

        Each is a tensor, or the `PagedTensor` that was given; what was received is always tensors.
        """
        if self.is_empty:
            return []
        parts = [self.layer_blocks[CACHES[part]] for part in PARTS[self.metadata.layout]]
        return [
            tensor for layer in zip(*parts, strict=True) for tensor in layer if tensor is not None
        ]

    def plan(self, *, digests: bool = True, capacity: Manifest | None = None) -> Manifest:
        """Sizes and places of everything, before a byte is copied; `capacity` as in `lay_out`."""
        branch = self.as_branch(SINGLE)
        return Manifest.lay_out(
            self.request_id,
            [branch],
            branch_tensors(branch),
            bundle=False,
            digests=digests,
            capacity=capacity,
        )

    @classmethod
    def blank(
        cls,
        request_id: str,
        *,
        row: Sequence[int],
        dtype: torch.dtype,
        metadata: KVMetadata | Mapping[str, Any],
    ) -> KVCacheTransferData:
        """Sizes without bytes: what `KVLink.stream_put` and `KVLink.allocate` plan with.

        Args:
            row: the shape of one token: `(kv_heads, head_dim)`, in layout "ND" `(latent_dim,)`.
            metadata: says how many tokens, and `num_layers`.
        """
        if not isinstance(metadata, KVMetadata):
            metadata = KVMetadata.from_dict(metadata)
        layer = None
        if metadata.seq_len:
            layer = torch.empty((metadata.seq_len, *row), dtype=dtype, device="meta")
        names = (CACHES[part] for part in PARTS.get(metadata.layout, ()))
        return cls(
            request_id, {name: [layer] * metadata.num_layers for name in names}, (), metadata
        )

    @classmethod
    def from_paged(
        cls,
        request_id: str,
        key_cache: PoolLayers,
        value_cache: PoolLayers | None,
        *,
        block_size: int,
        metadata: KVMetadata | Mapping[str, Any],
        block_ids: IndexLike = None,
        slot_mapping: IndexLike = None,
    ) -> KVCacheTransferData:
        """A sequence in an engine's pools of blocks, borrowed where it lies; nothing is copied.

        Args:
            key_cache: one pool `[num_blocks, block_size, kv_heads, head_dim]` a layer, any strides;
                `split_stacked` and `split_packed` make K's and V's of pools that hold both. In
                layout "ND" the latents, `[num_blocks, block_size, latent_dim]`.
            value_cache: the same for V; None in layout "ND".
            block_size: tokens of a block, as the pools must have it.
            metadata: `num_layers` and `block_size` may be left out of a dict.
            block_ids: the blocks of the one sequence, in its order; the last may be partly filled.
            slot_mapping: or a slot a token: slot % block_size of block slot // block_size.

        Raises:
            SchemaError: a table or a pool does not fit; names layer, K or V.
        """
        if isinstance(metadata, Mapping):
            metadata = KVMetadata.from_dict({"num_layers": len(key_cache), **metadata})
        if metadata.block_size not in (0, block_size):
            raise SchemaError(f"block_size {block_size}, but metadata says {metadata.block_size}")
        metadata = dataclasses.replace(metadata, block_size=block_size)
        if not metadata.seq_len:
            names = (CACHES[part] for part in PARTS.get(metadata.layout, ()))
            return cls(request_id, {name: [None] * len(key_cache) for name in names}, (), metadata)
        pages = pages_of(
            metadata, block_size=block_size, block_ids=block_ids, slot_mapping=slot_mapping
        )
        layers = paged_layers(key_cache, value_cache, pages, metadata.layout)
        blocks = {CACHES[part]: places for part, places in layers.items()}
        return cls(request_id, blocks, pages.blocks(), metadata)

    @classmethod
    def from_region(cls, manifest: Manifest, region: Region) -> KVCacheTransferData:
        """The cache as it lies in a payload, without copying."""
        if kind_of(manifest) != "KVCacheTransferData":
            raise SchemaError(f"payload {manifest.request_id!r} is a {kind_of(manifest)}")
        return cache_at(manifest, manifest.branches[0], region)

    def to_dict(self) -> dict[str, Any]:
        """The RFC's dict; `from_dict` gives the same cache back, its tensors shared."""
        return {
            "request_id": self.request_id,
            "layer_blocks": {name: list(layers) for name, layers in self.layer_blocks.items()},
            "block_ids": list(self.block_ids),
            "metadata": self.metadata.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVCacheTransferData:
        missing = [
            name for name in ("request_id", "layer_blocks", "metadata") if name not in values
        ]
        if missing:
            raise SchemaError(f"a KV cache's dict lacks {', '.join(missing)}")
        return cls(
            values["request_id"],
            values["layer_blocks"],
            values.get("block_ids", ()),
            values["metadata"],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the payload as a .safetensors file that any stock tool opens."""
        from omni_kvlink.payload.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVCacheTransferData:
        """Read what `save` wrote, every digest checked; the tensors are readonly views of the file.

        Raises:
            WireError: not such a file, or changed since; names branch, layer, K or V.
            SchemaError: the file holds another kind of payload.
        """
        from omni_kvlink.payload.files import load

        data = load(path)
        if not isinstance(data, cls):
            kind = type(data).__name__
            raise SchemaError(f"{os.fspath(path)} holds a {kind}: {kind}.load reads it")
        return data

    def difference(self, other: KVCacheTransferData) -> str:
        """The first thing that is not bit for bit the same, in words; "" when all is."""
        fields = [f"metadata.{field.name}" for field in dataclasses.fields(KVMetadata)]
        for name in ("request_id", "block_ids", *fields):
            mine, theirs = (operator.attrgetter(name)(cache) for cache in (self, other))
            if mine != theirs:
                return f"{name}: {mine!r:.100} here, {theirs!r:.100} there"
        parts = PARTS[self.metadata.layout]
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            if not same_bytes(mine, theirs):
                return f"layer {index // len(parts)}, {PART_WORDS[parts[index % len(parts)]]}"
        return ""

    def as_branch(self, name: str) -> Branch:
        """The cache in numbers, as the wire carries it."""
        tensors = self.tensors()
        shape = tuple(tensors[0].shape) if tensors else ()
        return self.metadata.as_branch(name, shape=shape, block_ids=tuple(self.block_ids))

    def first_tokens(self, tokens: int, metadata: KVMetadata) -> KVCacheTransferData:
        """The cache of the first `tokens` tokens: views of the same bytes."""
        blocks = {
            name: [None if layer is None else first_tokens(layer, tokens) for layer in layers]
            for name, layers in self.layer_blocks.items()
        }
        return KVCacheTransferData(self.request_id, blocks, (), metadata)

    def close(self) -> None:
        """Let go of the tensors; those kept elsewhere live on."""
        self._blocks = None

    def __repr__(self) -> str:
        meta = self.metadata
        state = " (given back)" if self._blocks is None else ""
        return (
            f"<KVCacheTransferData {self.request_id!r}: {meta.num_layers} layers × "
            f"{meta.seq_len} tokens, {meta.dtype or 'empty'}{state}>"
        )


def branch_tensors(branch: Branch) -> Iterator[Reserve]:
    """Name, dtype code and shape of each tensor a branch carries, in the order of the wire."""
    if branch.carries_tensors:
        for layer in range(branch.num_layers):
            for part in PARTS[branch.layout]:
                yield tensor_name(branch.name, layer, part), branch.code, branch.shape


def cache_at(manifest: Manifest, branch: Branch, region: Region) -> KVCacheTransferData:
    """One branch of a payload as views; the manifest was validated, so nothing can be missing."""
    parts = PARTS[branch.layout]
    specs = manifest.tensors_of(branch)
    views = tensor_views(region, specs, manifest.header_nbytes)
    data = object.__new__(KVCacheTransferData)  # validating it again would cost half of the view
    data.request_id, data.block_ids = manifest.request_id, list(branch.block_ids)
    data._blocks = {
        CACHES[part]: list(views[at :: len(parts)]) or [None] * branch.num_layers
        for at, part in enumerate(parts)
    }
    data.metadata = KVMetadata.from_branch(branch)
    return data


def _complete_layers(
    layer_blocks: LayerBlocks, metadata: KVMetadata
) -> dict[str, list[TensorView | None]]:
    """A private copy of the lists, every layer there and of one shape and dtype."""
    if metadata.layout not in PARTS:
        raise SchemaError(f"layout {metadata.layout!r}; wanted one of {', '.join(PARTS)}")
    names = {CACHES[part]: PART_WORDS[part] for part in PARTS[metadata.layout]}
    if not isinstance(layer_blocks, Mapping) or set(layer_blocks) != set(names):
        raise SchemaError(
            f"layer_blocks has {sorted(map(str, layer_blocks or ()))}; "
            f"layout {metadata.layout} wants {list(names)}"
        )
    blocks = {name: list(layer_blocks[name] or ()) for name in names}
    first = next((layer for name in names for layer in blocks[name] if layer is not None), None)
    for name, word in names.items():
        if len(blocks[name]) != metadata.num_layers:
            raise SchemaError(
                f"{word}: {len(blocks[name])} layers, but num_layers is {metadata.num_layers}"
            )
        for index, layer in enumerate(blocks[name]):
            if first is not None:
                _check_layer(layer, first, f"layer {index}, {word}")
    return blocks


def _check_layer(layer: TensorView | None, first: TensorView, where: str) -> None:
    if layer is None:
        raise SchemaError(f"{where} is missing, while other layers are there")
    is_plan = isinstance(layer, torch.Tensor) and layer.is_meta  # made by blank()
    if not isinstance(layer, PagedTensor) and not is_plan:
        check_strided(layer, where)
    if layer.shape != first.shape or layer.dtype != first.dtype:
        raise SchemaError(
            f"{where} is {layer.dtype} {list(layer.shape)}; the first tensor of this cache is "
            f"{first.dtype} {list(first.shape)}, and all must be alike"
        )


def _fit_metadata(metadata: KVMetadata, blocks: dict[str, list[TensorView | None]]) -> KVMetadata:
    """Metadata that agrees with the tensors, its dtype filled in from them if it was left out."""
    first = next(iter(blocks.values()))[0] if metadata.num_layers else None
    if first is None:
        if metadata.seq_len:
            raise SchemaError(f"kv_lens say {metadata.seq_len} tokens, but every layer is None")
        return metadata
    where = f"layer 0, {PART_WORDS[PARTS[metadata.layout][0]]}"
    rank = RANKS[metadata.layout]
    if len(first.shape) != rank or 0 in first.shape:
        raise SchemaError(
            f"{where} is {list(first.shape)}; layout {metadata.layout} wants {rank} dimensions, "
            "none of them 0 (an empty cache is given as None)"
        )
    if first.shape[0] != metadata.seq_len:
        raise SchemaError(
            f"{where} has {first.shape[0]} tokens, but kv_lens {list(metadata.kv_lens)} "
            f"say {metadata.seq_len}"
        )
    try:
        dtype = dtype_name(first.dtype)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from None
    if dtype not in KV_DTYPES:
        raise SchemaError(
            f"{where}: dtype {first.dtype} is not one of a KV cache ({', '.join(KV_DTYPES)}); "
            "TensorTransferData sends tensors of others"
        )
    if metadata.dtype not in ("", dtype):
        raise SchemaError(f"{where} is {dtype}, but metadata says {metadata.dtype}")
    return dataclasses.replace(metadata, dtype=dtype)
