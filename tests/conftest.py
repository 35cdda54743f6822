"""Fixtures for every test: private socket directories, and no test may leave anything behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

# Before torch is imported: its threads spin while they wait, and starve other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from omni_kvlink import KVConsumer, KVLink, KVProducer
from support import FOLDER
from support.link.aio_ends import run as run
from support.processes import fork_server

if TYPE_CHECKING:
    from collections.abc import Iterator

with contextlib.suppress(ImportError):  # the environments of the hosts do not have it
    import hypothesis

    hypothesis.settings.register_profile(
        "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("tests")
_began = time.monotonic()
_numbers = itertools.count()
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "skip the tests that would begin later, as `make check` does"
    parser.addoption("--seconds", type=float, default=float("inf"), help=about)


def pytest_configure(config: pytest.Config) -> None:
    # Another run's links may have the same names: sockets of default directories are apart.
    paths = (str(FOLDER.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for programs of tests
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="kvl-")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        fork_server.install()  # not in the process that only distributes tests


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # a worker has none
        session.config.pluginmanager.register(Failures(terminal))


def pytest_unconfigure() -> None:
    fork_server.close()
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    if call.excinfo is not None:
        item.stash[_failed] = True
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _began > item.config.getoption("--seconds"):
        pytest.skip("left to `make test`")


class Failures:
    """Names each failure when it happens, below the dots; the traceback comes at the end."""

    def __init__(self, terminal: Any):
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr).partition("\n")[0]
            self._terminal.ensure_newline()
            self._terminal.write_line(f"FAILED {report.nodeid} ({report.when}): {reason}", red=True)


@pytest.fixture(autouse=True)
def _no_cyclic_collector() -> Iterator[None]:
    """Do without it, as servers do: what a test waits for is not left to it."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _as_many_threads() -> Iterator[None]:
    """Restore torch's thread count after a test; the order of sums depends on it."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def sockets(request: pytest.FixtureRequest) -> Iterator[str]:
    """A directory for shm sockets, short enough for a Unix socket's path; empty at the end."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    yield directory
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert not left or request.node.stash.get(_failed, False), (
        f"left in the socket's directory: {left}"
    )


@pytest.fixture(params=["inproc", "shm", "sealed"])
def ends(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    """A producer and a consumer, over each connector and mode; small payloads have a slot, too."""
    scheme = "inproc" if request.param == "inproc" else "shm"
    url = f"{scheme}://link-{next(_numbers)}"
    options: dict[str, Any] = {"directory": sockets, "quota": 8 << 20, "inline": 0}
    if request.param == "sealed":
        options["mode"] = "sealed"
    with (
        KVLink.serve(url, **options) as producer,
        KVLink.connect(url, timeout=60, **options) as consumer,
    ):
        yield producer, consumer


@pytest.fixture
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves descriptors or threads of this process behind."""
    before, threads = _descriptors(), set(threading.enumerate())
    yield
    if request.node.stash.get(_failed, False):
        return  # its traceback keeps its links alive
    request.node.funcargs.clear()  # pytest itself would keep closed links alive
    deadline = time.monotonic() + 60
    while _leftovers(before, threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _leftovers(before, threads)


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _leftovers(before: dict[str, str], threads: set[threading.Thread]) -> list[str]:
    new = [
        f"descriptor {number}: {what}"
        for number, what in _descriptors().items()
        if before.get(number) != what
    ]
    return new + [
        f"thread {thread.name}" for thread in threading.enumerate() if thread not in threads
    ]
