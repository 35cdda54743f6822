"""The device of an engine's KV pools, and the order of copies and of forward passes on it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.lowlevel import Copier, StreamEvents

log = logging.getLogger(f"vllm.{__name__}")


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
        """Record what the calling thread's current stream holds now; None in host memory.

        Another thread's copies can follow it: it has current streams of its own.
        """
        return self._copier.record(self._pools[:1]) if self.is_async else None


def is_on_device(pool: torch.Tensor) -> bool:
    """Whether a pool is in the memory of a device."""
    return not pool.is_cpu


def name_of(pool: torch.Tensor) -> str:
    """The name of a pool's device, such as "cuda:0"."""
    return str(pool.device)


def link_options(options: Mapping[str, Any], pools: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Options of a link, with the pools' device for `"device": "auto"`; none in host memory."""
    values = dict(options)
    if values.get("device") == "auto":
        names = {name_of(pool) for pool in pools if is_on_device(pool)}
        values["device"] = names.pop() if len(names) == 1 else ""
    return values


def log_path(link: KVProducer | KVConsumer, options: Mapping[str, Any]) -> None:
    """Log where the payloads of a link lie, if its options name a device."""
    if options.get("device"):
        stats = link.stats()
        path, reason = stats["device_path"], stats["device_path_reason"]
        log.info("%s: device path %r: %s", link.url, path, reason)
