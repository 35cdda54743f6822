"""The leak check of these tests sees a file of ours, and not one that an unrelated process uses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from support.faults.leak_checks import left_over, shm_files

UNRELATED = """
import mmap, os, sys, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.001)  # it belongs to nobody then
os.setsid()
with open(sys.argv[1], "wb+") as file:
    file.write(bytes(4096))
    file.flush()
    memory = mmap.mmap(file.fileno(), 4096)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_file_that_nobody_uses_is_left_over() -> None:
    before = shm_files()
    path = Path("/dev/shm", f"left-{uuid.uuid4().hex}")
    path.write_bytes(b"x")
    assert path.name in left_over(before)
    path.unlink()
    assert path.name not in left_over(before)


def test_a_file_of_an_unrelated_process_is_not() -> None:
    before = shm_files()
    path = Path("/dev/shm", f"unrelated-{uuid.uuid4().hex}")
    with subprocess.Popen(
        [sys.executable, "-c", UNRELATED, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        unrelated_pid = int(process.stdout.readline())
        try:
            assert path.name in shm_files()
            assert path.name not in left_over(before)
        finally:
            os.kill(unrelated_pid, signal.SIGKILL)
            path.unlink()
