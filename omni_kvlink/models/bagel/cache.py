"""The KV cache of a BAGEL request, and the three contexts that one image is made from."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, device, dtype

from omni_kvlink.errors import SchemaError

Layer: TypeAlias = tuple[Tensor, Tensor]
"""K and V of a layer, each `[tokens, kv_heads, head_dim]`."""


class LayerCache(Protocol):
    """Anything with keys and values by layer, as dicts or as lists, is a cache to this model."""

    @property
    def key_cache(self) -> Mapping[int, Tensor | None] | Sequence[Tensor | None]: ...

    @property
    def value_cache(self) -> Mapping[int, Tensor | None] | Sequence[Tensor | None]: ...


class NaiveCache:
    """Keys and values by layer: `{layer: [tokens, kv_heads, head_dim] or None}`.

    K is stored after qk-norm and RoPE, V as projected, both in the model's dtype. An update puts a
    new merged tensor in the dict and never writes into an old one, so tensors may be shared between
    caches and may be views of read-only memory.
    """

    def __init__(self, num_layers: int) -> None:
        self.key_cache: MutableMapping[int, Tensor | None] = dict.fromkeys(range(num_layers))
        self.value_cache: MutableMapping[int, Tensor | None] = dict.fromkeys(range(num_layers))

    @property
    def num_layers(self) -> int:
        return len(self.key_cache)

    @property
    def seq_lens(self) -> int:
        """Cached tokens."""
        keys = self.key_cache.get(0)
        return 0 if keys is None else keys.shape[0]

    def after(self, rows: int) -> NaiveCache:
        """The cache that this one and so many new rows are to be merged into."""
        return NaiveCache(self.num_layers)

    def merge(self, layer: int, past: Layer | None, k: Tensor, v: Tensor) -> Layer:
        """Keeps, and returns, the past of a layer with its new rows behind it."""
        self.key_cache[layer], self.value_cache[layer] = merged = joined(past, k, v)
        return merged

    def snapshot(self) -> NaiveCache:
        """A cache that later updates of this one do not reach. Copies no tensor."""
        return snapshot(self)


class ElsewhereCache:
    """A guidance branch's cache on a rank that another one computes this branch for.

    Raises:
        SchemaError: of whoever reads it.
    """

    def __init__(self, branch: str) -> None:
        self._branch = branch

    @property
    def key_cache(self) -> Mapping[int, Tensor | None]:
        raise SchemaError(f"the KV of branch {self._branch!r} is on another guidance rank")

    value_cache = key_cache


@dataclass
class BagelContext:
    """One cache with its length and its next position.

    Attributes:
        kv_lens: cached tokens, one entry.
        ropes: next position, one entry. An image adds many tokens and one position a block, so it
            is smaller than `kv_lens` as soon as an image is in the context.
        past_key_values: the cache; a `NaiveCache` unless it came from elsewhere.
    """

    kv_lens: list[int]
    ropes: list[int]
    past_key_values: LayerCache

    @classmethod
    def empty(cls, num_layers: int) -> BagelContext:
        return cls([0], [0], NaiveCache(num_layers))

    @classmethod
    def elsewhere(cls, branch: str) -> BagelContext:
        """In the place of one that another guidance rank has."""
        return cls([0], [0], ElsewhereCache(branch))

    def snapshot(self) -> BagelContext:
        """A context that later updates of this one do not reach. Copies no tensor."""
        past = self.past_key_values
        cache = past.snapshot() if isinstance(past, NaiveCache) else snapshot(past)
        return BagelContext(list(self.kv_lens), list(self.ropes), cache)

    def moved(self, into: NaiveCache) -> BagelContext:
        """The same context with its rows in another, empty cache."""
        cache = into.after(self.kv_lens[0])
        for layer in range(cache.num_layers):
            pair = layer_tensors(self.past_key_values, layer)
            if pair is not None:
                cache.merge(layer, None, *pair)
        return BagelContext(list(self.kv_lens), list(self.ropes), cache)


@dataclass
class BagelContexts:
    """All that a request's image is made from: what the AR stage hands to the DiT stage.

    Attributes:
        gen: the whole prompt.
        cfg_text: an earlier snapshot of `gen`, without the last text: always a prefix of it.
        cfg_img: the texts without the images; the same as `gen` for plain text-to-image.
        image_shape: height and width in pixels, or None where no image is asked for.
        text: what the model wrote in think mode, otherwise None.
        extra: what came with them from another stage, as JSON values.
    """

    gen: BagelContext
    cfg_text: BagelContext
    cfg_img: BagelContext
    image_shape: tuple[int, int] | None = None
    text: str | None = field(default=None)
    extra: dict[str, Any] = field(default_factory=dict)


def snapshot(of: LayerCache) -> NaiveCache:
    """A cache with the same tensors."""
    cache = NaiveCache(len(of.key_cache))
    for layer in range(cache.num_layers):
        cache.key_cache[layer] = of.key_cache[layer]
        cache.value_cache[layer] = of.value_cache[layer]
    return cache


def joined(past: Layer | None, k: Tensor, v: Tensor) -> Layer:
    """New rows of K and V behind the past ones, in new tensors."""
    return (k, v) if past is None else (torch.cat([past[0], k]), torch.cat([past[1], v]))


def layer_tensors(cache: LayerCache, layer: int) -> Layer | None:
    """K and V of a layer, or None where the cache is empty."""
    keys, values = cache.key_cache[layer], cache.value_cache[layer]
    return None if keys is None or values is None else (keys, values)


def check_context(
    name: str,
    context: BagelContext,
    *,
    num_layers: int,
    heads: int,
    head_dim: int,
    dtype: dtype,
    device: device,
) -> None:
    """Raises SchemaError unless the context is complete and fits the model.

    A partial cache would still give an image, only another one; so nothing is guessed here.
    """
    if len(context.kv_lens) != 1 or len(context.ropes) != 1:
        raise SchemaError(f"{name}: kv_lens and ropes must have one entry each (one request)")
    tokens, cache = context.kv_lens[0], context.past_key_values
    if tokens < 0 or context.ropes[0] < 0:
        raise SchemaError(f"{name}: kv_lens {context.kv_lens} and ropes {context.ropes}")
    for kind, layers in (("K", cache.key_cache), ("V", cache.value_cache)):
        if len(layers) != num_layers:
            raise SchemaError(f"{name}: {kind} has {len(layers)} layers, the model {num_layers}")
        for layer in range(num_layers):
            tensor, where = _layer(layers, layer), f"{name}: {kind} of layer {layer}"
            if tensor is None:
                if tokens:
                    raise SchemaError(f"{where} is missing, kv_lens says {tokens} tokens")
                continue
            wanted = (tokens, heads, head_dim)
            if tuple(tensor.shape) != wanted:
                raise SchemaError(f"{where} has shape {tuple(tensor.shape)}, wanted {wanted}")
            if tensor.dtype != dtype:
                raise SchemaError(f"{where} is {tensor.dtype}, the model computes in {dtype}")
            if tensor.device != device:
                raise SchemaError(f"{where} is on {tensor.device}, the model is on {device}")


def _layer(layers: Mapping[int, Tensor | None] | Sequence[Tensor | None], at: int) -> Tensor | None:
    # A dict with the right number of layers may still number them differently.
    try:
        return layers[at]
    except KeyError:
        raise SchemaError(f"no layer {at} among {list(layers)}") from None
