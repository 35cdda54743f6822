"""Storages that are cut, freed or replaced between the making of a payload and its put."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheTransferData, SchemaError, TensorTransferData
from omni_kvlink.adapters import PagedAdapter
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.views import same_bytes
from support.link.ends import end_of
from support.payloads.storage_changes import cut, free, replace_by_a_short_one
from support.payloads.tensor_ways import ANY, OF_CACHES, Links, links

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.payloads.tensor_ways import Way

SIZES = {"small": 4, "large": 20_000}
"""Tokens of 32 floats."""
VIEWS: dict[str, Callable[[int], torch.Tensor]] = {
    "dense": lambda n: torch.rand(n, 4, 8),
    "transposed": lambda n: torch.rand(4, n, 8).transpose(0, 1),
    "of five dimensions": lambda n: torch.rand(n, 2, 3, 9, 2)[:, :, :2, :8, 0].reshape(n, 4, 8),
    "behind an offset": lambda n: torch.rand(n + 1, 4, 8)[1:],
    "every second": lambda n: torch.rand(2 * n, 4, 8)[::2],
}


@pytest.fixture(scope="module", params=["native", "torch"])
def to(request: pytest.FixtureRequest) -> Iterator[Links]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with links(path, f"changes-{request.param}", request.param, 1 << 15) as opened:
            yield opened


CHANGES = (cut, free, replace_by_a_short_one)


@pytest.mark.parametrize("send", ANY + OF_CACHES, ids=lambda send: send.__name__)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_no_longer_there_is_not_read(to: Links, send: Way, size: str, view: str) -> None:
    for change in CHANGES:
        tensor = VIEWS[view](SIZES[size])
        with pytest.raises(SchemaError, match=r"(tensor|layer).*storage was (cut to|freed)"):
            send(to, tensor, partial(change, tensor))


@pytest.mark.parametrize("send", ANY + OF_CACHES, ids=lambda send: send.__name__)
@pytest.mark.parametrize("size", SIZES)
def test_another_storage_of_the_same_size_is_read(to: Links, send: Way, size: str) -> None:
    tensor, other = torch.rand(2, SIZES[size], 4, 8)
    assert same_bytes(send(to, tensor, lambda: setattr(tensor, "data", other)), other)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("blocks", [4, 2000])
def test_pools(
    to: Links, change: Callable[[torch.Tensor], None], blocks: int, *, by_slot: bool
) -> None:
    """Both ways: a pool is not read, and not written, behind the end of its storage."""
    keys, values = torch.rand(2, blocks, 16, 2, 8).unbind(0)
    keys, values = keys.clone(), values.clone()
    table = {"slot_mapping": [*range(16 * blocks)]} if by_slot else {"block_ids": [*range(blocks)]}
    metadata = {"kv_lens": [16 * blocks], "ropes": [0]}
    data = KVCacheTransferData.from_paged(
        to.name(), [keys], [values], block_size=16, metadata=metadata, **table
    )
    to.producer.put(data)
    change(values)
    first, data.request_id = data.request_id, to.name()
    with pytest.raises(SchemaError, match=r"layer 0, V.*storage was (cut to|freed)"):
        to.producer.put(data)
    received = to.get(first)
    with received as cache:
        with pytest.raises(SchemaError, match=r"layer 0, V.*storage was (cut to|freed)"):
            PagedAdapter().inject(cache, [keys], [values], block_size=16, **table)
        targets = [torch.empty(view.shape) for view in cache.tensors()]
        change(targets[1])
        with pytest.raises(SchemaError, match=r"layer 0, V.*storage was (cut to|freed)"):
            received.scatter(targets)


@pytest.mark.parametrize("by_slot", [False, True])
def test_a_pool_of_another_shape(to: Links, *, by_slot: bool) -> None:
    """Its block table was checked against the shape that it had."""
    pool = torch.rand(4, 16, 2, 8)
    index = {"block_size": 16} if by_slot else {"block_size": 16, "tokens": 64}
    of = BlockTable.of_slots if by_slot else BlockTable.of_blocks
    paged = PagedTensor(pool, of(range(64 if by_slot else 4), **index), "layer 7, K")
    before = paged.dense()
    pool.resize_(2, 16, 2, 8)
    for use in (paged.dense, lambda: paged.fill(before)):
        with pytest.raises(SchemaError, match="layer 7, K: the pool is"):
            use()
    data = TensorTransferData(to.name(), {"x": paged})
    with pytest.raises(SchemaError, match=r"layer 7, K: the pool is .* \[2, 16, 2, 8\] now"):
        to.producer.put(data)


def test_a_direct_put(to: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is reserved; connectors that cannot send directly would refuse it first."""
    monkeypatch.setattr(end_of(to.producer), "direct_refusal", lambda device: "")
    for change in CHANGES:
        tensor = torch.rand(9, 4, 8)
        data = TensorTransferData(to.name(), {"x": tensor})
        change(tensor)
        with pytest.raises(SchemaError, match=r"tensor 'x'.*storage was (cut to|freed)"):
            to.producer.put(data, direct=True)
    tensor = torch.rand(9, 4, 8)
    blocks = {"key_cache": [torch.rand(9, 4, 8)], "value_cache": [tensor]}
    metadata = {"kv_lens": [9], "ropes": [0], "num_layers": 1}
    data = KVCacheTransferData(to.name(), blocks, (), metadata)  # type: ignore[assignment]
    tensor.resize_(1, 4, 8)
    with pytest.raises(SchemaError, match="layer 0, V"):
        to.producer.put(data, direct=True)


def test_indices_and_comparisons() -> None:
    index = torch.arange(64)
    cut(index)
    with pytest.raises(SchemaError, match="block ids or slots: its storage was cut"):
        BlockTable.of_slots(index, block_size=16)
    pool = torch.rand(4, 16, 2, 8)
    paged = PagedTensor(pool, BlockTable.of_blocks([3], block_size=16, tokens=16), "layer 7, K")
    cut(pool)
    with pytest.raises(SchemaError, match="layer 7, K: its storage was cut"):
        paged.dense()
    one, other = (TensorTransferData("r", {"x": torch.ones(64)}) for _ in range(2))
    cut(one["x"])
    with pytest.raises(SchemaError, match="storage was cut"):
        one.difference(other)


def test_a_target_that_shares_its_storage(to: Links) -> None:
    """A copy-on-write target is written alone: its source keeps its values."""
    source = torch.ones(9, 4, 8)
    target = torch._lazy_clone(source)
    data = TensorTransferData(to.name(), {"x": torch.zeros(9, 4, 8)})
    to.producer.put(data)
    received = to.get(data.request_id)
    with received:
        received.scatter([target])
    assert source.eq(1).all()
    assert target.eq(0).all()


ASAN = ctypes.CDLL(None)
"""The process: it has the sanitizer's functions in `make asan-tensors`."""


@pytest.mark.skipif(not hasattr(ASAN, "__asan_init"), reason="for make asan-tensors")
def test_the_sanitizer_sees_a_byte_behind_a_storage() -> None:
    """Without the check: it watches torch's memory, and what the library reads of it."""
    result = subprocess.run(
        [sys.executable, "-c", OVER_READ], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
    assert "READ of size" in result.stderr


OVER_READ = """
import torch
from omni_kvlink._native import host
target, source = torch.empty(4096, dtype=torch.uint8), torch.ones(1000, dtype=torch.uint8)
print(host.gather_dense(target.data_ptr(), 4096, 0, source.data_ptr(), 1001, digest=True))
"""
