"""Fault tests: links of this process and of child processes that are killed or frozen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVLink, KVLinkError, KVProducer
from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.testing.peer_harness import PATIENCE, Peer, ProcessPeer, RemoteLink, ThreadPeer
from omni_kvlink.testing.rig import expect, until
from support.connectors.held_loops import live_loops
from support.faults.peer_commands import PeerCommands

if TYPE_CHECKING:
    import pytest

Start = Callable[..., ProcessPeer]


class Field:
    """One URL, with links of this process and of child processes."""

    def __init__(self, directory: str, mode: str = "pooled", url: str = "shm://field"):
        self.url = url
        self.options: dict[str, Any] = {"directory": directory, "quota": 4 << 20}
        # "inline" is no mode of a link: small payloads travel inside their offers.
        self.options |= {"inline": INLINE} if mode == "inline" else {"mode": mode, "inline": 0}
        self.commands = PeerCommands()
        self.here = ThreadPeer(self.commands)
        self.links: list[KVProducer] = []

    def serve(self) -> KVProducer:
        self.links.append(KVLink.serve(self.url, **self.options))
        return self.links[-1]

    def serve_at(self, target: ProcessPeer) -> RemoteLink:
        target.call("serve", link="p", url=self.url, **self.options)
        return RemoteLink(target, "p")

    def connect(self) -> RemoteLink:
        """A reader in this process, whose calls can wait in the background."""
        return self.connect_at(self.here, f"r{time.monotonic_ns()}")

    def connect_at(self, peer: Peer, name: str = "r") -> RemoteLink:
        peer.call("connect", link=name, url=self.url, timeout=PATIENCE, **self.options)
        return RemoteLink(peer, name)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.links.clear()
        self.here.close()


def kill(target: ProcessPeer) -> None:
    """Kill a process, and wait until it has ended."""
    os.kill(target.process.pid, signal.SIGKILL)
    target.process.wait()


def expect_reason(
    kind: type[KVLinkError], reason: str, call: Callable[[float], object]
) -> KVLinkError:
    """Call with a timeout, a longer one if the error does not know the reason by then."""
    for timeout in (0.2, 2.0, 20.0):
        error = expect(kind, call, timeout)
        if reason in str(error):
            return error
    raise error


def until_loops_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until every event loop of this process sleeps for 30 s, if nothing happens."""
    sleeps: dict[EventLoop, float] = {}
    sleep = EventLoop._sleep  # for how long it sleeps is told to nobody else

    def record(loop: EventLoop, seconds: float) -> None:
        sleeps[loop] = seconds
        sleep(loop, seconds)

    monkeypatch.setattr(EventLoop, "_sleep", record)  # as above
    loops = live_loops()
    assert loops
    for loop in loops:
        loop.call(lambda: None)  # its next sleep is recorded
    until(lambda: all(sleeps.get(loop, 0.0) > 30 for loop in loops), "every loop sleeps")


@contextmanager
def forked_twice(connect: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Yield a function that kills a child whose connection a grandchild holds open."""
    reading, writing = os.pipe()
    ready, signal_ready = os.pipe()
    target = os.fork()
    if target == 0:
        os.close(writing)
        kept = connect()
        if os.fork() == 0:
            os.write(signal_ready, b"x")
        os.read(reading, 1)  # both stay until the pipe ends
        del kept
        os._exit(0)

    def kill_child() -> None:
        os.read(ready, 1)  # the grandchild is there
        os.kill(target, signal.SIGKILL)
        os.waitpid(target, 0)

    for fd in (reading, signal_ready):
        os.close(fd)
    try:
        yield kill_child
    finally:
        for fd in (writing, ready):
            os.close(fd)
