"""Two ends of a UCX plane, the other in a process of its own, and what a request came to."""

from __future__ import annotations

import importlib.util
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxRequest, UcxTransport
from omni_kvlink.testing.rig import until

if importlib.util.find_spec("ucxx") is None:  # loading it would change every other test's process
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from ucx_killed_process import PATIENCE, Victim, pattern

BIG = 235_000_000
CLOSED = 2.5
NOTICED = 1.0
"""Seconds from a peer's end to every request's error; on loopback it takes a millisecond."""


class Outcome:
    """What `done` was told; a second call is an error of its own."""

    def __init__(self) -> None:
        self.calls: list[BaseException | None] = []
        self.threads: list[str] = []
        self._event = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.calls.append(error)
        self.threads.append(threading.current_thread().name)
        self._event.set()

    def ended(self, timeout: float) -> bool:
        return self._event.wait(timeout)

    def wait(self, timeout: float = PATIENCE) -> BaseException | None:
        assert self._event.wait(timeout), "the request is not over"
        assert len(self.calls) == 1
        return self.calls[0]


class Pair:
    """A plane here, connected to a victim's."""

    def __init__(self, victim: Victim):
        self.victim, self.ucx_transport = victim, UcxTransport()
        self.me = self.ucx_transport.address.hex()
        self.peer: UcxEndpoint = self.ucx_transport.connect(
            bytes.fromhex(victim.do("connect", address=self.me))
        )

    def fetch(self, memory: Any, tag: int, **how: Any) -> tuple[Outcome, int]:
        """Receive `memory` from the victim, which is asked once the receive waits."""
        outcome = Outcome()
        self.ucx_transport.receive(self.peer, memory, tag, outcome)
        how.setdefault("nbytes", len(memory))
        return outcome, self.victim.ask("send", to=self.me, tag=tag, **how)

    def push(self, memory: Any, tag: int, **how: Any) -> tuple[Outcome, int]:
        """Send `memory` to the victim, which waits for it."""
        outcome = Outcome()
        how.setdefault("nbytes", len(memory))
        number = self.victim.ask("receive", to=self.me, tag=tag, **how)
        assert self.victim.answer(number) == "waiting"
        self.ucx_transport.send(self.peer, memory, tag, outcome)
        return outcome, -number

    def warm(self) -> None:
        """Connected both ways: the next message leaves when it is sent, also a long one's offer."""
        for transport in (self.fetch, self.push):
            outcome, number = transport(pattern(100_000, 1), 1)
            assert (outcome.wait(), self.victim.answer(number)) == (None, None)

    def freeze_amid(self, memory: Any) -> tuple[UcxRequest, Outcome, int]:
        """Stop the victim when it has sent a part of `memory`."""
        for tag in range(50, 60):
            outcome = Outcome()
            request = self.ucx_transport.receive(self.peer, memory, tag, outcome)
            number = self.victim.ask("send", to=self.me, nbytes=len(memory), tag=tag)
            until(lambda it=outcome: self.stat("active") == 1 or it.calls, "it was matched")
            self.victim.signal(signal.SIGSTOP)
            if not outcome.ended(0.3):  # what is in the sockets comes all the same
                return request, outcome, number
            self.victim.signal(signal.SIGCONT)
        raise AssertionError("the victim could not be stopped in time")

    def stat(self, name: str) -> int:
        return int(self.ucx_transport.stats()[name])

    def close(self) -> None:
        self.ucx_transport.close()


@pytest.fixture(scope="module")
def bystander() -> Iterator[Victim]:
    """A victim that is never hurt."""
    victim = Victim()
    yield victim
    victim.end()


@pytest.fixture
def pair(bystander: Victim) -> Iterator[Pair]:
    pair = Pair(bystander)
    yield pair
    pair.close()


@pytest.fixture
def doomed() -> Iterator[Pair]:
    victim = Victim()
    pair = Pair(victim)
    pair.warm()
    yield pair
    pair.close()
    victim.end()


class Marked:
    """Memory that says when the last reference to it is gone."""

    def __init__(self, memory: bytearray):
        import ctypes

        self.memory: Any = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._alive = weakref.ref(self.memory)

    def is_free(self) -> bool:
        self.memory = None
        return self._alive() is None
