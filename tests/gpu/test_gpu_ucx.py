"""Device tensors that UCX sends from where they lie."""

from __future__ import annotations

import hashlib
import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_kvlink import KVCacheTransferData, KVLink
from support.devices.gpu import DEVICE, GPU
from support.devices.gpu import collected as collected
from support.devices.gpu import loaded as loaded
from support.payloads.random_caches import bits, noise

missing = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is missing")
pytestmark = [*GPU, missing]


def test_device_tensors_are_sent_in_place() -> None:
    parts = [noise(seed, (1000, 4, 128), "bfloat16") for seed in range(6)]
    there = [part.to(DEVICE) for part in parts]
    about = {"kv_lens": [1000], "ropes": [7], "num_layers": 3}
    cache = KVCacheTransferData(
        "r", {"key_cache": there[::2], "value_cache": there[1::2]}, (), about
    )
    with (
        KVLink.serve("ucx://127.0.0.1:0?trusted_network=1&ucx_tls=tcp,cuda_copy") as producer,
        KVLink.connect(producer.url, timeout=30) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        putting = pool.submit(producer.put, cache, direct=True, digests=False, timeout=30)
        received = reader.get("r", timeout=30)
        with received as data:
            found = [hashlib.sha256(bits(view)) for view in data.tensors()]
        assert putting.result(30).ledger.copies == 0
    expected = [hashlib.sha256(bits(part)).hexdigest() for part in parts]
    assert [one.hexdigest() for one in found] == expected
