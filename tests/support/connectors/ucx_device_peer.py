"""A process whose links have payloads in a device's memory: the real one, or the fake one.

`python -m ucx_device_peer DIRECTORY` uses the fake device whose library lies there; without the
argument, the tensors of `DeviceCommands` are on the real one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVCacheTransferData, PagedTensor, TensorTransferData
from omni_kvlink._native import cuda
from omni_kvlink.testing.peer_harness import serve
from support.devices.fake_device import MIXED, FakeDevice, install
from support.faults.peer_commands import PeerCommands, start_peer
from support.link.ends import end_of
from support.payloads.random_caches import DTYPES, bits, noise

if TYPE_CHECKING:
    from omni_kvlink.link import KVProducer, Payload
    from omni_kvlink.memory.region import Region
    from omni_kvlink.testing.peer_harness import ProcessPeer

LAYERS, BLOCKS, SIZE, HEADS, DIM, TOKENS = 2, 70, 16, 4, 64, 997
SHAPES = [(1000, 3, 7), (777,), (1,), (0, 5), (513, 1027)]


def dense(key: str, seed: int, where: str) -> tuple[Payload, list[bytes]]:
    """Tensors of each dtype, of odd sizes, and their bytes."""
    tensors = {
        f"{dtype} {number}": noise(seed, shape, dtype)
        for dtype in DTYPES
        for number, shape in enumerate(SHAPES)
    }
    data = TensorTransferData(key, {name: each.to(where) for name, each in tensors.items()})
    return data, [bits(each) for each in tensors.values()]


def paged(key: str, seed: int, where: str) -> tuple[Payload, list[bytes]]:
    """Blocks or slots of pools in one of the layouts, and the bytes of their tokens."""
    stacked = noise(seed, (2, LAYERS, BLOCKS, SIZE, HEADS, DIM), "bfloat16")
    if seed % 4 > 1:  # the heads of a block before its tokens
        stacked = stacked.view(2, LAYERS, BLOCKS, HEADS, SIZE, DIM).transpose(3, 4)
    random = torch.Generator().manual_seed(seed)
    slots = torch.randperm(BLOCKS * SIZE, generator=random)[:TOKENS]
    table: dict[str, Any] = {"slot_mapping": slots}
    if seed % 2:
        blocks = torch.randperm(BLOCKS, generator=random)[: -(-TOKENS // SIZE)]
        table = {"block_ids": blocks}
        slots = (blocks[:, None] * SIZE + torch.arange(SIZE)).flatten()
    there = stacked.to(where)
    keys, values = (list(part) for part in there)
    data = KVCacheTransferData.from_paged(
        key,
        keys,
        values,
        block_size=SIZE,
        metadata={"kv_lens": [TOKENS], "ropes": [2], "num_layers": LAYERS},
        **table,
    )
    rows, at = slots[:TOKENS] // SIZE, slots[:TOKENS] % SIZE
    expected = [bits(pool[rows, at]) for layer in range(LAYERS) for pool in stacked[:, layer]]
    return data, expected


KINDS = {"dense": dense, "paged": paged}


def bytes_of(payload: Payload) -> list[bytes]:
    """The bytes of a payload's tensors, wherever they lie."""
    views = payload.tensors()
    return [bits((view.dense() if isinstance(view, PagedTensor) else view).cpu()) for view in views]


def payload_memory(producer: KVProducer, key: str) -> Region:
    """The memory of a payload that a producer has committed."""
    end = end_of(producer)
    # A test changes bytes after the commit: no call gives out memory that is published.
    transfer = end.transfers._live[key]
    whole: Region = end.pool.region(transfer.block)
    return whole.slice(256, transfer.location.nbytes)


class DeviceCommands(PeerCommands):
    """Commands whose payloads, by kind and seed, are on the device."""

    def __init__(self, device: FakeDevice | None):
        self._device, self._where = device, "cpu" if device else "cuda:0"
        super().__init__()

    def crossed(self) -> int:
        """Bytes that were copied between the host and the fake device."""
        return self._device.crossed_nbytes if self._device else 0

    def allocated(self) -> int:
        """Bytes of the fake device that are allocated, beside tensors."""
        return self._device.allocated_nbytes if self._device else 0

    def put_kind(self, link: str, key: str, kind: str, seed: int, **options: Any) -> None:
        """Put tensors of the device."""
        data, _ = KINDS[kind](key, seed, self._where)
        self._receipts[key] = self._links[link].put(data, **options)

    def get_kind(self, link: str, key: str, kind: str, seed: int, **options: Any) -> list[bool]:
        """Receive them: are the views right, are they on the device, and are copies of them?"""
        _, expected = KINDS[kind](key, seed, self._where)
        received = self._links[link].get(key, **options)
        with received as data:
            views = data.tensors()
            right = [bits(view.cpu()) for view in views] == expected
            placed = all(str(view.device) == self._where for view in views)
            into, _ = KINDS[kind](key, seed + 4, self._where)  # the same layout
            received.scatter(into)
            del views
        return [right, placed, bytes_of(into) == expected]

    def flip(self, link: str, key: str, at: int) -> None:
        """Change a byte of a payload that was put, in the link's memory."""
        region = payload_memory(self._links[link], key)
        at %= region.nbytes
        region.write(at, bytes([region.read(at, at + 1)[0] ^ 4]))


def start(directory: Path | None) -> ProcessPeer:
    """Start such a process."""
    arguments = () if directory is None else (str(directory),)
    return start_peer(module="support.connectors.ucx_device_peer", arguments=arguments)


def main(directory: str = "") -> None:
    device = None
    if directory:
        os.environ[cuda.ENVIRONMENT] = MIXED
        device = install(Path(directory), pytest.MonkeyPatch())
    else:
        torch.zeros(1, device="cuda:0")
    serve(DeviceCommands(device), concurrent=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
