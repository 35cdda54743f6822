"""Send a KV cache from one process to another over shared memory.

python examples/first_cache.py
"""

from __future__ import annotations

import multiprocessing

import torch

from omni_kvlink import KVCacheTransferData, KVLink

LAYERS, TOKENS, HEADS, DIM = 4, 1024, 4, 64


def send(url: str) -> None:
    """The stage that computed the cache."""
    keys, values = torch.randn(2, LAYERS, TOKENS, HEADS, DIM)
    cache = KVCacheTransferData(
        "req-1",
        {"key_cache": list(keys), "value_cache": list(values)},
        metadata={"kv_lens": [TOKENS], "ropes": [TOKENS], "num_layers": LAYERS},
    )
    with KVLink.serve(url) as producer:
        producer.put(cache).wait(timeout=60.0)  # until the reader has released it


def receive(url: str) -> None:
    """The stage that uses it; it may start first."""
    with (
        KVLink.connect(url, timeout=60.0) as consumer,
        consumer.get("req-1", timeout=60.0) as data,
    ):
        print(data, [tuple(view.shape) for view in data.tensors()])  # zero-copy views


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    stages = [spawn.Process(target=stage, args=("shm://first",)) for stage in (receive, send)]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join()
    if any(stage.exitcode for stage in stages):
        raise SystemExit("a stage failed: see its error above")
