"""`KVCacheTransferData` and `KVMetadata`, one KV cache; `PayloadBase`, what all payloads share.

One long file: each put and get of a cache enters all three, and each file on its way costs it.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from omni_kvlink.errors import ClosedError, SchemaError
from omni_kvlink.payload.branches import (
    PART_WORDS,
    PARTS,
    Branch,
    Count,
    Reuse,
    Shard,
    as_int,
    check_branches,
    tensor_names,
)
from omni_kvlink.payload.kv_checks import (
    CACHES,
    LayerBlocks,
    check_names,
    checked_metadata,
    complete_layers,
    described,
    fitting_dtype,
    json_copy,
    through_json,
)
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.paged import IndexLike, PoolLayers, block_table_of, paged_layers
from omni_kvlink.payload.safetensors_file import read_file, write_file
from omni_kvlink.payload.tensor_memory import payload_views
from omni_kvlink.payload.views import TensorView, first_tokens, same_bytes

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layout_cache import KnownHeader, LayoutCache
    from omni_kvlink.payload.manifest import Layout

Reserve = tuple[str, str, tuple[int, ...]]
"""Name, dtype code and shape of a tensor that a payload is to have."""

_PLAIN = (
    *("kv_lens", "ropes", "num_layers", "seq_len", "dtype", "layout", "block_size", "image_shape"),
)
"""Metadata that no caller can modify: all but `extra` and `shard`."""
_ABOUT = operator.attrgetter(*_PLAIN)
_MAX_BLOCK_IDS = 64
"""Block ids of a payload above which its layout is not kept."""

SINGLE = "kv"
"""The branch name of a payload that is one cache and no bundle."""

_REQUEST_ID = re.compile("[^\ud800-\udfff]{1,1024}", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class KVMetadata:
    """Lengths, positions and layout of one cache.

    `ropes` differs from `kv_lens` where the context has an image, which adds many tokens and one
    position; therefore it is carried and never derived.

    Args:
        kv_lens: cached tokens of each sequence.
        ropes: next rotary position of each sequence.
        num_layers: layers of the cache.
        seq_len: all tokens together; the sum of `kv_lens` when left out.
        dtype: torch's name, such as "bfloat16"; taken from the tensors when left out.
        layout: "NHD" for K and V of [tokens, kv_heads, head_dim], "ND" for one latent a layer.
        block_size: tokens of a block where the cache came from a pool of blocks, else 0.
        image_shape: (height, width) in pixels of the image to generate, where there is one.
        extra: anything else, as JSON values (dicts with string keys, lists, no tuples, no NaN).
        shard: which heads of the whole model these are, under tensor parallelism.

    It can be read as the RFC's dict, too: `metadata["kv_lens"]`, `.get`, `in`, `dict(metadata)`.

    Integers of numpy and torch become Python's. SchemaError if a value is not of its type (a bool
    is no integer), or the lengths contradict each other.
    """

    kv_lens: tuple[int, ...]
    ropes: tuple[int, ...]
    num_layers: int
    seq_len: int = -1
    dtype: str = ""
    layout: str = "NHD"
    block_size: int = 0
    image_shape: tuple[int, int] | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    shard: Shard | None = None

    def __post_init__(self) -> None:
        for name, value in checked_metadata(vars(self)).items():
            object.__setattr__(self, name, value)  # the class is frozen

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVMetadata:
        """Read the RFC's dict; keys for which this class has no field go into `extra`."""
        names = {field.name for field in dataclasses.fields(cls)}
        check_names("metadata", ("kv_lens", "ropes", "num_layers"), values)
        fields = {name: value for name, value in values.items() if name in names}
        fields["extra"] = json_copy(fields.get("extra", {}), "metadata: extra") | {
            name: value for name, value in values.items() if name not in names
        }
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the RFC's dict: `kv_lens` and `ropes` as lists, every field present."""
        lists = {"kv_lens": list(self.kv_lens), "ropes": list(self.ropes)}
        return {**vars(self), **lists, "shard": msgspec.to_builtins(self.shard)}

    def __getitem__(self, name: str) -> Any:
        """Read a field, or a key of `extra`, as in the RFC's dict; KeyError if there is none."""
        fields = self._by_name()
        if name not in fields:
            raise KeyError(f"{name!r}; this metadata has {', '.join(fields)}")
        return fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Read a field, or a key of `extra`; `default` if there is none."""
        return self._by_name().get(name, default)

    def __iter__(self) -> Iterator[str]:
        """The names of all fields but `extra`, and the keys of `extra`."""
        return iter(self._by_name())

    keys = __iter__

    def __contains__(self, name: object) -> bool:
        return name in self._by_name()

    def __len__(self) -> int:
        return len(self._by_name())

    def _by_name(self) -> dict[str, Any]:
        fields = self.to_dict()
        return {**fields.pop("extra"), **fields}

    def as_branch(
        self,
        name: str,
        *,
        shape: tuple[int, ...] = (),
        block_ids: tuple[int, ...] = (),
        reuse: Reuse | None = None,
    ) -> Branch:
        """This metadata as the wire carries it; the types were checked when it was made."""
        extra = json_copy(self.extra, "metadata: extra") if self.extra else {}
        fields = {**vars(self), "extra": extra}
        return Branch(name=name, shape=shape, block_ids=block_ids, reuse=reuse, **fields)

    @classmethod
    def from_branch(cls, branch: Branch) -> KVMetadata:
        """Read the metadata of a branch that was validated."""
        metadata = object.__new__(cls)  # a second validation would take longer than all the rest
        fields = dict(zip(_PLAIN, _ABOUT(branch), strict=True))
        extra = json_copy(branch.extra, "metadata: extra") if branch.extra else {}
        metadata.__dict__.update(fields, extra=extra, shard=branch.shard)
        return metadata


class PayloadBase(ABC):
    """The part that all payloads share: their layout, views of received memory, files."""

    request_id: str
    _is_bundle: ClassVar[bool] = False

    @property
    def reused_nbytes(self) -> int:
        """Bytes that need not be sent, because a branch is a prefix of another or the same."""
        return 0

    @abstractmethod
    def tensors(self) -> list[TensorView]:
        """All tensors, in the order of the wire."""

    @abstractmethod
    def _branches(self) -> list[Branch]:
        """The payload as the wire carries it, without its bytes."""

    @classmethod
    def of_header(cls, header: KnownHeader, views: Sequence[torch.Tensor]) -> Self:
        """A payload whose layout is of this `kind`; without its manifest, which takes longer."""
        raise NotImplementedError

    def _shapes(self) -> tuple[Any, ...]:
        """Dtype and shape of each tensor that its branch does not determine."""
        return ()

    @abstractmethod
    def reserve(self, branch: Branch) -> Iterable[Reserve]:
        """Name, dtype code and shape of each tensor of a branch, in the order of the wire."""

    @classmethod
    @abstractmethod
    def views_of(cls, manifest: Manifest, branches: Sequence[Branch], region: Region) -> Self:
        """The branches of a validated payload as views."""

    def _key(self) -> Hashable | None:
        """Everything that a header says of the payload besides request id and digests.

        None if other payloads rarely say the same.
        """
        branches = self._branches()
        if sum([len(branch.block_ids) for branch in branches]) > _MAX_BLOCK_IDS:
            return None
        return msgspec.json.encode(branches), self._shapes()

    def find_layout(self, layouts: LayoutCache, *, digests: bool) -> Layout:
        """Return the payload's layout: that of an earlier one, if it is in the cache.

        Then their headers differ in request id and digests only. A new one is added to the cache.
        """
        structure = self._key()
        key = self._is_bundle, digests, structure
        layout = None if structure is None else layouts.find(key)
        if layout is None:
            layout = self.plan(digests=digests).layout
            assert layout is not None
            if structure is not None:
                layouts.add(key, layout)
        return layout

    def cached_plan(self, layouts: LayoutCache, *, digests: bool) -> Manifest:
        """Return what `plan` returns, sooner if its layout is in the cache."""
        return self.find_layout(layouts, digests=digests).plan(self.request_id)

    def plan(self, *, digests: bool = True, capacity: Manifest | None = None) -> Manifest:
        """Lay out the payload before a byte is copied; arguments as in `Manifest.lay_out`."""
        branches = self._branches()
        tensors = chain.from_iterable(map(self.reserve, branches))
        return Manifest.lay_out(
            self.request_id,
            branches,
            tensors,
            bundle=self._is_bundle,
            digests=digests,
            capacity=capacity,
        )

    @classmethod
    def from_region(cls, manifest: Manifest, region: Region) -> Self:
        """The tensors as views of a payload; nothing is copied."""
        if manifest.kind != cls.__name__:
            raise SchemaError(f"payload {manifest.request_id!r} is a {manifest.kind}")
        return cls.views_of(manifest, manifest.branches, region)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the payload as a .safetensors file that any stock tool opens."""
        write_file(path, self.plan(), self.tensors())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mmap: bool = False) -> Self:
        """Read what `save` wrote into memory of its own, every digest checked.

        With `mmap=True` nothing is copied: the tensors are readonly views of the file. They change
        if it is written to, and an access ends the process with SIGBUS if it was truncated (`save`
        does neither: it replaces a file). Writing to one ends the process with SIGSEGV.

        CapacityError if there is not enough memory; WireError if the file is no payload or was
        changed; SchemaError if it is of another class.
        """
        return cls.from_region(*read_file(path, cls.__name__, map_it=mmap))

    def _first_difference(self, other: Self, names: Iterable[str]) -> str:
        for name in names:
            mine, theirs = map(operator.attrgetter(name), (self, other))
            if mine != theirs:
                return f"{name}: {mine!r:.100} here, {theirs!r:.100} there"
        return ""

    def _released(self) -> ClosedError:
        return ClosedError(
            f"payload {self.request_id!r} was released at the end of its `with` block; "
            "keep the tensors you need, or clone them, inside it"
        )


