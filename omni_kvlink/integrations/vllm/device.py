"""The device of an engine's KV pools, and the order of copies and of forward passes on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from omni_kvlink import KVProducer
    from omni_kvlink.lowlevel import Copier, StreamEvents


class PoolDevice:
    """The device of an engine's pools; no method waits for it.

    `copier` copies their blocks, or is the link that does.

    Attributes:
        is_async: whether copies run by themselves. Copies of blocks in host memory have ended when
            the call that makes them returns.
    """

    def __init__(self, pools: Iterable[torch.Tensor], copier: Copier | KVProducer):
        self._pools = [pool for pool in pools if is_on_device(pool)]
        self.is_async = bool(self._pools)
        self._copier = copier
        self.record()  # the first one sets up the device, which allocates on it

    def record(self) -> StreamEvents | None:
        """What the calling thread's current stream holds now; None in host memory.

        Another thread's copies can follow it: it has current streams of its own.
        """
        return self._copier.record(self._pools[:1]) if self.is_async else None


def is_on_device(pool: torch.Tensor) -> bool:
    """Whether a pool is in the memory of a device."""
    return not pool.is_cpu
