"""Adapter of transformers' `DynamicCache`: 4.50, 4.57 and 5.x.

A layer's K and V are `[batch, kv_heads, tokens, head_dim]`. A layer with a sliding window of w
keeps the last w - 1 of the tokens that it has seen. The number seen determines positions and masks
of later tokens, and is sent with every layer.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import msgspec
import torch

from omni_kvlink.adapters.base import CacheAdapter
from omni_kvlink.adapters.hf_state import check_cache, check_layer
from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.dtypes import DTYPES
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_memory import dtype_name
from omni_kvlink.payload.views import TensorView, dense

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

INSTALL = "pip install 'omni-kvlink[hf]'"
EXTRA = "dynamic_cache"
"""Key of the metadata's `extra` with what `_CacheLayers` holds."""


class DynamicCacheLike(Protocol):
    """transformers' DynamicCache of any version."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> Any:
        """Append to a layer."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that a layer has seen."""


C = TypeVar("C", bound=DynamicCacheLike)


_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class _Empty(msgspec.Struct, frozen=True):
    """K and V without tokens, as a crop of all tokens leaves them; of 0 heads, they have no shape.

    The next K and V must fit to them, and are converted to their dtype if it is the wider one.
    """

    dtype: str
    heads: _Size
    head_dim: _Size

    def tensor(self, batch: int) -> torch.Tensor:
        """K or V in the shape of transformers; SchemaError for an unknown dtype."""
        if self.dtype not in DTYPES:
            raise SchemaError(f"metadata: extra[{EXTRA!r}]: dtype {self.dtype!r} is unknown")
        shape = (batch, self.heads, 0, self.head_dim) if self.heads else (0,)
        return torch.empty(shape, dtype=getattr(torch, self.dtype))


class _CacheLayers(msgspec.Struct, frozen=True, omit_defaults=True):
    """Index in the cache, and tokens seen, of each layer of a branch.

    `recording` are the indices of windows that record their past, which may keep more tokens.
    `empty` is None unless the layers have tensors without tokens.
    """

    layers: list[int]
    seen: list[int]
    recording: list[int] = []
    empty: _Empty | None = None


@dataclasses.dataclass(frozen=True)
class _CacheLayer:
    """One layer of a transformers cache; its `window` is 0 if it keeps all tokens."""

    index: int
    key: torch.Tensor | None
    value: torch.Tensor | None
    window: int = 0
    seen: int = 0
    records: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens that it keeps."""
        return 0 if self.key is None else self.key.shape[2] if self.key.numel() else 0

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that fit into one cache of the schema."""
        return () if self.key is None else (tuple(self.key.shape), self.key.dtype)


