"""From a device to a device, through shared memory and two processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from omni_kvlink import KVCacheTransferData, KVLink
from support import FOLDER
from support.devices.gpu import DEVICE, GPU
from support.devices.gpu import collected as collected
from support.devices.gpu import loaded as loaded
from support.payloads.random_caches import bits, noise

pytestmark = GPU
READER = FOLDER / "devices" / "gpu_reader.py"


@pytest.mark.parametrize("mode", ["pooled", "sealed"])
def test_two_processes(sockets: str, mode: str) -> None:
    parts = [noise(seed, (1000, 4, 128), "bfloat16") for seed in range(6)]
    there = [part.to(DEVICE) for part in parts]
    about = {"kv_lens": [1000], "ropes": [7], "num_layers": 3}
    blocks = {"key_cache": there[::2], "value_cache": there[1::2]}
    url = f"shm://gpu?mode={mode}"
    with KVLink.serve(url, directory=sockets) as link:
        receipt = link.put(KVCacheTransferData("r", blocks, (), about))
        assert receipt.ledger.copier == "pinned"
        command = [sys.executable, str(READER), url, sockets]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        receipt.wait(timeout=10)
    expected = [hashlib.sha256(bits(part)).hexdigest() for part in parts]
    assert done.stdout.split() == expected
