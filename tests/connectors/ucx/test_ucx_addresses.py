"""Addresses that a peer sealed, but that UCX never wrote: they end no process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from omni_kvlink.connectors import ucx

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from ucx_killed_process import PATIENCE

SCRIPT = """
import random, sys, threading
from omni_kvlink import WireError
from omni_kvlink.connectors.ucx.addressing import seal
from omni_kvlink.connectors.ucx.transport import UcxTransport

one, other = UcxTransport(), UcxTransport()
good, rng = other.address[8:], random.Random(sys.argv[1])
def flipped(at):
    # not in the port, else UCX would connect to any port of this machine
    place = 1 + at % (good.index(bytes([0x82]), 40) - 1)
    return good[:place] + bytes([good[place] ^ (1 + rng.randrange(255))]) + good[place + 1 :]

HOSTILE = {
    "header": lambda at: bytes([at]) + good[1:],
    "cut": lambda at: good[: 1 + at % (len(good) - 1)],
    "noise": lambda at: good[:1] + rng.randbytes(at),
    "flip": lambda at: flipped(at),
    "tail": lambda at: good[: 1 + at % len(good)] + rng.randbytes(rng.randrange(100)),
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
bounds = {"header": (255, 255), "flip": (1, 255), "tail": (200, 256), "cut": (200, 256)}
least, most = bounds.get(sys.argv[1], (256, 256))
assert least <= refused <= most, refused

arrived, memory = threading.Event(), bytearray(99_999)
other.receive(other.connect(one.address), memory, 1000, lambda error: arrived.set())
one.send(one.connect(other.address), b"x" * 99_999, 1000, lambda error: None)
assert arrived.wait(60) and memory == b"x" * 99_999
one.close()
other.close()
"""


@pytest.mark.parametrize("kind", ["header", "cut", "noise", "flip", "tail"])
def test_a_hostile_address_ends_no_process(kind: str) -> None:
    """UCX trusts what it parses: it aborts at an unknown version, and reads beyond the end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, timeout=PATIENCE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
