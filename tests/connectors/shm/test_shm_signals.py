"""Puts under a thousand signals a second: each one succeeds whole or fails."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_kvlink import KVConsumer, KVLink, TransferTimeout
from omni_kvlink.testing.caches import fingerprint
from support.connectors import shm_storm as storm

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.mark.parametrize("mode", ["retry", "raise"])
def test_puts_in_a_storm_of_signals(socket_dir: str, mode: str) -> None:
    command = [sys.executable, str(Path(storm.__file__)), "shm://storm", socket_dir, mode]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as process,
        KVLink.connect("shm://storm", timeout=60, directory=socket_dir) as reader,
    ):
        assert process.stdin
        assert process.stdout
        process.stdin.write("go\n")
        for number in range(storm.PUTS):
            line = json.loads(process.stdout.readline())
            if line["ended"] == "put":
                _check(reader, number, timeout=60)
            else:
                assert mode == "raise", line
                assert line["ended"] == "Interrupt", line
                # Interrupted after the commit, or it never happened.
                with contextlib.suppress(TransferTimeout):
                    _check(reader, number, timeout=0.02)
        assert json.loads(process.stdout.readline())["fired"] > 20
        process.stdin.write("done\n")
        memory = json.loads(process.stdout.readline())
        if mode == "retry":
            assert memory["used"] == 0
    assert process.returncode == 0


def _check(reader: KVConsumer, number: int, timeout: float) -> None:
    with reader.get(f"k{number}", timeout=timeout, verify="full") as found:
        assert fingerprint(found) == fingerprint(storm.recipe(number).make())
