"""Fixtures: peers in child processes, armed with faults, and checks that nothing is left over."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from omni_kvlink.connectors.control import monitored_socket as zmq_sockets
from omni_kvlink.testing import faults
from omni_kvlink.testing.rig import until
from support.connectors.zmq_addresses import start_garbage_collection
from support.faults.peer_commands import start_peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.testing.peer_harness import ProcessPeer
    from support.faults.harness import Start


@pytest.fixture
def start(leaves_nothing: None) -> Iterator[Start]:
    """`start()` or `start({"point": "action"})` gives a peer in a process of its own."""
    peers: list[ProcessPeer] = []

    def begin(armed: dict[str, str] | None = None) -> ProcessPeer:
        peers.append(start_peer(faults.armed(armed) if armed else None))
        return peers[-1]

    yield begin
    for peer in peers:
        if peer.process.poll() is None:
            os.kill(peer.process.pid, signal.SIGKILL)
        peer.close()


@pytest.fixture
def socket_dir() -> Iterator[str]:
    """A socket directory in which a killed producer may leave its socket and lock file only."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    before = shm_files()
    yield directory
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert all(name.endswith((".sock", ".sock.lock")) for name in left), left
    until(lambda: not left_over(before), "no file of this process in /dev/shm is left", 60)


def shm_files() -> set[str]:
    """The files in /dev/shm: named shared memory would be left over there.

    Not those of `multiprocessing`, of whatever process of the machine: semaphores, which it removes
    at once, and `shared_memory`, which `layout.py` forbids the package.
    """
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith(("sem.", "psm_"))}


def left_over(before: set[str]) -> set[str]:
    """New files in /dev/shm, but for those that a process which is none of ours has mapped."""
    new = shm_files() - before
    if not new:
        return new
    parents = {one.pid: one.info["ppid"] or 0 for one in psutil.process_iter(["ppid"])}
    for pid in parents:
        if os.getpid() in _ancestors(pid, parents):
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            maps = Path(f"/proc/{pid}/maps").read_text()
            new = {name for name in new if f"/dev/shm/{name}" not in maps}
    return new


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    """A process and all its ancestors."""
    found = {pid}
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of this process disconnect frozen peers after 1.5 s."""
    monkeypatch.setattr(zmq_sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(zmq_sockets, "HEARTBEAT_TIMEOUT_MS", 1500)


@pytest.fixture(scope="session")
def zmq_started() -> None:
    """Start pyzmq's garbage-collection thread, which stays until the process ends."""
    start_garbage_collection()
