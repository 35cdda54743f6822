"""A cache that grows where it lies, in memory made for more tokens than there are yet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.cache import Layer, NaiveCache


class InPlaceCache(NaiveCache):
    """A NaiveCache whose new rows are written behind the old ones; nothing else is moved.

    What extends it gives is again a cache of its own: a view of more rows of the same room. Rows
    are claimed once and never change after that, so every earlier cache stays what it was. A cache
    that does not end where the claimed rows end (because another one was made from it before, or
    an extension failed half-way) is continued in new memory, as every NaiveCache is.

    Args:
        key_cache: `[capacity, kv_heads, head_dim]` a layer, contiguous, in the model's dtype.
        value_cache: the same.

    Raises:
        SchemaError: they do not make a cache.
    """

    def __init__(self, key_cache: Sequence[Tensor], value_cache: Sequence[Tensor]) -> None:
        super().__init__(len(key_cache))
        if len(value_cache) != len(key_cache):
            raise SchemaError(f"K has {len(key_cache)} layers, V {len(value_cache)}")
        self._room = _Room(list(zip(key_cache, value_cache, strict=True)))
        self._rows = range(0)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self._room.capacity

    def after(self, rows: int) -> NaiveCache:
        """A view of the claimed rows and so many more, which are claimed with this.

        Raises:
            SchemaError: more than the capacity; nothing was claimed.
        """
        start = self.seq_lens
        if start != self._room.claimed or not self._lies_in_room(start):
            return super().after(rows)
        cache = InPlaceCache.__new__(InPlaceCache)
        NaiveCache.__init__(cache, self.num_layers)
        cache._room, cache._rows = self._room, self._room.claim(rows)
        return cache

    def merge(self, layer: int, past: Layer | None, k: Tensor, v: Tensor) -> Layer:
        """Writes the new rows behind the past ones, which are there already."""
        merged = self._room.write(layer, self._rows, k, v)
        self.key_cache[layer], self.value_cache[layer] = merged
        return merged

    def _lies_in_room(self, tokens: int) -> bool:
        """Whether the dicts, which anybody may write to, still hold the room's rows."""
        for layer, capacity in enumerate(self._room.layers):
            found = self.key_cache[layer], self.value_cache[layer]
            for tensor, place in zip(found, capacity, strict=True):
                if tensor is None:
                    if tokens:
                        return False
                elif tensor.data_ptr() != place.data_ptr() or tensor.shape[0] != tokens:
                    return False
        return True


class _Room:
    """The rows of all layers, and how many of them are claimed."""

    def __init__(self, layers: list[Layer]) -> None:
        first = layers[0][0] if layers else None
        if first is None or first.ndim != 3:
            raise SchemaError("a cache in place is made of [capacity, kv_heads, head_dim] tensors")
        for layer, pair in enumerate(layers):
            for kind, tensor in zip("KV", pair, strict=True):
                if _form(tensor) != _form(first) or not tensor.is_contiguous():
                    raise SchemaError(
                        f"{kind} of layer {layer} is {_form(tensor)}, "
                        f"wanted {_form(first)} and contiguous"
                    )
        self.layers, self.capacity, self.claimed = layers, first.shape[0], 0

    def claim(self, rows: int) -> range:
        start, stop = self.claimed, self.claimed + rows
        if stop > self.capacity:
            raise SchemaError(f"the cache has a capacity of {self.capacity} tokens, wanted {stop}")
        self.claimed = stop
        return range(start, stop)

    def write(self, layer: int, rows: range, k: Tensor, v: Tensor) -> Layer:
        for new, capacity in zip((k, v), self.layers[layer], strict=True):
            place = capacity[rows.start : rows.stop]
            if _form(new) != _form(place):  # a copy would widen, round or repeat it in silence
                raise SchemaError(f"layer {layer}: new rows are {_form(new)}, not {_form(place)}")
            place.copy_(new)
        keys, values = self.layers[layer]
        return keys[: rows.stop], values[: rows.stop]


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
