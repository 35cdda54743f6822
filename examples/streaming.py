"""A stream in two processes: the reader uses the first layer while the last is being computed.

python examples/streaming.py
"""

from __future__ import annotations

import multiprocessing
import os
import time

import torch

from omni_kvlink import KVCacheTransferData, KVLink, ReceivedLayer

LAYERS, TOKENS, HEADS, DIM = 8, 512, 4, 64
COMPUTE = 0.03
"""Seconds that a layer takes."""
Times = list[tuple[float, float]]


def read(url: str, told: multiprocessing.connection.Connection) -> None:
    """Take each layer as it comes."""
    with KVLink.connect(url, timeout=20.0) as link:
        told.send("ready")
        told.send([use(layer) for layer in link.stream_get("req-1", timeout=20.0)])


def use(layer: ReceivedLayer) -> tuple[float, float]:
    """When it was there, and when done with; on return its memory may go back."""
    there = time.monotonic()
    if not bool((layer.key == layer.index).all()):
        raise AssertionError(f"these are not the bytes of {layer}")
    time.sleep(COMPUTE / 2)
    return there, time.monotonic()


def write(link: KVLink) -> Times:
    """A dummy transformer: a layer is computed, and is on its way."""
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
    out.receipt.wait(timeout=20.0)
    return times


def show(written: Times, used: Times) -> None:
    """█ is computed and written, ▒ is used by the other process; a character is 5 ms."""
    zero = written[0][0]
    for layer, spans in enumerate(zip(written, used, strict=True)):
        line = ""
        for (start, stop), mark in zip(spans, "█▒", strict=True):
            line = line.ljust(round((start - zero) / 0.005)) + mark * round((stop - start) / 0.005)
        at, there = (1e3 * (moment - zero) for moment in (spans[0][1], spans[1][0]))
        print(f"layer {layer}: written at {at:6.1f} ms, there at {there:6.1f} ms  {line}")
    early = 1e3 * (written[-1][1] - used[0][0])
    print(f"layer 0 was there {early:.0f} ms before the last layer was written")


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    url = f"shm://streaming-{os.getpid()}"
    reader = spawn.Process(target=read, args=(url, theirs))
    with KVLink.serve(url) as link:
        reader.start()
        theirs.close()  # then a reader that dies is heard of
        assert mine.recv() == "ready"
        written = write(link)
        show(written, mine.recv())
    reader.join()


if __name__ == "__main__":
    main()