class DynamicCacheAdapter(CacheAdapter[DynamicCacheLike]):
    """Converts a `DynamicCache` to and from transfer data, a hybrid one to and from a bundle.

    Padding of left-padded batches is cached and sent, too; send the attention mask along, as in
    `pack(..., extra={"attention_mask": mask.tolist()})`.
    """

    def export(
        self,
        cache: DynamicCacheLike,
        *,
        request_id: str,
        metadata: KVMetadata | Mapping[str, Any] | None = None,
    ) -> KVCacheTransferData:
        """Return the cache as transfer data; layers that keep unequal token counts need `pack`.

        In the metadata, by default, `kv_lens` are the tokens kept for each sequence of the batch,
        `ropes` the tokens seen.

        Raises:
            SchemaError: a layer is missing or differs, is of a kind that holds more than K and V,
                or contradicts the metadata.
        """
        layers = _layers(cache)
        if len(_groups(layers)) > 1:
            raise SchemaError(
                "the layers of this cache keep different numbers of tokens, or differ in shape: "
                f"{[layer.tokens for layer in layers]}; pack() makes a bundle of them"
            )
        return _branch(layers, request_id, metadata)

    def load(self, data: KVCacheTransferData, into: C) -> C:
        """Fill an empty `DynamicCache`, which shares the tensors.

        Received tensors are readonly: `update` copies a layer and releases the payload's one, but
        `cache.reset()` may write to it, which ends the process with SIGSEGV. Make a new cache
        instead, as `DynamicCache(config=model.config)` or `DynamicCache()`.

        Raises:
            SchemaError: another number of layers, not empty, or a layer lacks tokens that this
                cache must keep.
        """
        _load([data], into)
        return into

    def pack(
        self,
        cache: DynamicCacheLike,
        *,
        request_id: str,
        ropes: Sequence[int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> KVCacheTransferData | KVCacheBundle:
        """Return the payload for `put`: a cache, or a bundle with a branch for each kind of layer.

        `ropes` are the next positions of the sequences; if None, the tokens seen. `extra` are JSON
        values, sent with the first branch. Raises SchemaError as `export` does.
        """
        ropes_field: dict[str, Any] = {} if ropes is None else {"ropes": list(ropes)}
        branches = {}
        for number, layers in enumerate(_groups(_layers(cache))):
            metadata = {**ropes_field, "extra": dict(extra or {})} if number == 0 else ropes_field
            branches[f"layers_{layers[0].index}"] = _branch(layers, request_id, metadata)
        return branches.popitem()[1] if len(branches) == 1 else KVCacheBundle(request_id, branches)

    def unpack(
        self, payload: KVCacheTransferData | KVCacheBundle, *, config: Any = None, into: Any = None
    ) -> Any:
        """Return the `DynamicCache` of a payload that `pack` made, in `into` or new; see `load`.

        The model's `config` is required for sliding windows, from transformers 4.56 on.

        Raises:
            UnavailableError: transformers is not installed, and a cache is to be made.
            SchemaError: as `load`.
        """
        if into is None:
            into = make_cache(config)
        if isinstance(payload, KVCacheTransferData):
            payload = KVCacheBundle(payload.request_id, {"layers_0": payload})
        _load([payload[name] for name in payload], into)
        return into


def make_cache(config: Any = None) -> Any:
    """Return an empty `DynamicCache`, with the sliding windows of a model's config.

    Raises UnavailableError if transformers is not installed.
    """
    try:
        kind = importlib.import_module("transformers").DynamicCache
    except ImportError as error:
        raise UnavailableError(f"transformers cannot be loaded: {error}; {INSTALL}") from error
    takes_config = "config" in inspect.signature(kind).parameters
    return kind(config=config) if takes_config and config is not None else kind()


def _groups(layers: Sequence[_CacheLayer]) -> list[list[_CacheLayer]]:
    """Return the layers to send, those of one kind together."""
    if not layers:
        raise SchemaError(
            "the cache has no layers: send it after the first forward pass, or make it as "
            "DynamicCache(config=model.config)"
        )
    missing = [layer.index for layer in layers if not layer.tokens]
    if missing and len(missing) < len(layers):
        raise SchemaError(f"layer {missing[0]}, K is missing, while other layers are there")
    groups: dict[tuple[object, ...], list[_CacheLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.kind, []).append(layer)
    return list(groups.values())


def _layers(cache: Any) -> list[_CacheLayer]:
    """Return the layers of a cache of any version, checked to hold only K and V."""
    check_cache(cache)
    if not hasattr(cache, "layers"):  # 4.50, where a missing layer is [] or an empty tensor
        pairs = zip(cache.key_cache, cache.value_cache, strict=True)
        return [
            _plain(index, *[part if len(part) else None for part in pair])
            for index, pair in enumerate(pairs)
        ]
    return [_layer(index, layer) for index, layer in enumerate(cache.layers)]


def _layer(index: int, layer: Any) -> _CacheLayer:
    check_layer(layer, index)
    plain = _plain(index, layer.keys, layer.values)
    if not hasattr(layer, "sliding_window"):
        return plain
    window, seen = layer.sliding_window, layer.cumulative_length
    records, least = getattr(layer, "record_past", False), min(seen, window - 1)
    if not least <= plain.tokens <= (seen if records else least):
        raise SchemaError(
            f"layer {index} keeps {plain.tokens} tokens; a window of {window} that has seen {seen} "
            f"keeps {least}" + (f" to {seen} while it records its past" if records else "")
        )
    return dataclasses.replace(plain, window=window, seen=seen, records=records)


def _plain(index: int, key: Any, value: Any) -> _CacheLayer:
    """Return K and V of one layer, None if it is not initialized."""
    parts: list[torch.Tensor | None] = []
    for word, part in (("K", key), ("V", value)):
        is_there = isinstance(part, torch.Tensor)
        shape = list(part.shape) if is_there else []
        if is_there and shape != [0] and (len(shape) != 4 or 0 in (*shape[:2], shape[3])):
            raise SchemaError(
                f"layer {index}, {word} is {shape}; wanted [batch, kv_heads, tokens, head_dim], "
                "of which only tokens may be 0"
            )
        parts.append(part.detach() if is_there else None)
    layer = _CacheLayer(index, parts[0], parts[1])
    if not layer.tokens and layer.kind != dataclasses.replace(layer, key=layer.value).kind:
        raise SchemaError(f"layer {index}: V is not there, or of another kind than K")
    return dataclasses.replace(layer, seen=layer.tokens)


def _branch(
    layers: Sequence[_CacheLayer], request_id: str, metadata: KVMetadata | Mapping[str, Any] | None
) -> KVCacheTransferData:
    """Return layers that keep equally many tokens as one cache; copies nothing."""
    parts = [part for layer in layers for part in (layer.key, layer.value) if part is not None]
    batch, heads, tokens, dim = next((x.shape for x in parts if x.dim() == 4), (1, 0, 0, 0))
    lens = (tokens,) * batch
    if not isinstance(metadata, KVMetadata):
        seen = max((layer.seen for layer in layers), default=0)
        defaults = {"kv_lens": lens, "ropes": (seen,) * batch, "num_layers": len(layers)}
        metadata = KVMetadata.from_dict({**defaults, **(metadata or {})})
    if metadata.kv_lens != lens:
        raise SchemaError(f"kv_lens {list(metadata.kv_lens)}, but the cache has {list(lens)}")
    empty = None
    if parts and not tokens:
        empty = _Empty(dtype_name(parts[0].dtype), heads, dim)
    is_plain = [x.index for x in layers] == [*range(len(layers))] and empty is None
    if any(layer.window for layer in layers) or not is_plain:
        recording = [layer.index for layer in layers if layer.records]
        indices, seen_by = [x.index for x in layers], [x.seen for x in layers]
        described = _CacheLayers(indices, seen_by, recording, empty)
        extra = {**metadata.extra, EXTRA: msgspec.to_builtins(described)}
        metadata = dataclasses.replace(metadata, extra=extra)
    table = None
    if tokens:
        table = BlockTable.of_blocks(range(batch), block_size=tokens, tokens=batch * tokens)
    blocks = {
        "key_cache": [_token_view(x.key, table, f"layer {x.index}, K") for x in layers],
        "value_cache": [_token_view(x.value, table, f"layer {x.index}, V") for x in layers],
    }
    return KVCacheTransferData(request_id, blocks, (), metadata)


def _token_view(
    part: torch.Tensor | None, table: BlockTable | None, label: str
) -> TensorView | None:
    """View `[batch, heads, tokens, dim]` as `[batch × tokens, heads, dim]`."""
    if part is None or table is None:
        return None
    if part.shape[0] == 1:
        return part[0].transpose(0, 1)
    return PagedTensor(part.transpose(1, 2), table, label)  # a sequence is a block


def _load(branches: Iterable[KVCacheTransferData], into: Any) -> None:
    """Fill an empty cache; everything is checked before anything is set."""
    layers = [layer for data in branches for layer in _received(data)]
    layers.sort(key=lambda layer: layer.index)
    if [layer.index for layer in layers] != list(range(len(layers))):
        raise SchemaError(f"layers {[layer.index for layer in layers]} make no cache")
    if len({layer.seen for layer in layers}) > 1:
        raise SchemaError(f"layers that have seen {[layer.seen for layer in layers]} tokens")
    mine = _layers(into)
    if mine and len(mine) != len(layers):
        raise SchemaError(f"the target has {len(mine)} layers, the data has {len(layers)}")
    if any(layer.tokens for layer in mine):
        raise SchemaError("the target is not empty; load into a new DynamicCache")
    windows = [layer.window for layer in mine] or [0] * len(layers)
    fitting = [_fit(layer, window) for layer, window in zip(layers, windows, strict=True)]
    recording = [into.layers[x.index] for x in fitting if x.records and x.window]
    if not all(hasattr(layer, "record_past") for layer in recording):
        raise SchemaError("windows that record their past: transformers has them from 5.15 on")
    for layer in recording:
        layer.record_past = True
    for layer in fitting:
        if layer.key is not None and layer.value is not None:
            _set(into, layer.index, layer.key, layer.value, layer.seen)


def _received(data: KVCacheTransferData) -> list[_CacheLayer]:
    """Return the layers of one branch in the shapes of transformers."""
    metadata = data.metadata
    lens = set(metadata.kv_lens)
    if metadata.layout != "NHD" or len(lens) != 1:
        raise SchemaError(
            f"layout {metadata.layout}, kv_lens {list(metadata.kv_lens)}; a DynamicCache has "
            "K and V, and equally many tokens of each sequence"
        )
    count, batch = metadata.num_layers, len(metadata.kv_lens)
    try:
        raw = metadata.extra.get(EXTRA, {"layers": [*range(count)], "seen": [*lens] * count})
        described = msgspec.convert(raw, _CacheLayers)
    except msgspec.ValidationError as error:
        raise SchemaError(f"metadata: extra[{EXTRA!r}]: {error}") from None
    if len(described.layers) != count or len(described.seen) != count:
        raise SchemaError(f"metadata: extra[{EXTRA!r}] does not have {count} layers")
    parts = (data.layer_blocks["key_cache"], data.layer_blocks["value_cache"])
    empty = described.empty
    return [
        _CacheLayer(
            *(index, _shaped(key, batch, empty), _shaped(value, batch, empty)),
            seen=seen,
            records=index in described.recording,
        )
        for index, seen, key, value in zip(described.layers, described.seen, *parts, strict=True)
    ]


def _shaped(view: TensorView | None, batch: int, empty: _Empty | None) -> torch.Tensor | None:
    """View `[batch × tokens, heads, dim]` as `[batch, heads, tokens, dim]`; copies if paged."""
    if view is None:
        return None if empty is None else empty.tensor(batch)
    tokens, heads, dim = view.shape
    return dense(view).view(batch, tokens // batch, heads, dim).transpose(1, 2)


def _fit(layer: _CacheLayer, window: int) -> _CacheLayer:
    """Return what the target's layer keeps of a layer; raise SchemaError if tokens are missing.

    A window that records its past keeps all; its target has the `window` that is returned, too.
    """
    expected = min(layer.seen, window - 1) if window else layer.seen
    if not layer.tokens <= layer.seen or layer.tokens < expected:
        keeps = f"keeps the last {window - 1}" if window else "keeps all"
        raise SchemaError(
            f"layer {layer.index}: {layer.tokens} of {layer.seen} tokens are here, and the target "
            f"{keeps}; make it as DynamicCache(config=model.config), of the sender's model"
        )
    layer = dataclasses.replace(layer, window=window)
    keeps_all = layer.tokens == expected or (layer.records and window)
    if layer.key is None or layer.value is None or keeps_all:
        return layer
    last = slice(layer.tokens - expected, None)
    return dataclasses.replace(layer, key=layer.key[:, :, last], value=layer.value[:, :, last])


def _set(cache: Any, index: int, key: torch.Tensor, value: torch.Tensor, seen: int) -> None:
    """Set a layer that has seen `seen` tokens; an empty `update` initializes it first."""
    shape = (*key.shape[:2], 0, key.shape[3]) if key.dim() == 4 else (1, 1, 0, 1)
    cache.update(key.new_empty(shape), value.new_empty(shape), index)
    if not hasattr(cache, "layers"):
        cache.key_cache[index], cache.value_cache[index] = key, value
        cache._seen_tokens = seen
        return
    layer = cache.layers[index]
    layer.keys, layer.values = key, value
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = seen
