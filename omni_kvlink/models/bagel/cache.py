"""The KV cache of a BAGEL request, and the three contexts that one image is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.hidden_states import HiddenStates
from omni_kvlink.models.bagel.images import shape_pair

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

Layer: TypeAlias = tuple[Tensor, Tensor]
"""K and V of a layer, each `[tokens, kv_heads, head_dim]`."""


Layers: TypeAlias = "Mapping[int, Tensor | None] | Sequence[Tensor | None]"


class LayerCache(Protocol):
    """Keys and values by layer, as dicts or as lists: what the model reads as a cache."""

    @property
    def key_cache(self) -> Layers:
        """K of each layer, or None."""

    @property
    def value_cache(self) -> Layers:
        """V of each layer, or None."""


class NaiveCache:
    """Keys and values by layer: `{layer: [tokens, kv_heads, head_dim] or None}`.

    K is stored after qk-norm and RoPE, V as projected, both in the model's dtype. An update puts a
    new merged tensor into the dict and never writes into an old one, so that caches may share
    tensors, and tensors may be views of readonly memory.
    """

    def __init__(self, num_layers: int) -> None:
        self.key_cache: MutableMapping[int, Tensor | None] = dict.fromkeys(range(num_layers))
        self.value_cache: MutableMapping[int, Tensor | None] = dict.fromkeys(range(num_layers))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.key_cache)

    @property
    def seq_lens(self) -> int:
        """Number of cached tokens."""
        keys = self.key_cache.get(0)
        return 0 if keys is None else keys.shape[0]

    def after(self, rows: int) -> NaiveCache:
        """Return the cache that this one and `rows` new rows are to be merged into."""
        return NaiveCache(self.num_layers)

    def merge(self, layer: int, past: Layer | None, k: Tensor, v: Tensor) -> Layer:
        """Store, and return, the past of a layer followed by its new rows."""
        self.key_cache[layer], self.value_cache[layer] = merged = joined(past, k, v)
        return merged

    def with_cached(self, token_ids: Sequence[int]) -> NaiveCache:
        """Return the cache with those of the next tokens of a text whose rows it has already."""
        return self

    def snapshot(self) -> NaiveCache:
        """Return a cache that later updates of this one do not change. Copies no tensor."""
        return snapshot(self)


class ElsewhereCache:
    """Stands for a guidance branch's cache that is on another rank, which computes the branch."""

    def __init__(self, branch: str) -> None:
        self._branch = branch

    @property
    def key_cache(self) -> Mapping[int, Tensor | None]:
        """Raise SchemaError."""
        raise SchemaError(f"the KV of branch {self._branch!r} is on another guidance rank")

    value_cache = key_cache


@dataclass
class BagelContext:
    """A cache (a `NaiveCache` unless another stage made it), its length and its next position.

    `kv_lens` and `ropes` have one entry each. An image block has many tokens and one position, so
    `ropes` is smaller than `kv_lens` once the context has an image. `hidden` keeps the hidden
    states of its tokens, if it is to: a snapshot keeps none.
    """

    kv_lens: list[int]
    ropes: list[int]
    past_key_values: LayerCache
    hidden: HiddenStates | None = None

    @classmethod
    def empty(cls, num_layers: int) -> BagelContext:
        """Return a context without tokens."""
        return cls([0], [0], NaiveCache(num_layers))

    @classmethod
    def elsewhere(cls, branch: str) -> BagelContext:
        """Return the placeholder of a context that is on another guidance rank."""
        return cls([0], [0], ElsewhereCache(branch))

    def snapshot(self) -> BagelContext:
        """Return a context that later updates of this one do not change. Copies no tensor."""
        past = self.past_key_values
        cache = past.snapshot() if isinstance(past, NaiveCache) else snapshot(past)
        return BagelContext(list(self.kv_lens), list(self.ropes), cache)

    def longer(self, tokens: int, positions: int) -> BagelContext:
        """Return what it will be after so many more; its cache lacks their K and V yet."""
        lens, ropes = [self.kv_lens[0] + tokens], [self.ropes[0] + positions]
        return BagelContext(lens, ropes, self.past_key_values)

    def moved(self, into: NaiveCache) -> BagelContext:
        """Copy the rows into another, empty cache and return the context with it."""
        cache = into.after(self.kv_lens[0])
        for layer in range(cache.num_layers):
            pair = layer_tensors(self.past_key_values, layer)
            if pair is not None:
                cache.merge(layer, None, *pair)
        return BagelContext(list(self.kv_lens), list(self.ropes), cache)


@dataclass
class BagelContexts:
    """The contexts that a request's image is made from: the AR stage sends them to the DiT stage.

    Attributes:
        gen: the whole prompt.
        cfg_text: an earlier snapshot of `gen`, without the last text; always a prefix of it.
        cfg_img: the texts without the images; the same as `gen` for plain text-to-image.
        image_shape: height and width in pixels, or None if no image is to be made. A list becomes a
            tuple; what is not two integers is a SchemaError.
        text: the model's text in think mode, otherwise None.
        extra: JSON values that another stage sent along.
    """

    gen: BagelContext
    cfg_text: BagelContext
    cfg_img: BagelContext
    image_shape: tuple[int, int] | None = None
    text: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.image_shape is not None:
            self.image_shape = shape_pair(self.image_shape)


def snapshot(source: LayerCache) -> NaiveCache:
    """Return a cache with the same tensors."""
    layers, cache = range(len(source.key_cache)), NaiveCache(0)
    cache.key_cache = {layer: source.key_cache[layer] for layer in layers}
    cache.value_cache = {layer: source.value_cache[layer] for layer in layers}
    return cache


def joined(past: Layer | None, k: Tensor, v: Tensor) -> Layer:
    """Concatenate new rows of K and V to the past ones, in new tensors."""
    return (k, v) if past is None else (torch.cat([past[0], k]), torch.cat([past[1], v]))


def layer_tensors(cache: LayerCache, layer: int) -> Layer | None:
    """Return K and V of a layer, or None if the cache is empty."""
    keys, values = cache.key_cache[layer], cache.value_cache[layer]
    return None if keys is None or values is None else (keys, values)
