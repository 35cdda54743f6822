"""Payloads of append streams, encoded by the library; key and epoch decide their content."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.append_stream import StreamPosition, StreamSpec

if TYPE_CHECKING:
    from omni_kvlink import TensorTransferData
    from omni_kvlink.payload.manifest import Manifest

_WIDTH = 250
_copier = TorchCopier()


@functools.cache
def rows_of(key: str, epoch: int, number: int) -> torch.Tensor:
    """The rows that a chunk adds to the tensor of the stream `(key, epoch)`: one to three."""
    text = f"{key}/{epoch}/{number};".encode().ljust((1 + number % 3) * _WIDTH, b"%d" % number)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).view(-1, _WIDTH)


def head_plan(key: str) -> Manifest:
    """The plan of a stream's head."""
    return _head(key, StreamPosition()).plan(digests=False)


def end_payload(key: str, epoch: int, count: int) -> bytes:
    """The head of a stream that ended after so many chunks."""
    return _encoded(_head(key, _position(key, epoch, count)))[0]


@functools.cache
def chunk_payload(key: str, epoch: int, number: int) -> bytes:
    """Chunk `number` of a stream."""
    return _chunk(key, epoch, number)[0]


@functools.cache
def _spec(key: str) -> StreamSpec:
    return StreamSpec(key, {"rows": torch.empty(0, _WIDTH, dtype=torch.uint8)}, 0, None)


@functools.cache
def _position(key: str, epoch: int, number: int) -> StreamPosition:
    if not number:
        return StreamPosition()
    _, header = _chunk(key, epoch, number - 1)
    return _position(key, epoch, number - 1).after(header)


def _head(key: str, end: StreamPosition) -> TensorTransferData:
    return _spec(key).head(end.encode())


@functools.cache
def _chunk(key: str, epoch: int, number: int) -> tuple[bytes, bytes]:
    rows, position = rows_of(key, epoch, number), _position(key, epoch, number)
    return _encoded(_spec(key).chunk({"rows": rows}, {"number": number}, position))


def _encoded(payload: TensorTransferData) -> tuple[bytes, bytes]:
    """Return a payload as it travels, and its header."""
    plan = payload.plan(digests=False)
    region, header = Region.private(plan.nbytes), plan.encode()
    _copier.gather(payload.tensors(), plan, region)
    region.write(0, header)
    return region.read(), header
