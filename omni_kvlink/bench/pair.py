"""Both ends of a link: the producer here, its reader in another process (or thread)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import omni_kvlink
from omni_kvlink.bench.errors import BenchError, ReaderError
from omni_kvlink.bench.peer import Message, converse
from omni_kvlink.connectors.registry import schemes
from omni_kvlink.errors import UnavailableError
from omni_kvlink.link import KVLink

SAME_PROCESS = ("inproc",)
"""Connectors whose two ends cannot be in two processes."""


class Peer(ABC):
    """Carries commands to a reader, and its answers back."""

    @abstractmethod
    def tell(self, **command: Any) -> None:
        """Send a command; does not wait."""

    @abstractmethod
    def line(self, timeout: float) -> str:
        """The next answer, undecoded.

        Raises:
            BenchError: the reader ended, or does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """End the reader."""

    def answer(self, *, timeout: float) -> Message:
        """The next answer.

        Raises:
            ReaderError: the reader failed.
            BenchError: it ended, or does not answer.
        """
        answer: Message = json.loads(self.line(timeout))
        if "error" in answer:
            raise ReaderError(f"the reader: {answer['error']}")
        return answer

    def ask(self, *, wait: float = 30.0, **command: Any) -> Message:
        self.tell(**command)
        return self.answer(timeout=wait)


class ProcessPeer(Peer):
    """A reader in a process of its own, spoken to through its stdin and stdout."""

    def __init__(self) -> None:
        root = str(Path(omni_kvlink.__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "omni_kvlink.bench.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._rest = b""

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def line(self, timeout: float) -> str:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise BenchError(f"the reader did not answer within {timeout:g} s")
            data = os.read(pipe, 1 << 16)
            if not data:
                raise self._ended()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ended(self) -> BenchError:
        return BenchError(f"the reader's process ended with status {self._process.wait()}")


class ThreadPeer(Peer):
    """A reader in a thread of this process."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvlink-bench-reader", daemon=True)
        self._thread.start()

    def tell(self, **command: Any) -> None:
        self._commands.put(json.dumps(command))

    def line(self, timeout: float) -> str:
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            raise BenchError(f"the reader did not answer within {timeout:g} s") from None

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        converse(iter(self._commands.get, None), self._answers.put, own_thread=True)


class Pair:
    """A producer and its connected reader; a context manager by `open_pair`."""

    def __init__(self, link: KVLink, peer: Peer, *, own_thread: bool):
        self.link, self.peer, self.own_thread = link, peer, own_thread

    def await_reader(self, *, timeout: float = 10.0) -> None:
        """Return when the reader's `get` waits at the producer, and sleeps."""
        deadline = time.monotonic() + timeout
        while self.link.stats().get("transfers", {}).get("waiting", 1) < 1:
            if time.monotonic() > deadline:
                raise BenchError(f"the reader did not ask within {timeout:g} s")
            time.sleep(0.0002)
        self.settle()

    def settle(self) -> None:
        """Time for the reader to fall asleep: waking one that still runs would be too easy."""
        time.sleep(0.002)


@contextlib.contextmanager
def open_pair(
    connector: str,
    *,
    url: str = "",
    threads: int = 1,
    **serving: Any,
) -> Iterator[Pair]:
    """Serve, start a reader, connect it; end both at the end.

    Args:
        connector: the URL's scheme.
        url: all of it, for a connector that needs an address.
        threads: of torch, in the reader.
        serving: for the producer's end.
    """
    if not url and connector not in schemes():
        raise UnavailableError(f"no connector {connector!r}; there are {', '.join(schemes())}")
    url = url or f"{connector}://{_address(connector)}"
    own_thread = url.partition("://")[0] in SAME_PROCESS
    try:
        link = KVLink.serve(url, **serving)
    except ValueError as error:
        raise BenchError(str(error)) from None
    with link, contextlib.closing(ThreadPeer() if own_thread else ProcessPeer()) as peer:
        try:
            peer.ask(do="open", url=link.url, timeout=20.0, threads=threads, wait=60.0)
            yield Pair(link, peer, own_thread=own_thread)
            peer.ask(do="close")
        except BaseException:
            link.close()  # wakes a reader that waits, so that it can end
            raise


def _address(connector: str) -> str:
    """One that nobody else serves."""
    name = f"bench-{os.getpid()}-{os.urandom(3).hex()}"
    return {
        "zmq+tcp": "127.0.0.1:0",
        "ucx": "127.0.0.1:0",
        "zmq+ipc": f"{tempfile.gettempdir()}/kvlink-{os.geteuid()}/{name}.sock",
    }.get(connector, name)
