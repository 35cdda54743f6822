"""Two stages for two containers: `python pair.py serve` and `python pair.py read`.

The environment variable KVLINK_URL has the link of this side with its options.
"""

import os
import sys

import torch

from omni_kvlink import KVLink, TensorTransferData

COUNT, SHAPE = 8, (28, 2, 64, 1024)  # layers; K and V; tokens; bytes of a token


def tensors(number: int) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(number)  # the same in both containers
    return {"kv": torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=seeded)}


def serve(url: str) -> None:
    with KVLink.serve(url) as producer:
        for number in range(COUNT):
            receipt = producer.put(TensorTransferData(f"req-{number}", tensors(number)))
            receipt.wait(timeout=60.0)


def read(url: str) -> None:
    with KVLink.connect(url, timeout=60.0) as consumer:
        for number in range(COUNT):
            with consumer.get(f"req-{number}", timeout=60.0) as data:
                assert isinstance(data, TensorTransferData)
                assert torch.equal(data["kv"], tensors(number)["kv"])
    print(f"{COUNT} payloads, bit-exact")


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]](os.environ["KVLINK_URL"])
