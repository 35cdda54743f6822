"""`KVCacheTransferData` and `KVMetadata`, one KV cache; `PayloadBase`, what all payloads share."""

from __future__ import annotations

import dataclasses
import difflib
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

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
    length_complaints,
    tensor_names,
)
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.pools import IndexLike, PoolLayers, block_table_of, paged_layers
from omni_kvlink.payload.safetensors_file import read_file, write_file
from omni_kvlink.payload.views import (
    TensorView,
    branch_views,
    check_view,
    dtype_name,
    first_tokens,
    same_bytes,
)

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layouts import Layout, LayoutCache

T = TypeVar("T")

LayerBlocks = Mapping[str, Sequence[TensorView | None]]
Reserve = tuple[str, str, tuple[int, ...]]
"""Name, dtype code and shape of a tensor that a payload is to have."""

_ABOUT = operator.attrgetter(
    *("kv_lens", "ropes", "num_layers", "seq_len", "dtype", "layout", "block_size", "image_shape")
)
"""Metadata that no caller can modify: all but `extra` and `shard`."""
_MAX_BLOCK_IDS = 64
"""Block ids of a payload above which its layout is not kept."""

SINGLE = "kv"
"""The branch name of a payload that is one cache and no bundle."""

CACHES = {"key": "key_cache", "value": "value_cache", "latent": "latent_cache"}
"""The RFC's names of `layer_blocks`, by the wire's name of the part."""

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
        put = object.__setattr__  # the class is frozen
        try:
            for name in ("kv_lens", "ropes"):
                values = getattr(self, name)
                if not isinstance(values, Iterable):
                    raise SchemaError(
                        f"metadata: {name}: one integer a sequence, as in [{_described(values)}]"
                    )
                put(self, name, tuple(map(as_int, values)))
            for name in ("num_layers", "seq_len", "block_size"):
                put(self, name, as_int(getattr(self, name)))
            put(self, "extra", json_copy(self.extra, "metadata: extra"))
            if self.image_shape is not None:
                put(self, "image_shape", tuple(map(as_int, self.image_shape)))
            if isinstance(self.shard, Shard):
                shard = {name: as_int(getattr(self.shard, name)) for name in ("rank", "world")}
                heads = [as_int(head) for head in self.shard.heads]
                put(self, "shard", _converted({**shard, "heads": heads}, Shard))
            if self.seq_len == -1:
                put(self, "seq_len", sum(self.kv_lens))
            branch = _converted({**vars(self), "name": "metadata"}, Branch)
        except TypeError as error:
            raise SchemaError(f"metadata: {error}") from None
        for complaint in length_complaints(branch):
            raise SchemaError(f"metadata: {complaint}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVMetadata:
        """Read the RFC's dict; keys for which this class has no field go into `extra`."""
        names = {field.name for field in dataclasses.fields(cls)}
        required = ("kv_lens", "ropes", "num_layers")
        _check_names("metadata", required, values)
        known = {name: value for name, value in values.items() if name in names}
        known["extra"] = json_copy(known.get("extra", {}), "metadata: extra") | {
            name: value for name, value in values.items() if name not in names
        }
        if isinstance(known.get("shard"), Mapping):
            known["shard"] = _converted(known["shard"], Shard)
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return the RFC's dict: `kv_lens` and `ropes` as lists, every field present."""
        lists = {"kv_lens": list(self.kv_lens), "ropes": list(self.ropes)}
        return {**vars(self), **lists, "shard": msgspec.to_builtins(self.shard)}

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
        extra = json_copy(branch.extra, "metadata: extra") if branch.extra else {}
        metadata.__dict__.update(
            kv_lens=branch.kv_lens,
            ropes=branch.ropes,
            num_layers=branch.num_layers,
            seq_len=branch.seq_len,
            dtype=branch.dtype,
            layout=branch.layout,
            block_size=branch.block_size,
            image_shape=branch.image_shape,
            extra=extra,
            shard=branch.shard,
        )
        return metadata


class PayloadBase(ABC):
    """What all payloads share: their layout, views of received memory, files."""

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
        """What a header says of the payload besides request id and digests.

        None if other payloads rarely say the same.
        """
        branches = self._branches()
        if sum([len(branch.block_ids) for branch in branches]) > _MAX_BLOCK_IDS:
            return None
        return msgspec.json.encode(branches), self._shapes()

    def layout_or_plan(self, layouts: LayoutCache, *, digests: bool) -> Layout | Manifest:
        """The layout of an earlier payload whose header differs in request id and digests only.

        Without one the plan of this payload, whose layout is added to the cache.
        """
        structure = self._key()
        if structure is None:
            return self.plan(digests=digests)
        key = self._is_bundle, digests, structure
        layout = layouts.find(key)
        if layout is not None:
            return layout
        plan = self.plan(digests=digests)
        layouts.add_plan(key, plan)
        return plan

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
            given = "is missing" if metadata is None else f"is {_described(metadata)}"
            raise SchemaError(f"metadata {given}: kv_lens, ropes and num_layers at least")
        if not isinstance(metadata, KVMetadata):
            metadata = KVMetadata.from_dict(metadata)
        try:
            blocks = [as_int(block) for block in block_ids]
            self.block_ids = msgspec.convert(blocks, list[Count])
        except (TypeError, msgspec.ValidationError) as error:
            raise SchemaError(f"block_ids: {error}") from None
        self._blocks: dict[str, list[TensorView | None]] | None
        self._blocks = _complete_layers(layer_blocks, metadata)
        self.metadata = _fit_metadata(metadata, self._blocks)
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
            raise SchemaError(f"dtype: a torch.dtype, this is {_described(dtype)}")
        if not isinstance(row, Sequence):
            raise SchemaError(f"row: the shape of one token, this is {_described(row)}")
        layer = None
        if metadata.seq_len:
            layer = torch.empty((metadata.seq_len, *row), dtype=dtype, device="meta")
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
        _check_names("a KV cache's dict", required, values)
        names = (*required, "block_ids")
        return cls(**{name: values[name] for name in names if name in values})

    def difference(self, other: KVCacheTransferData) -> str:
        """The first thing that is not bit for bit the same, in words; "" when all is."""
        fields = [f"metadata.{field.name}" for field in dataclasses.fields(KVMetadata)]
        if found := self._first_difference(other, ("request_id", "block_ids", *fields)):
            return found
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
        (branch,), parts = branches, PARTS[branches[0].layout]
        views = branch_views(manifest, branch, region)
        data = object.__new__(cls)  # a second validation would double the time
        data.request_id, data.block_ids = manifest.request_id, list(branch.block_ids)
        data._blocks = {
            CACHES[part]: list(views[at :: len(parts)]) or [None] * branch.num_layers
            for at, part in enumerate(parts)
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
        extra = _through_json(metadata.extra, "metadata: extra")[0] if metadata.extra else b""
        return _ABOUT(metadata), extra, None if first is None else first.shape


def _check_names(where: str, required: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise SchemaError unless the dict has these names; it says which similar ones it has."""
    missing = [name for name in required if name not in values]
    if missing:
        others = [str(name) for name in values if name not in required]
        close = {name: difflib.get_close_matches(name, others, 1) for name in missing}
        hints = [f"is {found[0]!r} meant as {name!r}?" for name, found in close.items() if found]
        raise SchemaError("; ".join([f"{where} lacks {', '.join(missing)}", *hints]))


def _complete_layers(
    layer_blocks: LayerBlocks, metadata: KVMetadata
) -> dict[str, list[TensorView | None]]:
    """A private copy of the lists, every layer present and of one shape and dtype."""
    if metadata.layout not in PARTS:
        raise SchemaError(f"layout {metadata.layout!r}; must be one of {', '.join(PARTS)}")
    names = {CACHES[part]: PART_WORDS[part] for part in PARTS[metadata.layout]}
    if not isinstance(layer_blocks, Mapping) or set(layer_blocks) != set(names):
        is_dict = isinstance(layer_blocks, Mapping)
        given = f"has {sorted(map(str, layer_blocks))}" if is_dict else _described(layer_blocks)
        text = f"layer_blocks {'' if is_dict else 'is '}{given}"
        raise SchemaError(f"{text}; layout {metadata.layout} has {list(names)}")
    for name, layers in layer_blocks.items():
        if layers is not None and not isinstance(layers, (Sequence, Iterator)):
            raise SchemaError(
                f"layer_blocks: {name} is {_described(layers)}, wanted a list with one tensor a "
                "layer; list(t) makes one of a tensor t of all layers"
            )
    blocks = {name: list(layer_blocks[name] or ()) for name in names}
    first = next((layer for name in names for layer in blocks[name] if layer is not None), None)
    for name, word in names.items():
        if len(blocks[name]) != metadata.num_layers:
            raise SchemaError(
                f"{word}: {len(blocks[name])} layers, but num_layers is {metadata.num_layers}"
            )
        if first is None:
            continue
        for index, layer in enumerate(blocks[name]):
            where = f"layer {index}, {word}"
            if layer is None:
                raise SchemaError(f"{where} is missing, while other layers are present")
            layer = blocks[name][index] = check_view(layer, where)
            if layer.shape != first.shape or layer.dtype != first.dtype:
                raise SchemaError(
                    f"{where} is {layer.dtype} {list(layer.shape)}; the first tensor of this cache "
                    f"is {first.dtype} {list(first.shape)}, and all must be alike"
                )
    return blocks


def _fit_metadata(metadata: KVMetadata, blocks: dict[str, list[TensorView | None]]) -> KVMetadata:
    """Metadata that agrees with the tensors, its dtype filled in from them if it was left out."""
    first = next(iter(blocks.values()))[0] if metadata.num_layers else None
    if first is None:
        if metadata.seq_len:
            raise SchemaError(f"kv_lens say {metadata.seq_len} tokens, but every layer is None")
        return metadata
    where = f"layer 0, {PART_WORDS[PARTS[metadata.layout][0]]}"
    rank = len(metadata.layout)
    if len(first.shape) != rank or 0 in first.shape:
        raise SchemaError(
            f"{where} is {list(first.shape)}; layout {metadata.layout} has {rank} dimensions, "
            "none of them 0 (an empty cache is given as None)"
        )
    if first.shape[0] != metadata.seq_len:
        raise SchemaError(
            f"{where} has {first.shape[0]} tokens, but kv_lens {list(metadata.kv_lens)} "
            f"say {metadata.seq_len}"
        )
    dtype = dtype_name(first.dtype)
    if dtype not in KV_DTYPES:
        raise SchemaError(
            f"{where}: dtype {first.dtype} is not one of a KV cache ({', '.join(KV_DTYPES)}); "
            "TensorTransferData sends tensors of others"
        )
    if metadata.dtype not in ("", dtype):
        raise SchemaError(f"{where} is {dtype}, but metadata says {metadata.dtype}")
    return dataclasses.replace(metadata, dtype=dtype)


def check_request_id(request_id: str) -> str:
    """Return a request id; SchemaError if peers would refuse it and close the connection."""
    if not isinstance(request_id, str) or not _REQUEST_ID.fullmatch(request_id):
        raise SchemaError(
            "request_id: a string of 1 to 1024 characters, no lone surrogates; "
            f"this is {_described(request_id)}"
        )
    return request_id


def check_reason(reason: str) -> str:
    """Return the reason of a failure; SchemaError if it is no string."""
    if not isinstance(reason, str):
        raise SchemaError(f"reason: a string, this is {_described(reason)}")
    return reason


def _described(value: object) -> str:
    """What was given instead, in one short line."""
    if isinstance(value, (str, int, float, bytes)):
        return f"{value!r:.60}"
    return "None" if value is None else f"a {type(value).__name__}"


def _converted(values: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"metadata: {error}") from None


def json_copy(values: dict[str, Any], where: str) -> dict[str, Any]:
    """A private copy of a JSON object; SchemaError if it does not come back from JSON as it was."""
    return _through_json(values, where)[1]


def _through_json(values: dict[str, Any], where: str) -> tuple[bytes, dict[str, Any]]:
    """The text of a JSON object, and the copy that is read from it; errors as `json_copy`."""
    try:
        text = msgspec.json.encode(values)
        copy = msgspec.json.decode(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"{where} is not JSON: {error}") from None
    if not isinstance(copy, dict) or copy != values:
        raise SchemaError(
            f"{where} changes when written as JSON; use string keys, lists and finite numbers"
        )
    return text, copy
