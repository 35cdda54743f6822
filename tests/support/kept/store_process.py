"""`kvlink store` as a process, and a process that keeps payloads until it is killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil

from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.kept import StoreClient

STORE = """
import sys
from omni_kvlink.cli.main import main
sys.exit(main())
"""

KEEPER = """
import sys
from omni_kvlink.kept import StoreClient
from support.payloads.small_payloads import tensors
url, first, last, *stores = sys.argv[1:]
client = StoreClient(url, stores=stores, budget="64MiB")
for number in range(int(first), int(last)):
    client.put(f"k{number}", tensors(f"k{number}", seed=number))
print("kept", flush=True)
for line in sys.stdin:
    if line == "drain\\n":
        print("drained", client.drain(timeout=60), flush=True)
client.close()
"""

READER = """
import sys
from omni_kvlink import KVLink
consumer = KVLink.connect(sys.argv[1], timeout=60)
received = consumer.get(sys.argv[2], timeout=60)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def program(source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program; it is killed at the end if it still runs."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()


@contextlib.contextmanager
def store_process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`kvlink store` with these arguments, once it serves."""
    with program(STORE, "store", *arguments, "--stats-seconds", "0") as process:
        line = next_line(process)
        assert line.startswith("serving "), line + (process.stderr.read() if process.stderr else "")
        yield process


def kill_store(process: subprocess.Popen[str]) -> None:
    """Kill a store; return when its worker, which has the directory, has noticed and is gone."""
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    until(lambda: not any(map(_runs, workers)), "its worker has ended")


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def next_line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def until_reachable(client: StoreClient) -> None:
    """Wait until a client is connected to all its stores and peers."""

    def all_are_there() -> bool:
        return all(source["reachable"] for source in client.stats()["sources"])

    until(all_are_there, "every source is there")
