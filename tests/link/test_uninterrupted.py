"""Opening and closing a link: an exception of a signal handler ends the wait and leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import BusyError, KVLink, KVProducer
from omni_kvlink.connectors.shm.consumer import ShmConsumer
from omni_kvlink.system.threads import is_abandoned, start_detached, uninterrupted
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until
from support.link.ends import end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

MAIN = threading.main_thread()
handled = threading.Event()


class HandlerError(Exception):
    """What the handler of these tests raises."""


@pytest.fixture
def handler() -> Iterator[None]:
    def raise_error(number: int, frame: FrameType | None) -> None:
        if not handled.is_set():
            handled.set()
            raise HandlerError

    handled.clear()
    before = signal.signal(signal.SIGUSR1, raise_error)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    """Have the handler raise in the main thread, once.

    A signal that comes just before that thread waits for a lock does not end its wait: the next
    one does.
    """
    while not handled.is_set():
        signal.pthread_kill(MAIN.ident or 0, signal.SIGUSR1)
        handled.wait(0.1)


def test_a_call_runs_in_another_thread_than_the_main_one() -> None:
    known = threading.enumerate()
    assert uninterrupted(threading.current_thread) is not MAIN
    assert threading.enumerate() == known
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0)
    found: list[threading.Thread] = []
    other = threading.Thread(target=lambda: found.append(uninterrupted(threading.current_thread)))
    other.start()
    other.join()
    assert found == [other]


def test_where_there_is_no_thread_it_runs_in_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    assert uninterrupted(threading.current_thread) is MAIN


@pytest.mark.usefixtures("handler")
def test_what_an_interrupted_call_returns_is_undone() -> None:
    goes_on, undone, cancelled = threading.Event(), list[str](), list[int]()

    def call() -> str:
        interrupt()
        goes_on.wait()
        return "opened"

    def cancel(thread: int) -> None:
        cancelled.append(thread)
        goes_on.set()

    with pytest.raises(HandlerError):
        uninterrupted(call, undo=undone.append, cancel=cancel)
    until(lambda: undone == ["opened"], "it is undone")
    assert cancelled[0] not in (0, MAIN.ident)


@pytest.mark.usefixtures("handler", "leaves_nothing")
@pytest.mark.parametrize("url", ["inproc://nobody", "shm://nobody", "zmq+ipc://{}/n"])
def test_a_connect_that_waits_ends_at_once(url: str, sockets: str) -> None:
    """Not at its own deadline, in another thread: nothing waits on for the producer."""
    before = threading.enumerate()
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(HandlerError):
        KVLink.connect(url.format(sockets), timeout=3600, directory=sockets)
    timer.join()

    until(lambda: threading.enumerate() == before, "it has ended")


@pytest.mark.usefixtures("handler")
def test_an_interrupted_serve_frees_the_name(sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVProducer

    def slow(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        interrupt()
        return made

    with monkeypatch.context() as patch:
        patch.setattr("omni_kvlink.link.kvlink.KVProducer", slow)
        slow.close = real.close  # type: ignore[attr-defined]
        with pytest.raises(HandlerError):
            KVLink.serve("shm://name", directory=sockets)

    def is_free() -> bool:
        try:
            KVLink.serve("shm://name", directory=sockets).close()
        except BusyError:
            return False
        return True

    until(is_free, "it is closed")


@pytest.mark.usefixtures("handler")
def test_an_interrupted_close_goes_on(sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link, goes_on = KVLink.serve("shm://name", directory=sockets), threading.Event()
    real = end_of(link).close

    def slow() -> None:
        interrupt()
        goes_on.wait()
        real()

    monkeypatch.setattr(end_of(link), "close", slow)
    with pytest.raises(HandlerError):
        link.close()
    goes_on.set()
    until(lambda: not (Path(sockets) / "name.sock").exists(), "it is closed")


@pytest.mark.usefixtures("handler")
def test_a_connect_that_is_interrupted_before_it_waits(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt finds no consumer to close, and the consumer sees that nobody waits for it."""
    real, ended = ShmConsumer.connect, threading.Event()

    def late(self: ShmConsumer, timeout: float) -> Any:
        interrupt()
        until(is_abandoned, "the caller is gone")
        try:
            return real(self, timeout)
        finally:
            ended.set()

    monkeypatch.setattr(ShmConsumer, "connect", late)
    with pytest.raises(HandlerError):
        KVLink.connect("shm://nobody", timeout=3600, directory=sockets)
    assert ended.wait(60)


def test_a_link_whose_close_did_not_begin_is_closed_at_exit(sockets: str) -> None:
    """As an exception leaves it that comes in the first line of `close`."""
    program = (
        "import sys; from omni_kvlink import KVLink\n"
        "kept = KVLink.serve('shm://kept', directory=sys.argv[1]); kept._closed = True"
    )
    subprocess.run([sys.executable, "-c", program, sockets], check=True, timeout=100)
    assert not (Path(sockets) / "kept.sock").exists()


def test_an_interrupted_put_in_the_background_keeps_its_memory(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has started and writes there: nobody else is given that memory."""
    goes_on, data = threading.Event(), Recipe("k").make()

    def start(function: Callable[[], object]) -> None:
        def run() -> None:
            goes_on.wait()
            function()

        start_detached(run)
        raise KeyboardInterrupt

    with (
        KVLink.serve("shm://name", directory=sockets) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        allocation = producer.allocate(data)
        target: Any
        for target, tensor in zip(allocation.data.tensors(), data.tensors(), strict=True):
            target.copy_(tensor)
        del target
        monkeypatch.setattr("omni_kvlink.link.put_operation.start_detached", start)
        with pytest.raises(KeyboardInterrupt):
            producer.put(allocation.data, background=True)
        del allocation
        assert producer.stats()["memory"]["used"]
        goes_on.set()
        with consumer.get("k", timeout=60) as received:
            assert fingerprint(received) == fingerprint(data)
