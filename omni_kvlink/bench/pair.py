"""The two ends of a benchmark: a producer in this process, and its reader in another one.

Where both ends must be in one process (`inproc`), the reader is a thread.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.baselines import LOOPBACK
from omni_kvlink.bench.chunks import Pipe
from omni_kvlink.bench.reader import ReaderCommands
from omni_kvlink.bench.remote import open_remote
from omni_kvlink.bench.report import BenchError
from omni_kvlink.connectors.registry import schemes
from omni_kvlink.errors import KVLinkError, UnavailableError
from omni_kvlink.link import KVLink, KVProducer
from omni_kvlink.testing.peer_harness import Peer, PeerError, PeerExited, ProcessPeer, ThreadPeer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Future
    from contextlib import AbstractContextManager


TIMEOUT = 60.0
"""Seconds in which a payload must be put, received or released."""


class Pair:
    """A producer's link and its reader, a peer that has the commands of `ReaderCommands`.

    With `own_thread` the reader is a thread of this process. `host` is an address of this host at
    which the reader reaches it; `clock` says by what clock the reader's moments are, if it is
    another host's.
    """

    def __init__(
        self,
        link: KVProducer,
        peer: Peer,
        *,
        own_thread: bool,
        host: str = LOOPBACK,
        clock: str = "",
    ):
        self.link, self.peer, self.own_thread = link, peer, own_thread
        self.host, self.clock = host, clock

    def begin(self, command: str, **arguments: Any) -> Future[Any]:
        """Begin a command of the reader that gets a payload; returns when the reader sleeps."""
        reading = self.peer.submit(command, timeout=TIMEOUT, **arguments)
        self.wait_until_requested()
        return reading

    def wait_until_requested(self, *, timeout: float = 10.0) -> None:
        """Wait until the reader's `get` has reached the producer, and the reader sleeps."""
        deadline = time.monotonic() + timeout
        while self.link.stats().get("transfers", {}).get("waiting", 1) < 1:
            if time.monotonic() > deadline:
                raise BenchError(f"the reader's get did not arrive within {timeout:g} s")
            time.sleep(0.0002)
        self.wait_until_asleep()

    def wait_until_asleep(self) -> None:
        """Give the reader time to fall asleep: waking one that still runs would be too easy."""
        time.sleep(0.002)


@contextlib.contextmanager
def open_pair(
    connector: str,
    *,
    url: str = "",
    connect: str = "",
    threads: int = 1,
    connecting: Mapping[str, Any] | None = None,
    **serving: Any,
) -> Iterator[Pair]:
    """Serve with the options of `KVLink.serve`, and connect a reader; closes both at the end.

    `connecting` are the reader's options of `KVLink.connect`.

    The URL has a fresh address unless it is given; with `connect`, the URL of `kvlink-bench serve`,
    the reader is that of another host. `threads` are torch's in the reader. It raises
    `BenchError` if the link cannot be made, or if the reader ended, does not answer or raised an
    error that is not the library's own.
    """
    if not url and connector not in schemes():
        raise UnavailableError(f"no connector {connector!r}; there are {', '.join(schemes())}")
    own_thread = (url or f"{connector}:").partition(":")[0] == "inproc"
    if connect and own_thread:
        raise BenchError("--connect: inproc has no reader in another process; give a --connector")
    with _as_bench_errors(), contextlib.ExitStack() as opened:
        host, clock = LOOPBACK, ""
        if connect:
            peer, host, clock = open_remote(connect)
        else:
            peer = _start_reader(own_thread)
        opened.callback(peer.close)
        try:
            link = KVLink.serve(
                url or f"{connector}://{_fresh_address(connector, host)}", **serving
            )
        except ValueError as error:
            raise BenchError(str(error)) from None
        opened.enter_context(link)
        try:
            reader_options = {"threads": threads, "options": dict(connecting or {})}
            peer.submit("connect", url=link.url, timeout=20.0, **reader_options).result(60.0)
            yield Pair(link, peer, own_thread=own_thread, host=host, clock=clock)
            peer.call("close")
        except BaseException:
            link.close()  # wakes a reader that waits, so that it can end
            raise


def open_setup(setup: Any, **options: Any) -> AbstractContextManager[Pair]:
    """Open the pair of a command's setup; `options` are further ones of `open_pair`, or others."""
    names = ("copier", "digests", "mode", "inline")
    serving = {name: getattr(setup, name) for name in names if hasattr(setup, name)}
    reader = {"url": setup.url, "connect": setup.connect}
    return open_pair(setup.connector, **reader, **{**serving, **options})


@contextlib.contextmanager
def open_pipe(pair: Pair) -> Iterator[Pipe]:
    """Open a pipe to a pair's reader."""
    with tempfile.TemporaryDirectory(prefix="kvlink-bench-") as directory:
        path = os.path.join(directory, "pipe")
        for suffix in ("", "-back"):
            os.mkfifo(path + suffix, 0o600)
        with contextlib.closing(Pipe(path, is_sender=True)) as pipe:
            pair.peer.call("open_pipe", path=path)
            pipe.connect()
            yield pipe


def _start_reader(own_thread: bool) -> Peer:
    if own_thread:
        return ThreadPeer(ReaderCommands(own_thread=True), concurrent=False)
    return ProcessPeer(module="omni_kvlink.bench.reader", concurrent=False)


@contextlib.contextmanager
def _as_bench_errors() -> Iterator[None]:
    try:
        yield
    except KVLinkError:
        raise
    except PeerExited as error:
        raise BenchError(str(error)) from None
    except PeerError as error:
        raise BenchError(f"the reader failed: {error}") from None
    except futures.TimeoutError:
        raise BenchError("the reader did not answer in time") from None


def _fresh_address(connector: str, host: str) -> str:
    """An address that no other process serves, of this host's interface for those over TCP."""
    name = f"bench-{os.getpid()}-{os.urandom(3).hex()}"
    return {
        "zmq+tcp": f"{host}:0?insecure=1",  # ZMQ alone, without encryption
        "ucx": f"{host}:0?trusted_network=1",  # meanwhile this machine's users are trusted
        "zmq+ipc": f"{tempfile.gettempdir()}/kvlink-{os.geteuid()}/{name}.sock",
    }.get(connector, name)
