"""A cache that grows in place, in memory allocated for more tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.cache import Layer, NaiveCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class InPlaceCache(NaiveCache):
    """A NaiveCache that writes new rows behind the old ones, in memory allocated in advance.

    `after` returns a new cache: a view of more rows of the same memory. Rows are claimed once and
    never change afterwards, so that every earlier cache keeps its content. A cache that does not
    end where the claimed rows end (another cache was made from it before, or an extension failed)
    is continued in new memory, as every NaiveCache is.

    It is made of contiguous tensors `[capacity, kv_heads, head_dim]` in the model's dtype, one for
    K and one for V of each layer; SchemaError if they do not make a cache.
    """

    def __init__(self, key_cache: Sequence[Tensor], value_cache: Sequence[Tensor]) -> None:
        super().__init__(len(key_cache))
        if len(value_cache) != len(key_cache):
            raise SchemaError(f"K has {len(key_cache)} layers, V {len(value_cache)}")
        self._memory = _RowMemory(list(zip(key_cache, value_cache, strict=True)))
        self._rows = range(0)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the memory."""
        return self._memory.capacity

    def after(self, rows: int) -> NaiveCache:
        """Claim `rows` more rows and return a view of all claimed ones.

        Raises SchemaError if they exceed the capacity; nothing is claimed then.
        """
        start = self.seq_lens
        if start != self._memory.claimed or not self._is_in_place(start):
            return super().after(rows)
        cache = InPlaceCache.__new__(InPlaceCache)
        NaiveCache.__init__(cache, self.num_layers)
        cache._memory, cache._rows = self._memory, self._memory.claim(rows)
        return cache

    def merge(self, layer: int, past: Layer | None, k: Tensor, v: Tensor) -> Layer:
        """Write the new rows behind the past ones."""
        merged = self._memory.write(layer, self._rows, k, v)
        self.key_cache[layer], self.value_cache[layer] = merged
        return merged

    def _is_in_place(self, tokens: int) -> bool:
        """Whether the dicts, which callers may change, still hold this memory's rows."""
        for layer, capacity in enumerate(self._memory.layers):
            pair = self.key_cache[layer], self.value_cache[layer]
            for tensor, target in zip(pair, capacity, strict=True):
                if tensor is None:
                    if tokens:
                        return False
                elif tensor.data_ptr() != target.data_ptr() or tensor.shape[0] != tokens:
                    return False
        return True


class _RowMemory:
    """The rows of all layers, and how many of them are claimed."""

    def __init__(self, layers: list[Layer]) -> None:
        first = layers[0][0] if layers else None
        if first is None or first.ndim != 3:
            raise SchemaError("a cache in place is made of [capacity, kv_heads, head_dim] tensors")
        for layer, pair in enumerate(layers):
            for kind, tensor in zip("KV", pair, strict=True):
                if _form(tensor) != _form(first) or not tensor.is_contiguous():
                    expected = f"{_form(first)} and contiguous"
                    raise SchemaError(f"{kind} of layer {layer} is {_form(tensor)}, not {expected}")
        self.layers, self.capacity, self.claimed = layers, first.shape[0], 0

    def claim(self, rows: int) -> range:
        start, stop = self.claimed, self.claimed + rows
        if stop > self.capacity:
            raise SchemaError(f"the cache has a capacity of {self.capacity} tokens, wanted {stop}")
        self.claimed = stop
        return range(start, stop)

    def write(self, layer: int, rows: range, k: Tensor, v: Tensor) -> Layer:
        for new, capacity in zip((k, v), self.layers[layer], strict=True):
            target = capacity[rows.start : rows.stop]
            if _form(new) != _form(target):  # a copy would convert or repeat it silently
                raise SchemaError(f"layer {layer}: new rows are {_form(new)}, not {_form(target)}")
            target.copy_(new)
        keys, values = self.layers[layer]
        return keys[: rows.stop], values[: rows.stop]


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
