"""What the fault tests share: a name with links of this process and of victims."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from omni_kvlink import KVLink
from omni_kvlink.testing.rig import PATIENCE, Handle, ProcessPeer, Remote, ThreadPeer

Start = Callable[..., ProcessPeer]

NOTICED = 0.5
"""Seconds from a process's end to every survivor's answer."""


class Field:
    """A name in the battlefield: links of this process and of victims."""

    def __init__(self, directory: str, mode: str = "pooled", url: str = "shm://field"):
        self.url = url
        self.options = {"directory": directory, "mode": mode, "quota": 4 << 20}
        self.here = ThreadPeer()
        self.links: list[KVLink] = []

    def serve(self) -> KVLink:
        self.links.append(KVLink.serve(self.url, **self.options))
        return self.links[-1]

    def serve_at(self, victim: ProcessPeer) -> Remote:
        victim.do("serve", link="p", url=self.url, **self.options)
        return Remote(victim, "p")

    def connect(self) -> Remote:
        """A reader in this process, whose calls can wait in the background."""
        return self.connect_at(self.here, f"r{time.monotonic_ns()}")

    def connect_at(self, peer: Handle, name: str = "r") -> Remote:
        peer.do("connect", link=name, url=self.url, timeout=PATIENCE, **self.options)
        return Remote(peer, name)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.links.clear()
        self.here.end()


def timed(future: Future[Any]) -> Future[float]:
    """When the future ended; comes a moment after its result, whose waiter is woken first."""
    ended: Future[float] = Future()
    future.add_done_callback(lambda _: ended.set_result(time.monotonic()))
    return ended


def kill(victim: ProcessPeer) -> float:
    """SIGKILL; the moment at which the process was gone."""
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    return time.monotonic()


@contextmanager
def forked_twice(connect: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """A child that connects, and a grandchild that keeps the connection; how to kill the child."""
    reading, writing = os.pipe()
    told, telling = os.pipe()
    victim = os.fork()
    if victim == 0:
        os.close(writing)
        kept = connect()
        if os.fork() == 0:
            os.write(telling, b"x")
        os.read(reading, 1)  # both stay until the pipe ends
        del kept
        os._exit(0)

    def kill_child() -> None:
        os.read(told, 1)  # the grandchild is there
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)

    for fd in (reading, telling):
        os.close(fd)
    try:
        yield kill_child
    finally:
        for fd in (writing, told):
            os.close(fd)
