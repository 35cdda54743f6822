"""What concerns `inproc://` alone; the contract of all connectors is in the conformance kit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from omni_kvlink import KVLink
from omni_kvlink.testing.caches import Recipe, fingerprint

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


def test_a_forked_child_has_names_of_its_own() -> None:
    """Nobody serves its parent's name there: the child may serve it."""
    with KVLink.serve("inproc://forked"):
        child = os.fork()
        if not child:
            status = 1
            try:
                with (
                    KVLink.serve("inproc://forked") as producer,
                    KVLink.connect(producer.url, timeout=60) as reader,
                ):
                    producer.put(Recipe("k").make())
                    with reader.get("k", timeout=60) as data:
                        status = int(fingerprint(data) != fingerprint(Recipe("k").make()))
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
