"""Sequence parallelism: the rows of the denoised image are divided among ranks.

A rank has a run of the rows (marker, latent rows, marker) between the layers. In attention its rows
meet all others in one of two ways, or both: Ulysses ranks exchange rows for heads, so that each has
all rows of a part of the heads; the ranks of a ring pass their K and V around.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from omni_kvlink.models.bagel.attention import (
    DenseAttention,
    PartialAttention,
    attend,
    attend_each,
)
from omni_kvlink.models.bagel.cache import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.models.bagel.cache import Layer

_KV = 2  # K and V are sent as one tensor


class RowCollectives(Protocol):
    """Collectives of the ranks of a `SequenceSplit`, all of which call them in the same order."""

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Send `pieces[i]` to Ulysses rank i; return what each sends, of these shapes."""

    def shift(self, block: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        """Start to send a block to the next rank of the ring; returns at once.

        The returned call waits for the block of the rank before, which has this shape.
        """

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate the rows of all ranks; rank i has `counts[i]`."""


@dataclass(frozen=True)
class SequenceSplit:
    """One rank of those that divide an image's rows; `ulysses` varies faster than `ring`.

    Attributes:
        ulysses: index among the ranks that exchange rows for heads.
        ulysses_degree: their number.
        ring: index among the ranks that pass K and V around.
        ring_degree: their number.
        collectives: reaches the other ranks; None for one rank.
    """

    ulysses: int = 0
    ulysses_degree: int = 1
    ring: int = 0
    ring_degree: int = 1
    collectives: RowCollectives | None = None

    @property
    def degree(self) -> int:
        """The number of ranks that divide the rows."""
        return self.ulysses_degree * self.ring_degree

    def check(self, heads: int, kv_heads: int) -> None:
        """Raise ValueError unless the heads of a tensor rank can be divided by Ulysses."""
        degree = self.ulysses_degree
        if heads % degree or (kv_heads % degree and degree % kv_heads):
            raise ValueError(
                f"{heads} heads and {kv_heads} KV heads of a tensor rank on {degree} Ulysses ranks:"
                " choose a ulysses_degree that divides both, or a multiple of the KV heads"
            )

    def rows(self, count: int) -> slice:
        """This rank's rows among `count`: as many as every other rank's, or one more or less."""
        return self._rows_of(self.ring * self.ulysses_degree + self.ulysses, count)

    def heads(self, count: int, ulysses: int | None = None) -> slice:
        """The part of a tensor rank's heads that a Ulysses rank, or this one, attends with.

        Ranks share a KV head if there are fewer heads than ranks.
        """
        start = (self.ulysses if ulysses is None else ulysses) * count // self.ulysses_degree
        return slice(start, start + max(1, count // self.ulysses_degree))

    def gather(self, rows: Tensor, count: int) -> Tensor:
        """Return all `count` rows, of which `rows` are this rank's; the same bits on all ranks."""
        if self.collectives is None:
            return rows
        counts = [_length(self._rows_of(i, count)) for i in range(self.degree)]
        return self.collectives.gather_rows(rows, counts)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pasts: Sequence[Layer | None],
        count: int,
        dense: DenseAttention = attend,
    ) -> Tensor:
        """Attention of this rank's rows over each sequence's past and all `count` rows.

        q [n, batch, heads, dim] and k, v of the rank's rows, with all heads of the tensor rank; a
        past has all of its KV heads, or this rank's part. Returns [n, batch, heads * dim]. A ring
        computes by itself, and does not use `dense`.
        """
        ring = range(self.ring * self.ulysses_degree, (self.ring + 1) * self.ulysses_degree)
        counts = [_length(self._rows_of(i, count)) for i in ring]
        pasts = [past and self._own_heads(past, k.shape[-2]) for past in pasts]
        if self.ulysses_degree > 1:
            q, k, v = self._rows_for_heads(q, k, v, counts)
        if self.ring_degree == 1:
            out = attend_each(q, k, v, [partial(joined, past) for past in pasts], dense)
        else:
            out = self._around_the_ring(q, k, v, pasts, count)
        return out if self.ulysses_degree == 1 else self._heads_for_rows(out, q.shape[-1], counts)

    def _own_heads(self, past: Layer, count: int) -> Layer:
        """This rank's part of a past that has all `count` KV heads; any other has no more."""
        heads = self.heads(count)
        key, value = past
        return (key[:, heads], value[:, heads]) if key.shape[1] == count else past

    def _rows_of(self, index: int, count: int) -> slice:
        return slice(index * count // self.degree, (index + 1) * count // self.degree)

    def _rows_for_heads(
        self, q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange own rows of all heads for the rows of all Ulysses ranks of own heads."""
        assert self.collectives is not None
        pieces = []
        for rank in range(self.ulysses_degree):
            parts = (t[..., self.heads(t.shape[-2], rank), :] for t in (q, k, v))
            pieces.append(torch.cat(list(parts), dim=-2))
        row = pieces[0].shape[1:]
        rows = torch.cat(self.collectives.all_to_all(pieces, [(n, *row) for n in counts]))
        kv_heads = _length(self.heads(k.shape[-2]))
        sizes = [rows.shape[-2] - _KV * kv_heads, kv_heads, kv_heads]
        own_q, own_k, own_v = rows.split(sizes, dim=-2)
        return own_q, own_k, own_v

    def _heads_for_rows(self, out: Tensor, dim: int, counts: Sequence[int]) -> Tensor:
        """The inverse, for the result [rows, batch, own heads * dim]: [own rows, batch, …]."""
        assert self.collectives is not None
        shape = (counts[self.ulysses], *out.shape[1:])
        pieces = self.collectives.all_to_all(out.split(list(counts)), [shape] * self.ulysses_degree)
        return torch.cat(pieces, dim=-1)

    def _around_the_ring(
        self, q: Tensor, k: Tensor, v: Tensor, pasts: Sequence[Layer | None], count: int
    ) -> Tensor:
        """Attend to the past and to the block of each rank, which comes from the rank before."""
        assert self.collectives is not None
        partials = [PartialAttention(q[:, i]) for i in range(q.shape[1])]
        for attention, past in zip(partials, pasts, strict=True):
            if past is not None:
                attention.add(*past)
        block = torch.stack([k, v])
        for step in range(self.ring_degree):
            arrived = None
            if step + 1 < self.ring_degree:
                sender = (self.ring - step - 1) % self.ring_degree
                ranks = sender * self.ulysses_degree, (sender + 1) * self.ulysses_degree
                rows = _length(slice(*(rank * count // self.degree for rank in ranks)))
                arrived = self.collectives.shift(block, (_KV, rows, *block.shape[2:]))
            for i, attention in enumerate(partials):
                attention.add(block[0, :, i], block[1, :, i])
            if arrived is not None:
                block = arrived()
        return torch.stack([attention.result(q.dtype) for attention in partials], dim=1)


ALL_ROWS = SequenceSplit()


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length
