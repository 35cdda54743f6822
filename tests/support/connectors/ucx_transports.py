"""A UCX transport here, connected to one in another process, and the outcome of a request."""

from __future__ import annotations

import importlib.util
import signal
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxRequest, UcxTransport
from omni_kvlink.testing.rig import until
from support.faults.frozen import freeze

if importlib.util.find_spec("ucxx") is None:  # loading it would change every other test's process
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from support.connectors.ucx_killed_process import PATIENCE, UcxProcess, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

BIG = 235_000_000


class Outcome:
    """Records the calls of `done`; there must be one."""

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
        assert self._event.wait(timeout), "the request is not done"
        assert len(self.calls) == 1
        return self.calls[0]


class Pair:
    """A transport here, connected to the one of another process."""

    def __init__(self, remote: UcxProcess):
        self.remote, self.ucx_transport = remote, UcxTransport()
        self.me = self.ucx_transport.address.hex()
        self.peer: UcxEndpoint = self.ucx_transport.connect(
            bytes.fromhex(remote.call("connect", address=self.me))
        )

    def fetch(self, memory: Any, tag: int, **how: Any) -> tuple[Outcome, int]:
        """Receive `memory` from the process, which sends when the receive is posted."""
        outcome = Outcome()
        self.ucx_transport.receive(self.peer, memory, tag, outcome)
        how.setdefault("nbytes", len(memory))
        return outcome, self.remote.submit("send", to=self.me, tag=tag, **how)

    def push(self, memory: Any, tag: int, **how: Any) -> tuple[Outcome, int]:
        """Send `memory` to the process, which has posted a receive."""
        outcome = Outcome()
        how.setdefault("nbytes", len(memory))
        number = self.remote.submit("receive", to=self.me, tag=tag, **how)
        assert self.remote.answer(number) == "waiting"
        self.ucx_transport.send(self.peer, memory, tag, outcome)
        return outcome, -number

    def warm(self) -> None:
        """Connect both ways, so that the next message leaves at once."""
        for transport in (self.fetch, self.push):
            outcome, number = transport(pattern(100_000, 1), 1)
            assert (outcome.wait(), self.remote.answer(number)) == (None, None)

    def freeze_amid(self, memory: Any) -> tuple[UcxRequest, Outcome, int]:
        """Stop the process when it has sent a part of `memory`."""
        for tag in range(50, 60):
            outcome = Outcome()
            request = self.ucx_transport.receive(self.peer, memory, tag, outcome)
            number = self.remote.submit("send", to=self.me, nbytes=len(memory), tag=tag)
            until(partial(self._is_matched, outcome), "it was matched")
            freeze(self.remote.process.pid)
            if not outcome.ended(0.3):  # what is in the sockets still arrives
                return request, outcome, number
            self.remote.signal(signal.SIGCONT)
        raise AssertionError("the process could not be stopped in time")

    def _is_matched(self, outcome: Outcome) -> bool:
        return self.stat("active") == 1 or bool(outcome.calls)

    def stat(self, name: str) -> int:
        return int(self.ucx_transport.stats()[name])

    def close(self) -> None:
        self.ucx_transport.close()


@pytest.fixture(scope="module")
def shared_process() -> Iterator[UcxProcess]:
    """A process that no test stops or kills."""
    remote = UcxProcess()
    yield remote
    remote.close()


@pytest.fixture
def pair(shared_process: UcxProcess) -> Iterator[Pair]:
    pair = Pair(shared_process)
    yield pair
    pair.close()


@pytest.fixture
def fresh_pair() -> Iterator[Pair]:
    remote = UcxProcess()
    pair = Pair(remote)
    pair.warm()
    yield pair
    pair.close()
    remote.close()


class TrackedMemory:
    """Memory that tells whether it is still referenced."""

    def __init__(self, memory: bytearray):
        import ctypes

        self.memory: Any = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._alive = weakref.ref(self.memory)

    def is_free(self) -> bool:
        self.memory = None
        return self._alive() is None
