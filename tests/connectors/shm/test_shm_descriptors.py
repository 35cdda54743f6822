"""Processes without a free descriptor, with very many, and with links that ended."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVConsumer, KVLink, KVLinkError
from omni_kvlink.connectors.protocol.messages import Hello, own_hello
from omni_kvlink.connectors.shm.rendezvous import NamedListener, dial
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until, until_freed
from support import FOLDER
from support.connectors.shm_unauthorized import dialled, greeted
from support.faults.harness import Field, Start, kill

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("leaves_nothing")
URL = "shm://name"


class Process:
    """A process that runs the commands of `shm_scarce.py`."""

    def __init__(self, directory: str):
        program = str(FOLDER / "connectors" / "shm_scarce.py")
        self._popen = subprocess.Popen(
            [sys.executable, program, URL, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, *command: Any) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command) + "\n")
        self._popen.stdin.flush()

    def result(self) -> Any:
        assert self._popen.stdout is not None
        return json.loads(self._popen.stdout.readline())

    def call(self, *command: Any) -> Any:
        self.begin(*command)
        return self.result()

    def close(self) -> None:
        self._popen.communicate()


@pytest.fixture
def process(sockets: str) -> Iterator[Process]:
    process = Process(sockets)
    yield process
    process.close()


@pytest.fixture
def path(sockets: str) -> str:
    return f"{sockets}/name.sock"


# A producer without a free descriptor


def test_it_serves_its_readers_and_does_not_spin(process: Process, sockets: str, path: str) -> None:
    """A connection waits in the kernel's queue until a reader has left."""
    process.call("serve", 3600.0)
    failed = {"accept failed": 1}
    with KVLink.connect(URL, directory=sockets, timeout=60) as reader, greeted(path) as leaving:
        process.call("exhaust", 0)
        with dialled(path) as waiting:
            waiting.send(own_hello())
            until(lambda: process.call("stats")["refused"] == failed, "a connection waits")
            for number in range(20):
                process.call("put", f"k{number}")
                with reader.get(f"k{number}", timeout=60) as data:
                    assert fingerprint(data) == fingerprint(Recipe(f"k{number}").make())
                del data
            assert process.call("stats")["refused"] == failed
            leaving.sock.close()
            assert isinstance(waiting.receive()[0], Hello)
        assert process.call("stats")["refused"] == failed
        process.call("free")
        process.call("close")


def test_it_accepts_again_after_a_while(process: Process, path: str) -> None:
    """Who closed a descriptor is not known to it."""
    process.call("serve", 0.05)
    process.call("exhaust", 0)
    with dialled(path) as waiting:
        waiting.send(own_hello())
        until(lambda: process.call("stats")["refused"] != {}, "a connection waits")
        process.call("free")
        assert isinstance(waiting.receive()[0], Hello)
    process.call("close")


def test_it_takes_no_reader_whose_end_it_could_not_see(process: Process, path: str) -> None:
    """The last descriptor is the connection's; there is none for its process."""
    process.call("serve", 3600.0)
    process.call("exhaust", 1)
    with dialled(path) as dropped:
        assert dropped.is_dropped()
        stats = process.call("stats")
        assert (stats["readers"], stats["refused"]) == (0, {"accept failed": 1})
    process.call("close")


def test_it_closes(process: Process, sockets: str, path: str) -> None:
    """The files are removed, and nothing breaks down."""
    process.call("serve", 3600.0)
    process.call("exhaust", 0)
    assert process.call("close") is None
    assert process.call("stats")["closed"]
    assert os.listdir(sockets) == []


# A reader without a free descriptor


def test_it_gives_back_what_it_holds(process: Process, sockets: str) -> None:
    """Its connection ends, since an arena cannot be passed; it still reads what it has."""
    with KVLink.serve(URL, directory=sockets, mode="sealed", inline=0, quota=16 << 20) as producer:
        process.call("connect")
        first = producer.put(Recipe("k0").make())
        process.call("hold", "k0")
        process.call("exhaust", 0)
        second = producer.put(Recipe("k1").make())
        error = process.call("get", "k1")["error"]
        assert error.startswith("WireError: ")
        assert "ulimit -n" in error
        process.call("free")
        assert process.call("get", "k1") == fingerprint(Recipe("k1").make())
        second.wait(timeout=60)
        assert first.state == "leased"
        assert process.call("drop", "k0") == fingerprint(Recipe("k0").make())
        first.wait(timeout=60)
        until_freed(producer)
        until(lambda: producer.stats()["readers"] == 1, "the first connection is over")
        process.call("close")