class KVCacheTransferData(PayloadBase):
    """One KV cache to send, or one received; it borrows its tensors and never writes to them.

    Args:
        request_id: names the payload; the consumer gets it by this name.
        layer_blocks: `{"key_cache": [...], "value_cache": [...]}`, one tensor
            `[tokens, kv_heads, head_dim]` a layer; or `{"latent_cache": [...]}`, one tensor
            `[tokens, latent_dim]` a layer (MLA). All None means an empty cache. Any strides and
            devices, or a `PagedTensor` instead of a tensor; all have one shape and dtype.
        block_ids: the blocks the cache came from; empty for dense tensors.
        metadata: `KVMetadata`, or the RFC's dict of the same.

    SchemaError if anything does not fit: it names layer, K or V, what was found and required.
    """

    def __init__(
        self,
        request_id: str,
        layer_blocks: LayerBlocks,
        block_ids: Sequence[int] = (),
        metadata: KVMetadata | Mapping[str, Any] | None = None,
    ):
        self.request_id = check_request_id(request_id)
        if not isinstance(metadata, (KVMetadata, Mapping)):
            state = "is missing" if metadata is None else f"is {described(metadata)}"
            raise SchemaError(f"metadata {state}: kv_lens, ropes and num_layers at least")
        if not isinstance(metadata, KVMetadata):
            metadata = KVMetadata.from_dict(metadata)
        try:
            blocks = [as_int(block) for block in block_ids]
            self.block_ids = msgspec.convert(blocks, list[Count])
        except (TypeError, msgspec.ValidationError) as error:
            raise SchemaError(f"block_ids: {error}") from None
        complete = complete_layers(layer_blocks, metadata.layout, metadata.num_layers)
        self._blocks: dict[str, list[TensorView | None]] | None = complete
        dtype = fitting_dtype(complete, metadata.layout, metadata.kv_lens, metadata.dtype)
        self.metadata = dataclasses.replace(metadata, dtype=dtype)
        check_branches(self._branches(), bundle=False, error=SchemaError)

    @property
    def layer_blocks(self) -> dict[str, list[TensorView | None]]:
        """The tensors, by the RFC's names; ClosedError after the release of a received payload."""
        if self._blocks is None:
            raise self._released()
        return self._blocks

    def __getitem__(self, name: str) -> list[TensorView | None]:
        blocks = self.layer_blocks
        if name not in blocks:
            raise KeyError(f"{name!r}; this cache has {', '.join(blocks)}, a tensor a layer each")
        return blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layer_blocks)

    @property
    def is_empty(self) -> bool:
        """Whether the cache has no tokens, and so no tensors."""
        return self.metadata.seq_len == 0

    def tensors(self) -> list[TensorView]:
        """All tensors in the order of the wire: layer by layer, K before V; as they were given."""
        if not self.metadata.seq_len:
            return []
        blocks = self._blocks or self.layer_blocks  # the property costs a call
        layers = zip(*blocks.values(), strict=True)  # the parts in the wire's order
        return [view for view in chain.from_iterable(layers) if view is not None]

    @classmethod
    def blank(
        cls,
        request_id: str,
        *,
        row: Sequence[int],
        dtype: torch.dtype,
        metadata: KVMetadata | Mapping[str, Any],
    ) -> KVCacheTransferData:
        """Sizes without bytes, for `KVProducer.stream_put` and `KVProducer.allocate`.

        `row` is the shape of one token: `(kv_heads, head_dim)`, in layout "ND" `(latent_dim,)`;
        `metadata` gives the number of tokens, and `num_layers`.
        """
        if not isinstance(metadata, KVMetadata):
            metadata = KVMetadata.from_dict(metadata)
        if not isinstance(dtype, torch.dtype):
            raise SchemaError(f"dtype: a torch.dtype, this is {described(dtype)}")
        if not isinstance(row, Sequence):
            raise SchemaError(f"row: the shape of one token, this is {described(row)}")
        shape = (metadata.seq_len, *row)
        layer = torch.empty(shape, dtype=dtype, device="meta") if metadata.seq_len else None
        parts = PARTS.get(metadata.layout, ())
        blocks = {CACHES[part]: [layer] * metadata.num_layers for part in parts}
        return cls(request_id, blocks, (), metadata)

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
        """A sequence in an engine's pools of blocks; nothing is copied.

        Args:
            request_id: names the payload.
            key_cache: one pool `[num_blocks, block_size, kv_heads, head_dim]` a layer, any strides;
                `split_stacked` and `split_packed` split pools that hold both K and V. In layout
                "ND" the latents, `[num_blocks, block_size, latent_dim]`.
            value_cache: the same for V; None in layout "ND".
            block_size: tokens of a block in the pools.
            metadata: `num_layers` and `block_size` may be left out of a dict.
            block_ids: the blocks of the one sequence, in its order; the last may be partly filled.
            slot_mapping: or a slot a token: slot % block_size of block slot // block_size.

        SchemaError if a table or a pool does not fit; it names layer, K or V.
        """
        if isinstance(metadata, Mapping):
            metadata = KVMetadata.from_dict({"num_layers": len(key_cache), **metadata})
        if metadata.block_size not in (0, block_size):
            raise SchemaError(f"block_size {block_size}, but metadata says {metadata.block_size}")
        metadata = dataclasses.replace(metadata, block_size=block_size)
        if not metadata.seq_len:
            empty = {
                CACHES[part]: [None] * len(key_cache) for part in PARTS.get(metadata.layout, ())
            }
            return cls(request_id, empty, (), metadata)
        table = block_table_of(
            metadata.kv_lens, block_size=block_size, block_ids=block_ids, slot_mapping=slot_mapping
        )
        layers = paged_layers(key_cache, value_cache, table, metadata.layout)
        blocks = {CACHES[part]: views for part, views in layers.items()}
        return cls(request_id, blocks, table.blocks(), metadata)

    def to_dict(self) -> dict[str, Any]:
        """Return the RFC's dict, which shares the tensors; `from_dict` reads it."""
        return {
            "request_id": self.request_id,
            "layer_blocks": {name: list(layers) for name, layers in self.layer_blocks.items()},
            "block_ids": list(self.block_ids),
            "metadata": self.metadata.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVCacheTransferData:
        """Read the RFC's dict: `request_id`, `layer_blocks`, `metadata`, perhaps `block_ids`."""
        required = ("request_id", "layer_blocks", "metadata")
        check_names("a KV cache's dict", required, values)
        names = (*required, "block_ids")
        return cls(**{name: values[name] for name in names if name in values})

    def difference(self, other: KVCacheTransferData) -> str:
        """The first thing that is not bit for bit the same, in words; "" when all is."""
        fields = [f"metadata.{field.name}" for field in dataclasses.fields(KVMetadata)]
        if difference := self._first_difference(other, ("request_id", "block_ids", *fields)):
            return difference
        parts = PARTS[self.metadata.layout]
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            if not same_bytes(mine, theirs):
                return f"layer {index // len(parts)}, {PART_WORDS[parts[index % len(parts)]]}"
        return ""

    def as_branch(self, name: str) -> Branch:
        """Describe the cache as the wire carries it, without its bytes."""
        tensors = self.tensors()
        shape = tuple(tensors[0].shape) if tensors else ()
        return self.metadata.as_branch(name, shape=shape, block_ids=tuple(self.block_ids))

    def reserve(self, branch: Branch) -> Iterator[Reserve]:
        """Name, dtype code and shape of each tensor; the branch has all of it."""
        return ((name, branch.code, branch.shape) for name in tensor_names(branch))

    @classmethod
    def views_of(cls, manifest: Manifest, branches: Sequence[Branch], region: Region) -> Self:
        """The cache of one validated branch as views."""
        (branch,) = branches
        views = payload_views(region, manifest, manifest.numbers_of(branch))
        return cls._of_views(manifest.request_id, branch, views)

    @classmethod
    def of_header(cls, header: KnownHeader, views: Sequence[torch.Tensor]) -> Self:
        """See `PayloadBase.of_header`."""
        (branch,) = header.layout.branches()
        return cls._of_views(header.request_id, branch, views)

    @classmethod
    def _of_views(cls, request_id: str, branch: Branch, views: Sequence[torch.Tensor]) -> Self:
        data = object.__new__(cls)  # a second validation would double the time
        parts = PARTS[branch.layout]
        data.request_id, data.block_ids = request_id, list(branch.block_ids)
        data._blocks = {
            CACHES[part]: list(views[first :: len(parts)]) or [None] * branch.num_layers
            for first, part in enumerate(parts)
        }
        data.metadata = KVMetadata.from_branch(branch)
        return data

    def first_tokens(self, tokens: int, metadata: KVMetadata) -> KVCacheTransferData:
        """The cache of the first `tokens` tokens: views of the same bytes."""
        blocks = {
            name: [None if layer is None else first_tokens(layer, tokens) for layer in layers]
            for name, layers in self.layer_blocks.items()
        }
        return KVCacheTransferData(self.request_id, blocks, (), metadata)

    def close(self) -> None:
        """Release the tensors; those that the caller kept stay valid."""
        self._blocks = None

    def __repr__(self) -> str:
        meta = self.metadata
        state = " (released)" if self._blocks is None else ""
        return (
            f"<KVCacheTransferData {self.request_id!r}: {meta.num_layers} layers × "
            f"{meta.seq_len} tokens, {meta.dtype or 'empty'}{state}>"
        )

    def _branches(self) -> list[Branch]:
        return [self.as_branch(SINGLE)]

    def _key(self) -> Hashable | None:
        metadata, blocks = self.metadata, self._blocks
        if len(self.block_ids) > _MAX_BLOCK_IDS:
            return None
        if self.block_ids or metadata.shard is not None or blocks is None:
            return super()._key()
        first = next(iter(blocks.values()))[0] if metadata.seq_len else None
        extra = through_json(metadata.extra, "metadata: extra")[0] if metadata.extra else b""
        return _ABOUT(metadata), extra, None if first is None else first.shape


def are_request_ids(request_ids: Sequence[str]) -> bool:
    """Return whether each is a valid request id; see `check_request_id`, which says why not."""
    try:
        return all(map(_REQUEST_ID.fullmatch, request_ids))
    except TypeError:  # one is no string
        return False


def check_request_id(request_id: str) -> str:
    """Return a request id; SchemaError if peers would refuse it and close the connection."""
    if not isinstance(request_id, str) or not _REQUEST_ID.fullmatch(request_id):
        raise SchemaError(
            "request_id: a string of 1 to 1024 characters, no lone surrogates; "
            f"this is {described(request_id)}"
        )
    return request_id
