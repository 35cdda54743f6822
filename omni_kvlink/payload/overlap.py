"""Whether tensors that will be written share memory, decided exactly and without reading them.

A tensor covers runs of contiguous bytes, which begin at sums of multiples of its strides.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.paged import Index, PagedTensor
from omni_kvlink.payload.tensor_memory import address_of, extent_of
from omni_kvlink.payload.views import check_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView, Views


class Pattern(NamedTuple):
    """Runs of contiguous bytes; `dims` are stride in bytes and size, the largest first.

    `extent` is the bytes from the first to the end of the last run.
    """

    dims: tuple[tuple[int, int], ...]
    extent: int


class Covered(NamedTuple):
    """The memory of a tensor, or of a part of it: in bytes, `whole` at `start` covers all of it.

    If there are `entries`, exactly `entry` at each of them does.
    """

    start: int
    whole: Pattern
    entries: Callable[[], Index] | None = None
    entry: Pattern = Pattern((), 0)

    @property
    def stop(self) -> int:
        """The first byte behind `whole`."""
        return self.start + self.whole.extent

    def starts(self) -> tuple[Index, Pattern]:
        """Return the start of each part, in ascending order, and the part."""
        if self.entries is None:
            return np.array([self.start]), self.whole
        return np.sort(self.start + self.entries()), self.entry


def check_targets(views: Views, manifest: Manifest, region: Region) -> list[TensorView]:
    """Return views as of `check_fit`, if each byte of them is written at most once.

    SchemaError if one shares memory with another one or with the payload, or two elements of one.
    """
    views = check_fit(views, manifest, region)
    for view, spec in zip(views, manifest.tensors, strict=True):
        memory = view.pool if isinstance(view, PagedTensor) else view
        start = address_of(memory, spec.where, writing=True)
        end = region.address + region.nbytes
        is_near = memory.is_cpu or region.device != "cpu"  # a device's addresses are its own
        if is_near and start < end and region.address < start + extent_of(memory):
            raise SchemaError(f"{spec.where()}: the target lies in the payload itself")
    check_distinct(views, lambda number: manifest.tensors[number].where())
    return views


def check_distinct(views: Views, name: Callable[[int], str]) -> None:
    """Raise SchemaError if two of the views, or two elements of one, share memory.

    It names those numbers; a view whose strides alone do not rule it out overlaps itself.
    """
    if _are_apart(views):
        return
    for number, view in enumerate(views):
        memory = view.pool if isinstance(view, PagedTensor) else view
        if _overlaps_itself(memory):
            strides = memory.stride()
            raise SchemaError(f"{name(number)}: a target with strides {strides} overlaps itself")
    if pair := find_overlap(views):
        one, other = map(name, pair)
        raise SchemaError(f"the targets of {one} and of {other} share memory; give each its own")


def find_overlap(views: Views) -> tuple[int, int] | None:
    """The numbers of two views that share a byte, or None; of none may two elements share one."""
    open_ones: list[tuple[torch.device, int, Covered]] = []
    for device, number, covered in sorted(_all_covered(views), key=lambda each: each[2].start):
        still_open = []
        for other in open_ones:
            if other[2].stop <= covered.start:
                continue
            still_open.append(other)
            if other[0] == device and other[1] != number and _share(other[2], covered):
                first, second = sorted((other[1], number))
                return first, second
        still_open.append((device, number, covered))
        open_ones = still_open
    return None


def _are_apart(views: Views) -> bool:
    """Whether the views or their pools are dense, each in memory of its own: the usual case."""
    spans = []
    for view in views:
        memory = view.pool if isinstance(view, PagedTensor) else view
        if not memory.is_contiguous():
            return False
        spans.append((_start(memory), memory.nbytes))
    spans.sort()
    return all(start + nbytes <= other for (start, nbytes), (other, _) in pairwise(spans))


def _start(target: torch.Tensor) -> int:
    return address_of(target, "a target", writing=True)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 1
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(side for side in sides if side[1] > 1):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def _all_covered(views: Views) -> Iterator[tuple[torch.device, int, Covered]]:
    for number, view in enumerate(views):
        if isinstance(view, PagedTensor):
            for covered in _of_paged(view):
                yield view.device, number, covered
        elif view.nbytes:
            yield view.device, number, Covered(_start(view), _pattern_of(view))


def _of_paged(view: PagedTensor) -> list[Covered]:
    """The whole blocks and the tokens of the last block, or all slots."""
    pool, table, size = view.pool, view.block_table, view.block_table.block_size
    start, index, whole = _start(pool), table.index, _pattern_of(pool)
    to_block, to_slot = (pool.stride(dim) * pool.element_size() for dim in (0, 1))
    if table.by_slot:
        slots = lambda: index // size * to_block + index % size * to_slot  # noqa: E731
        return [Covered(start, whole, slots, _pattern_of(pool[0, 0]))]
    full, found = table.tokens // size, list[Covered]()
    if full:
        found.append(Covered(start, whole, lambda: index[:full] * to_block, _pattern_of(pool[0])))
    if rest := table.tokens - full * size:
        found.append(
            Covered(start, whole, lambda: index[full:] * to_block, _pattern_of(pool[0, :rest]))
        )
    return found


def _pattern_of(tensor: torch.Tensor) -> Pattern:
    """The pattern of a tensor with elements, with as few dimensions as possible."""
    if tensor.is_contiguous():
        return Pattern((), tensor.nbytes)
    run = itemsize = tensor.element_size()
    dims = list[tuple[int, int]]()  # the smallest stride first
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride * itemsize, size) for stride, size in sides if size > 1):
        if stride == run and not dims:
            run *= size
        elif dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0], dims[-1][1] * size
        else:
            dims.append((stride, size))
    extent = run + sum(stride * (size - 1) for stride, size in dims)
    return Pattern(tuple(reversed(dims)), extent)


def _share(a: Covered, b: Covered) -> bool:
    if not _meet(b.start - a.start, a.whole, b.whole):
        return False
    if a.entries is None and b.entries is None:
        return True
    (starts, one), (others, other) = a.starts(), b.starts()
    # The parts of b that begin before one of a ends, and end behind its start.
    first = np.searchsorted(others, starts - other.extent, side="right")
    count = np.searchsorted(others, starts + one.extent, side="left") - first
    before = np.cumsum(count) - count
    near = np.arange(count.sum()) + np.repeat(first - before, count)
    distances = np.unique(others[near] - np.repeat(starts, count))
    return any(_meet(distance, one, other) for distance in distances.tolist())


def _meet(distance: int, a: Pattern, b: Pattern) -> bool:
    """Whether a byte of `b`, `distance` bytes after `a`, is one of `a`."""
    if not -b[1] < distance < a[1]:
        return False
    if not a[0] and not b[0]:
        return True
    # How often the largest stride fits between the two, and the same for what is left.
    stride = max(dims[0][0] for dims in (a[0], b[0]) if dims)
    (steps_a, a), (steps_b, b) = _without(a, stride), _without(b, stride)
    if a[1] <= distance % stride <= stride - b[1]:
        return False  # as for K and V that alternate in memory
    least = max(-steps_b, -((a[1] - 1 - distance) // stride))
    most = min(steps_a, (distance + b[1] - 1) // stride)
    return any(_meet(distance - step * stride, a, b) for step in range(least, most + 1))


def _without(pattern: Pattern, stride: int) -> tuple[int, Pattern]:
    """The number of steps of this stride, and the pattern without them."""
    dims, extent = pattern
    if not dims or dims[0][0] != stride:
        return 0, pattern
    steps = dims[0][1] - 1
    return steps, Pattern(dims[1:], extent - steps * stride)
