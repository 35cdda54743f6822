"""A stream between two processes: layers are used while later ones are computed.

python examples/streaming.py
"""

from __future__ import annotations

import multiprocessing
import os
import time

import torch

from omni_kvlink import KVCacheTransferData, KVLink, KVProducer, ReceivedLayer

LAYERS, TOKENS, HEADS, DIM = 8, 512, 4, 64
COMPUTE = 0.03
"""Seconds to compute a layer."""
Times = list[tuple[float, float]]


def read(url: str, pipe: multiprocessing.connection.Connection) -> None:
    """Use each layer once it has arrived."""
    with KVLink.connect(url, timeout=20.0) as link:
        pipe.send("ready")
        pipe.send([use(layer) for layer in link.stream_get("req-1", timeout=20.0)])


def use(layer: ReceivedLayer) -> tuple[float, float]:
    """When the layer arrived, and when its use ended."""
    arrived = time.monotonic()
    if not bool((layer.key == layer.index).all()):
        raise AssertionError(f"these are not the bytes of {layer}")
    time.sleep(COMPUTE / 2)
    return arrived, time.monotonic()


def write(link: KVProducer) -> Times:
    """A dummy transformer: each layer is sent once it is computed."""
    plan = KVCacheTransferData.blank(
        "req-1",
        row=(HEADS, DIM),
        dtype=torch.bfloat16,
        metadata={"kv_lens": [TOKENS], "ropes": [TOKENS], "num_layers": LAYERS},
    )
    times = []
    with link.stream_put(plan) as out:
        for layer in range(LAYERS):
            began = time.monotonic()
            time.sleep(COMPUTE)
            keys = torch.full((TOKENS, HEADS, DIM), layer, dtype=torch.bfloat16)
            out.write_layer(layer, keys, -keys)
            times.append((began, time.monotonic()))
    out.commit().wait(timeout=20.0)  # committed by the block: this returns its receipt
    return times


def show(written: Times, used: Times) -> None:
    """Draw █ where a layer is computed and written, ▒ where it is used; a character is 5 ms."""
    zero = written[0][0]
    for layer, spans in enumerate(zip(written, used, strict=True)):
        line = ""
        for (start, stop), mark in zip(spans, "█▒", strict=True):
            line = line.ljust(round((start - zero) / 0.005)) + mark * round((stop - start) / 0.005)
        at, arrived = (1e3 * (moment - zero) for moment in (spans[0][1], spans[1][0]))
        print(f"layer {layer}: written at {at:6.1f} ms, there at {arrived:6.1f} ms  {line}")
    early = 1e3 * (written[-1][1] - used[0][0])
    print(f"layer 0 arrived {early:.0f} ms before the last layer was written")


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    url = f"shm://streaming-{os.getpid()}"
    reader = spawn.Process(target=read, args=(url, theirs))
    with KVLink.serve(url) as link:
        reader.start()
        theirs.close()  # so that recv() raises EOFError if the reader dies
        assert mine.recv() == "ready"
        written = write(link)
        show(written, mine.recv())
    reader.join()


if __name__ == "__main__":
    main()