# Very many


def test_more_than_select_can_take(process: Process, sockets: str, path: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1300:
        pytest.skip(f"a process may have {hard} descriptors")
    assert process.call("open_many", 1100) > 1024
    process.begin("connect")
    until(Path(f"{path}.wait").exists, "it waits")
    with KVLink.serve(URL, directory=sockets) as producer:
        assert process.result() is None
        producer.put(Recipe("k").make())
        assert process.call("get", "k") == fingerprint(Recipe("k").make())
        process.call("close")


def test_more_waiting_readers_than_inotify_instances(path: str) -> None:
    """A user may have 128 of those, usually; waiting takes none."""
    count = 150
    connected: list[socket.socket] = []
    with_cancel = os.eventfd(0)

    def connect() -> None:
        connected.append(dial(path, 60.0, with_cancel))

    threads = [threading.Thread(target=connect) for _ in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: _open_count(f"{path}.wait") == count, "all wait")
    listener = NamedListener(path)
    listener.sock.settimeout(60)
    for _ in range(count):
        listener.sock.accept()[0].close()
    for thread in threads:
        thread.join()
    assert len(connected) == count
    for sock in connected:
        sock.close()
    listener.close()
    os.close(with_cancel)


def _open_count(path: str) -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{number}") == path
    return found


# Ended


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Servers switch the cyclic collector off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _open_files() -> list[str]:
    """The kinds of descriptors that this process has."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            found.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    return sorted(found)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("end", ["kill", "close"])
def test_sessions_of_dead_producers_keep_no_descriptor(
    pooled: Field, start: Start, end: str
) -> None:
    """The reader connects again and again."""
    start().close()  # the first start opens what is then kept
    before = len(_open_files())
    with contextlib.ExitStack() as stack:
        reader: KVConsumer | None = None
        for _ in range(3):
            target = start()
            pooled.serve_at(target).call("put", recipe=Recipe("k").to_dict())
            if reader is None:
                reader = KVLink.connect(pooled.url, timeout=60, **pooled.options)
                stack.enter_context(reader)
            with reader.get("k", timeout=60) as data:
                assert fingerprint(data) == fingerprint(Recipe("k").make())
            del data
            if end == "kill":
                kill(target)
            else:
                target.call("close", link="p")
            stats = reader.stats
            until(lambda: not stats()["connected"], "the reader noticed")  # noqa: B023
            target.close()
            # One of the link, to wake it; one of its last session, which it keeps.
            until(lambda: len(_open_files()) <= before + 2, "the session's are closed")


@pytest.mark.usefixtures("no_collection")
def test_a_connection_that_could_not_be_made_keeps_no_descriptor(
    process: Process, sockets: str
) -> None:
    """Though its error, which refers to all that had been made, is kept."""
    kept = list[BaseException]()
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process.call("serve", 3600.0)
    before = len(os.listdir("/proc/self/fd"))
    for free in range(12):
        numbers = set(map(int, os.listdir("/proc/self/fd")))
        unused = (number for number in itertools.count() if number not in numbers)
        limit = next(itertools.islice(unused, free, None))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            KVLink.connect(URL, directory=sockets, timeout=60).close()
        except KVLinkError as error:
            kept.append(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    assert len(kept) > 3
    own = len(kept)  # by which another thread interrupts the call
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + own, "all others are closed")
    kept.clear()
    process.call("close")


def test_connections_of_dead_readers_keep_no_descriptor(pooled: Field, start: Start) -> None:
    start().close()  # the first start opens what is then kept
    producer = pooled.serve()
    before = len(_open_files())
    for _ in range(3):
        target = start()
        pooled.connect_at(target).submit("get", key="k", timeout=60)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        kill(target)
        until(lambda: producer.stats()["transfers"]["waiting"] == 0, "its death was seen")
        target.close()
        until(lambda: len(_open_files()) <= before, "the connection's are closed")
