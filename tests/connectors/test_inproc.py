"""What concerns `inproc://` alone; the contract of all connectors is in the conformance kit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WRITER = """
import faulthandler, sys
from omni_kvlink import KVLink
from omni_kvlink.testing.caches import Recipe

faulthandler.disable()
data = Recipe("k").make()
with KVLink.serve("inproc://writer", mode=sys.argv[1], inline=0, quota=8 << 20) as producer:
    with KVLink.connect("inproc://writer", timeout=60) as consumer:
        receipt = producer.put(data, readers=2)
        first, second = (consumer.get("k", timeout=60) for _ in range(2))
        print("received", flush=True)
        first.data.tensors()[0].zero_()
        print(second.data.difference(data) or "the second reader has what was put")
"""


@pytest.mark.parametrize("mode", ["pooled", "sealed"])
def test_a_reader_cannot_change_what_another_gets(mode: str) -> None:
    """Writing to a received tensor ends the process, as it does over shared memory."""
    command = [sys.executable, "-c", WRITER, mode]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "received\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
