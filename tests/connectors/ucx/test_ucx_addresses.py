"""Addresses that a peer sealed, but that UCX never wrote: they end no process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from omni_kvlink.connectors import ucx

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from support.connectors.ucx_killed_process import PATIENCE

SCRIPT = """
import sys, threading
from omni_kvlink import WireError
from omni_kvlink.connectors.ucx.addressing import seal
from omni_kvlink.connectors.ucx.transport import UcxTransport

one, other = UcxTransport(), UcxTransport()
good = other.address[8:]
HOSTILE = {
    "header": lambda at: bytes([at]) + good[1:],
    "cut": lambda at: good[: 1 + at % (len(good) - 1)],
}
refused = 0
for at in range(256):
    address = HOSTILE[sys.argv[1]](at)
    try:
        peer = one.connect(seal(address))
    except WireError:
        refused += 1
        continue
    if address != good:
        one.send(peer, bytes(10), at, lambda error: None)
        one.disconnect(peer)
assert refused == {"header": 255, "cut": 0}[sys.argv[1]], refused

arrived, memory = threading.Event(), bytearray(99_999)
other.receive(other.connect(one.address), memory, 1000, lambda error: arrived.set())
one.send(one.connect(other.address), b"x" * 99_999, 1000, lambda error: None)
assert arrived.wait(60) and memory == b"x" * 99_999
one.close()
other.close()
"""


@pytest.mark.parametrize("kind", ["header", "cut"])
def test_a_hostile_address_ends_no_process(kind: str) -> None:
    """UCX trusts what it parses: it aborts at an unknown version, and reads beyond the end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, timeout=PATIENCE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
