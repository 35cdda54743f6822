"""`Block`: a reserved part of an `ArenaPool`, and the objects that own one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias


class Block(NamedTuple):
    """A reserved part of a pool: the arena's number, the offset in it, and the length in bytes.

    In the arena `OUTSIDE` it is a part of the quota, for memory that is not the pool's.
    """

    arena: int
    offset: int
    nbytes: int


Part: TypeAlias = "tuple[int, int, int]"
"""The values of a `Block`. Python's cyclic collector forgets a tuple of numbers, but no `Block`."""
OUTSIDE = -1


class BlockOwner(Protocol):
    """An object that has a block of a pool, or None."""

    block: Part | None


@dataclass(slots=True, eq=False)
class Holder:
    """A `BlockOwner` that is nothing else."""

    block: Part | None = None
