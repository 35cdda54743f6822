"""Send a KV cache over encrypted TCP, both sides authenticated by keys.

On real hosts, make the keys with `kvlink keygen` and copy only the public ones.

python examples/tcp_with_keys.py
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from pathlib import Path

import torch

from omni_kvlink import KVCacheTransferData, KVLink
from omni_kvlink.cli.commands import run as kvlink

URL = "zmq+tcp://127.0.0.1:47113"


def send(keys: str) -> None:
    """The producer accepts the readers whose public keys lie in `readers/`."""
    layers = list(torch.randn(2, 256, 4, 64))
    cache = KVCacheTransferData(
        "req-1",
        {"key_cache": layers, "value_cache": layers},
        metadata={"kv_lens": [256], "ropes": [256], "num_layers": 2},
    )
    with KVLink.serve(URL, keys=f"{keys}/producer.secret", peers=f"{keys}/readers") as producer:
        producer.put(cache).wait(timeout=60.0)


def receive(keys: str) -> None:
    """The reader accepts the producer with this public key, and no other."""
    with (
        KVLink.connect(
            URL, timeout=60.0, keys=f"{keys}/reader.secret", peers=f"{keys}/producer.public"
        ) as consumer,
        consumer.get("req-1", timeout=60.0, verify="full") as data,
    ):
        print(data)


def make_keys(directory: str) -> None:
    """What `kvlink keygen DIRECTORY NAME` does, for both sides."""
    for name in ("producer", "reader"):
        kvlink(["keygen", directory, name])
    readers = Path(directory, "readers")
    readers.mkdir()
    shutil.copy(Path(directory, "reader.public"), readers)


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as keys:
        make_keys(keys)
        stages = [spawn.Process(target=stage, args=(keys,)) for stage in (send, receive)]
        for stage in stages:
            stage.start()
        for stage in stages:
            stage.join()
        if any(stage.exitcode for stage in stages):
            raise SystemExit("a stage failed: see its error above")


if __name__ == "__main__":
    main()
