"""Tensors of messages in shared memory: one copy in, one copy out, then the memory is reused."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.ipc.codec import dtype_of, inline_tensor, read_inline_tensor, tensor_spec
from omni_kvlink.errors import CapacityError, WireError
from omni_kvlink.lowlevel import ArenaPool, Block, Mapping, Region, byte_tensor, is_sealed

if TYPE_CHECKING:
    from collections.abc import Mapping as Values

INLINE_NBYTES = 64 << 10
"""Tensors of fewer bytes are part of the message itself."""
QUOTA_NBYTES = 1 << 30
_MIN_ARENA_NBYTES = 8 << 20
_RESERVE_TIMEOUT = 10.0
"""Seconds to wait until the receiver has freed memory of earlier messages."""


class ShmTensorWriter:
    """Writes tensors into shared memory, up to a quota of bytes, for one process; thread-safe."""

    def __init__(self, quota: int = QUOTA_NBYTES):
        self._retired: list[int] = []
        self._announced: set[int] = set()
        make = partial(Mapping.shared, "kvlink-shm-tensors")
        self._pool = ArenaPool(
            make, quota, self._retired.append, min_arena=min(quota, _MIN_ARENA_NBYTES)
        )

    def write(self, blocks: list[Block], tensor: torch.Tensor) -> dict[str, Any]:
        """Copy a tensor into shared memory, for which it waits up to 10 s; a `WriteTensor`.

        The block that it uses is appended to `blocks`. Small tensors are inlined. Raises
        CapacityError if the receiver has not freed enough of what was sent before.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < INLINE_NBYTES:
            return inline_tensor(tensor)
        try:
            block = self._pool.reserve(nbytes, timeout=_RESERVE_TIMEOUT)
        except CapacityError as error:
            raise CapacityError(
                f"a tensor of {nbytes} bytes in a message: {error.free} are free of the "
                f"{self._pool.quota} that messages to one process may use; send less at once",
                requested=nbytes,
                free=error.free,
            ) from None
        blocks.append(block)
        _tensor_at(self._pool.region(block), tensor.shape, tensor.dtype).copy_(tensor.detach())
        return {**tensor_spec(tensor), "block": list(block)}

    def announce(self, blocks: list[Block]) -> tuple[list[Mapping], list[int], list[int]]:
        """New arenas that the receiver must map for these blocks, their numbers, and retired ones.

        Must be called in the order in which messages are sent.
        """
        new = sorted({block.arena for block in blocks} - self._announced)
        self._announced.update(new)
        retired = [self._retired.pop() for _ in range(len(self._retired))]
        return [self._pool.mapping(number) for number in new], new, retired

    def free(self, blocks: list[Block]) -> None:
        """Reuse blocks that the receiver has read, or that were not sent."""
        for block in blocks:
            self._pool.free(block)

    def close(self) -> None:
        """Release the memory; a `write` that waits raises ClosedError."""
        self._pool.close()


class ShmTensorReader:
    """Reads the tensors that a `ShmTensorWriter` in another process has written; for one thread."""

    def __init__(self) -> None:
        self._arenas: dict[int, Mapping] = {}

    def add_arenas(self, numbers: list[int], descriptors: list[int], retired: list[int]) -> None:
        """Map new arenas of the sender, whose descriptors are owned; unmap the retired ones."""
        for number in retired:
            self._arenas.pop(number, None)
        if len(numbers) != len(descriptors) or not all(map(is_sealed, descriptors)):
            close_all(descriptors)
            raise WireError(f"{len(numbers)} arenas need as many descriptors of sealed memory")
        for number, descriptor in zip(numbers, descriptors, strict=True):
            self._arenas[number] = Mapping.readonly(descriptor, os.fstat(descriptor).st_size)

    def read(self, blocks: list[Block], values: Values[str, Any]) -> torch.Tensor:
        """Copy a tensor out of shared memory; a `ReadTensor`.

        The block that the sender may reuse is appended to `blocks`.
        """
        if "block" not in values:
            return read_inline_tensor(values)
        block = Block(*values["block"])
        if block.arena not in self._arenas:
            raise WireError(f"a tensor in arena {block.arena}, which was not announced")
        blocks.append(block)
        region = self._arenas[block.arena].region.slice(block.offset, block.nbytes)
        tensor = torch.empty(values["shape"], dtype=dtype_of(values))
        return tensor.copy_(_tensor_at(region, tensor.shape, tensor.dtype))


def close_all(descriptors: list[int]) -> None:
    """Close file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _tensor_at(region: Region, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that shares the first bytes of a region."""
    nbytes = shape.numel() * dtype.itemsize
    return byte_tensor(region)[:nbytes].view(dtype).view(shape)
