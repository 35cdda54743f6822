"""The processor time of single puts: among few live payloads and many, and of many tensors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from omni_kvlink.bench.pipelined import PATIENCE, TTL, key_of, payload_of
from omni_kvlink.bench.stats import Summary
from omni_kvlink.payload.schema import KVCacheTransferData

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink import KVProducer
    from omni_kvlink.payload.bundle import Payload

RUN, CACHES = -1, -2
"""The numbers of these runs, which name their payloads."""
LAYERS, SHAPE = 28, (1, 2, 128)
NUM_TENSORS = 2 * LAYERS
"""K and V of each layer, of 512 bytes each."""
_CACHE_PUTS = 200
_SIDE = 1000
"""Payloads at either end of those that become live, at most a fourth of them, that are compared."""


class PutTimes(NamedTuple):
    """Microseconds of the calling thread's CPU in which a payload is made, and put.

    The thread that puts counts also for the garbage collector, if a collection comes there.

    Attributes:
        few: a put among the first payloads.
        many: one among the last ones.
        longest: the longest of all.
        tensor: a tensor of a cache that has `NUM_TENSORS`.
    """

    few: Summary
    many: Summary
    longest: float
    tensor: Summary


def measure_puts(link: KVProducer, tensor: torch.Tensor, live: int) -> PutTimes:
    """Put payloads that nobody reads until `live` are, each a new object; then abort them."""
    puts = _timed(link, lambda number: payload_of(RUN, number, tensor), live)
    for number in range(live):
        link.abort(key_of(RUN, number))
    layers = {
        name: [torch.randn(SHAPE).bfloat16()] * LAYERS for name in ("key_cache", "value_cache")
    }
    metadata = {"kv_lens": [1], "ropes": [1], "num_layers": LAYERS}
    caches = _timed(
        link,
        lambda number: KVCacheTransferData(key_of(CACHES, number), layers, metadata=metadata),
        _CACHE_PUTS,
    )
    for number in range(_CACHE_PUTS):
        link.abort(key_of(CACHES, number))
    side = max(1, min(_SIDE, live // 4))
    per_tensor = [time / NUM_TENSORS for time in caches]
    few, many = puts[side : 2 * side] or puts, puts[-side:]  # the first ones warm up
    return PutTimes(Summary.of(few), Summary.of(many), max(puts), Summary.of(per_tensor))


def _timed(link: KVProducer, make: Callable[[int], Payload], count: int) -> list[float]:
    """Make and put payloads; return the microseconds of each."""
    times = list[float]()
    for number in range(count):
        began = time.thread_time_ns()
        link.put(make(number), ttl=TTL, timeout=PATIENCE)
        times.append(1e-3 * (time.thread_time_ns() - began))
    return times
