"""Who waits for a file to appear is woken by its maker, and by nobody else's absence of one."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from pathlib import Path

import pytest

from omni_kvlink import ConnectorError
from omni_kvlink.connectors.runtime.user_files import WakeupFifo, wait_readable, wake

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a")


def test_a_wake_is_seen_by_those_who_were_armed_before(path: str) -> None:
    with WakeupFifo(path) as first, WakeupFifo(path) as second, WakeupFifo(path) as late:
        early = [first.arm(), second.arm()]
        assert wait_readable(0.0, *early) == []
        wake(path)
        assert wait_readable(60.0, *early) == early
        assert wait_readable(0.0, late.arm()) == []
        assert wait_readable(0.0, first.arm()) == []
    assert os.listdir(os.path.dirname(path)) == []


def test_nobody_waits(path: str) -> None:
    wake(path)
    wake(f"{path}/not/there")
    assert not os.path.exists(f"{path}.wait")


def test_a_fifo_that_a_dead_process_left(path: str) -> None:
    child = os.fork()
    if child == 0:
        WakeupFifo(path).arm()
        os._exit(0)
    os.waitpid(child, 0)
    with WakeupFifo(path) as fifo:
        fd = fifo.arm()
        assert wait_readable(0.0, fd) == []
        wake(path)
        assert wait_readable(60.0, fd) == [fd]
    assert not os.path.exists(f"{path}.wait")


def test_who_leaves_takes_the_fifo_along_and_wakes_the_others(path: str) -> None:
    """They make another: none waits at one that nobody finds."""
    with WakeupFifo(path) as stays:
        leaves = WakeupFifo(path)
        leaves.arm()
        fd = stays.arm()
        leaves.close()
        assert wait_readable(60.0, fd) == [fd]
        fd = stays.arm()
        leaves.close()  # a second time: nothing
        assert wait_readable(0.0, fd) == []
        wake(path)
        assert wait_readable(60.0, fd) == [fd]


def test_who_leaves_without_a_free_descriptor(path: str) -> None:
    fifo = WakeupFifo(path)
    fd = fifo.arm()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, hard))
    plugs = list[int]()
    try:
        with contextlib.suppress(OSError):
            while True:
                plugs.append(os.dup(2))
        fifo.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for plug in plugs:
            os.close(plug)
    assert not os.path.exists(f"{path}.wait")


def test_nobody_misses_a_file(path: str) -> None:
    """Whatever the order of those who look, make and leave: each finds the file of each round."""
    rounds = 40
    ready, missed = threading.Barrier(6), []

    def wait(number: int) -> None:
        for turn in range(rounds):
            ready.wait(60)
            with WakeupFifo(path) as fifo:
                while not os.path.exists(f"{path}{turn}"):
                    fd = fifo.arm()
                    if number == 0 and turn % 2:
                        break  # one leaves early
                    if os.path.exists(f"{path}{turn}"):
                        break
                    if not wait_readable(60.0, fd):
                        missed.append((number, turn))

    threads = [threading.Thread(target=wait, args=[number]) for number in range(5)]
    for thread in threads:
        thread.start()
    for turn in range(rounds):
        ready.wait(60)
        Path(f"{path}{turn}").touch()
        wake(path)
    for thread in threads:
        thread.join()
    assert missed == []
    assert not os.path.exists(f"{path}.wait")


def test_what_is_no_fifo_is_refused(path: str) -> None:
    Path(f"{path}.wait").touch()
    with pytest.raises(ConnectorError, match="is no FIFO; remove it"), WakeupFifo(path) as fifo:
        fifo.arm()


def test_a_directory_that_takes_no_files(tmp_path: Path) -> None:
    with (
        pytest.raises(ConnectorError, match="start the producer first"),
        WakeupFifo(str(tmp_path / "not there" / "a")) as fifo,
    ):
        fifo.arm()
