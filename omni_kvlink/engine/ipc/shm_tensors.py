"""Large tensors of messages: one copy into shared memory, one out of it, and the memory again."""

from __future__ import annotations

import os
from collections.abc import Mapping as Values
from functools import partial
from typing import Any

import torch

from omni_kvlink.engine.ipc.codec import dtype_of, form_of, from_inline, inline
from omni_kvlink.errors import CapacityError, WireError
from omni_kvlink.memory.arena import ArenaPool, Block
from omni_kvlink.memory.region import Mapping, Region, is_sealed
from omni_kvlink.payload.dtypes import byte_tensor

SMALL = 64 << 10
"""Bytes up to which a tensor stands in the message itself."""

QUOTA = 1 << 30
_LEAST = 8 << 20
_PATIENCE = 10.0
"""Seconds to wait for the other side to take what was sent before."""


class ShmTensorWriter:
    """Tensors on their way to another process; thread-safe.

    Args:
        quota: bytes that may be on their way at once.
    """

    def __init__(self, quota: int = QUOTA):
        self._retired: list[int] = []
        self._announced: set[int] = set()
        make = partial(Mapping.shared, "kvlink-parcels")
        self._pool = ArenaPool(make, quota, self._retired.append, least=min(quota, _LEAST))

    def stow(self, blocks: list[Block], tensor: torch.Tensor) -> dict[str, Any]:
        """A `Stow` of the codec: THE copy; notes the block that it took.

        Raises:
            CapacityError: the other side has not taken enough of what was sent before.
            ClosedError
        """
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < SMALL:
            return inline(tensor)
        try:
            block = self._pool.reserve(nbytes, timeout=_PATIENCE)
        except CapacityError as error:
            raise CapacityError(
                f"a tensor of {nbytes} bytes in a message: {error.free} are free of the "
                f"{self._pool.quota} that messages to one process may take; send less at once",
                asked=nbytes,
                free=error.free,
            ) from None
        blocks.append(block)
        _view(self._pool.region(block), tensor.shape, tensor.dtype).copy_(tensor.detach())
        return {**form_of(tensor), "block": list(block)}

    def news(self, blocks: list[Block]) -> tuple[list[Mapping], list[int], list[int]]:
        """What the other side must hear before it takes these: arenas, their numbers, those gone.

        In the order in which messages are sent; the caller sees to that.
        """
        fresh = sorted({block.arena for block in blocks} - self._announced)
        self._announced.update(fresh)
        retired = [self._retired.pop() for _ in range(len(self._retired))]
        return [self._pool.mapping(number) for number in fresh], fresh, retired

    def free(self, blocks: list[Block]) -> None:
        """They were taken, or will never be."""
        for block in blocks:
            self._pool.free(block)

    def stats(self) -> dict[str, int]:
        return self._pool.stats()

    def close(self) -> None:
        """No more: the other side is gone."""
        self._pool.close()


class ShmTensorReader:
    """Tensors that come from another process; used by one thread."""

    def __init__(self) -> None:
        self._arenas: dict[int, Mapping] = {}

    def learn(self, numbers: list[int], descriptors: list[int], retired: list[int]) -> None:
        """The sender's arenas; the descriptors are taken over.

        Raises:
            WireError: they do not fit, or are not what a sender of parcels makes.
        """
        for number in retired:
            self._arenas.pop(number, None)
        if len(numbers) != len(descriptors) or not all(map(is_sealed, descriptors)):
            close_all(descriptors)
            raise WireError(f"{len(numbers)} arenas, {len(descriptors)} sealed descriptors wanted")
        for number, descriptor in zip(numbers, descriptors, strict=True):
            nbytes = os.fstat(descriptor).st_size
            self._arenas[number] = Mapping.readonly(descriptor, nbytes)

    def take(self, taken: list[Block], values: Values[str, Any]) -> torch.Tensor:
        """A `Fetch` of the codec: the copy out; notes the block that is free again."""
        if "block" not in values:
            return from_inline(values)
        block = Block(*values["block"])
        if block.arena not in self._arenas:
            raise WireError(f"a tensor in arena {block.arena}, which nobody announced")
        taken.append(block)
        region = self._arenas[block.arena].region.slice(block.offset, block.nbytes)
        tensor = torch.empty(values["shape"], dtype=dtype_of(values))
        return tensor.copy_(_view(region, tensor.shape, tensor.dtype))


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _view(region: Region, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor at the beginning of a region."""
    nbytes = shape.numel() * dtype.itemsize
    return byte_tensor(region)[:nbytes].view(dtype).view(shape)
