"""Measures what each transfer costs one side: `python footprint.py SIDE URL` prints a JSON line.

The second run of each step is counted, after a warm-up: the peak of resident bytes above those
before the step (the payload, the caller's tensors), and the page faults.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from omni_kvlink import KVCacheTransferData, KVLink
from omni_kvlink.testing.caches import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS, SHAPE = 2, (6400, 8, 512)
NBYTES = LAYERS * 2 * 6400 * 8 * 512 * 2
WAIT = 600.0
Costs = dict[str, tuple[int, int]]


def cache(key: str) -> KVCacheTransferData:
    tensors = [torch.full(SHAPE, n, dtype=torch.bfloat16) for n in range(2 * LAYERS)]
    blocks = {"key_cache": tensors[::2], "value_cache": tensors[1::2]}
    about = {"kv_lens": [SHAPE[0]], "ropes": [0], "num_layers": LAYERS}
    return KVCacheTransferData(key, blocks, metadata=about)


def renamed(data: KVCacheTransferData, key: str) -> KVCacheTransferData:
    return KVCacheTransferData(key, data.layer_blocks, metadata=data.metadata)


@contextmanager
def counted(costs: Costs, name: str) -> Iterator[None]:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before, faults = _kib("VmRSS"), page_faults()
    yield
    costs[name] = (_kib("VmHWM") - before) << 10, page_faults() - faults


def _kib(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def page_faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def produce(url: str) -> Iterator[Callable[[str], None]]:
    data = cache("any")
    with KVLink.serve(url) as link:

        def put(key: str) -> None:
            link.put(renamed(data, key)).wait(timeout=WAIT)

        def stream(key: str) -> None:
            mine = renamed(data, key)
            with link.stream_put(mine) as out:
                for (_, layer), tensors in layers_of(mine).items():
                    out.write_layer(layer, *tensors)
            out.commit().wait(timeout=WAIT)

        def in_place(key: str) -> None:
            allocation = link.allocate(renamed(data, key))
            for target, source in zip(allocation.data.tensors(), data.tensors(), strict=True):
                assert isinstance(target, torch.Tensor)
                assert isinstance(source, torch.Tensor)
                target.copy_(source)
            link.put(allocation.data).wait(timeout=WAIT)
            del target

        yield from (put, put, stream, stream, in_place)


def consume(url: str) -> Iterator[Callable[[str], None]]:
    mine = cache("any")
    targets = mine.tensors()
    with KVLink.connect(url, timeout=WAIT) as link:

        def get(key: str) -> None:
            link.get(key, timeout=WAIT, verify="full").release()

        def scatter(key: str) -> None:
            received = link.get(key, timeout=WAIT)
            received.scatter(targets)
            received.release()

        def layers(key: str) -> None:
            with link.stream_get(key, timeout=WAIT) as stream:
                for layer in stream:
                    layer.scatter(*targets[2 * layer.index : 2 * layer.index + 2])
                stream.wait().close()

        yield from (get, scatter, layers, get, layers)


def main(side: str, url: str) -> None:
    costs: Costs = {}
    for number, step in enumerate(produce(url) if side == "produce" else consume(url)):
        for turn in ("warm-up", "again"):
            with counted(costs, f"{number} {step.__name__}"):
                step(f"{number} {turn}")
    print(json.dumps(costs))


if __name__ == "__main__":
    main(*sys.argv[1:])
