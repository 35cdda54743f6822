"""`TensorByte`: where a byte of a payload lies: branch, layer, K or V, token, head, dimension."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from omni_kvlink.payload.dtypes import ITEMSIZE
from omni_kvlink.payload.header import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIMENSIONS = {2: ("token", "dim"), 3: ("token", "head", "dim")}


@dataclasses.dataclass(frozen=True)
class TensorByte:
    """Byte `offset` of a tensor."""

    spec: TensorSpec
    offset: int

    @property
    def index(self) -> tuple[int, ...]:
        """The index of its element."""
        return index_of(self.offset // ITEMSIZE[self.spec.dtype], self.spec.shape)

    def element(self) -> str:
        """The element in words: its token, head and dimension, or its index."""
        if is_of_cache(self.spec):
            names = _DIMENSIONS[len(self.spec.shape)]
            pairs = zip(names, self.index, strict=True)
            return ", ".join(f"{name} {position}" for name, position in pairs)
        return f"element {list(self.index)}"

    def to_dict(self) -> dict[str, Any]:
        """Tensor, index of the element, and offset in the tensor, as JSON values."""
        return {"tensor": self.spec.name, "index": list(self.index), "offset": self.offset}


def index_of(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element of a contiguous tensor, by its number."""
    index = list[int]()
    for size in reversed(shape):
        number, position = divmod(number, size)
        index.append(position)
    return tuple(reversed(index))


def is_of_cache(spec: TensorSpec) -> bool:
    """Whether a tensor is K, V or a latent of a cache, not one of a tree."""
    return "/" not in spec.name


def rows_of(spec: TensorSpec, start: int, stop: int) -> str:
    """The tokens of bytes `start` to `stop` of a tensor in words, or the rows of a tree's."""
    if not spec.shape:
        return "its element"
    noun = "token" if is_of_cache(spec) else "row"
    row_nbytes = ITEMSIZE[spec.dtype] * math.prod(spec.shape[1:])
    first, last = start // row_nbytes, (stop - 1) // row_nbytes
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"
