"""What a conformance check works with: a producer here, readers in threads or another process."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from omni_kvlink import errors
from omni_kvlink.copier import Copier
from omni_kvlink.link import KVLink
from omni_kvlink.testing.peer import Peer

SLACK = 0.25
"""Seconds by which no call may outlive its deadline, and in which every wake-up must come."""
PATIENCE = 20.0
"""Seconds after which a check is given up."""
STARTING = 60.0
"""Seconds for a process to import what it needs, on a busy machine."""

Problem = TypeVar("Problem", bound=BaseException)
_ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


class PeerGone(Exception):
    """The peer's process ended before it answered."""


class Handle(ABC):
    """A `Peer` somewhere."""

    @abstractmethod
    def ask(self, verb: str, **arguments: Any) -> Future[Any]:
        """Begin a verb of `Peer`; its answer, or its error, comes with the future."""

    def do(self, verb: str, **arguments: Any) -> Any:
        return self.ask(verb, **arguments).result(PATIENCE)

    @abstractmethod
    def end(self) -> None:
        """Close what it has."""


class ThreadPeer(Handle):
    """A peer in this process: every verb in a thread of its own."""

    def __init__(self) -> None:
        self._peer = Peer()

    def ask(self, verb: str, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self._peer.do(verb, arguments))
            except BaseException as error:
                error.__traceback__ = None  # its frames would hold the payload
                future.set_exception(error)

        threading.Thread(target=run, name="kvlink-test-peer", daemon=True).start()
        return future

    def end(self) -> None:
        self._peer.end()


class ProcessPeer(Handle):
    """A peer in a process of its own; `process` is there to be killed.

    Its imports are done when it is made, so that no deadline of a check pays for them.

    Args:
        prefix: of its command: `("ip", "netns", "exec", "other")` makes it another host's.
    """

    def __init__(self, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()):
        command = [*prefix, sys.executable, "-m", "omni_kvlink.testing"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._gone = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.ask("usage").result(STARTING)
        except BaseException:
            self.process.kill()
            self.end()
            raise

    def ask(self, verb: str, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        assert self.process.stdin is not None
        with self._lock:
            if self._gone:
                raise PeerGone(f"the peer ended with {self.process.poll()}")
            number = next(self._numbers)
            self._pending[number] = future
            command = json.dumps({"id": number, "verb": verb, **arguments})
            self.process.stdin.write(command + "\n")
        return future

    def end(self) -> None:
        """Close its input; kill it if it does not go. Safe after it was killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        self.process.stdout.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._pending.pop(answer["id"])
            if "error" in answer:
                future.set_exception(_rebuild(answer))
            else:
                future.set_result(answer["result"])
        with self._lock:
            self._gone = True
            left, self._pending = list(self._pending.values()), {}
        for future in left:
            future.set_exception(PeerGone("the peer's process ended"))


def _rebuild(answer: dict[str, Any]) -> Exception:
    error: Exception = _ERRORS.get(answer["error"], RuntimeError)(answer["text"])
    vars(error).update(answer["facts"])
    return error


class Remote:
    """One link of a peer."""

    def __init__(self, handle: Handle, name: str):
        self.handle, self._name = handle, name

    def ask(self, verb: str, **arguments: Any) -> Future[Any]:
        return self.handle.ask(verb, link=self._name, **arguments)

    def do(self, verb: str, **arguments: Any) -> Any:
        return self.ask(verb, **arguments).result(PATIENCE)


class Rig:
    """One check's set-up; `close` ends everything it opened.

    Args:
        make_url: gives a fresh URL at each call.
        options: for every link, such as `{"mode": "sealed"}`.
        handle: where the readers live.
    """

    def __init__(self, make_url: Callable[[], str], options: Mapping[str, Any], handle: Handle):
        self.url = make_url()
        self._options = {"quota": 8 << 20, **options}
        self._handle = handle
        self._links: list[KVLink] = []
        self._remotes: list[Remote] = []

    def serve(self, *, copier: Copier | None = None, **options: Any) -> KVLink:
        """The producer's end, here."""
        chosen = {**self._options, **options}
        link = KVLink.serve(self.url, **chosen)
        if copier is not None:
            link._copier = copier
        self._links.append(link)
        return link

    def connect(self, *, timeout: float = PATIENCE, **options: Any) -> Remote:
        """A reader's end, wherever the readers live."""
        remote = self.begin_connect()
        remote.do("connect", url=self.url, timeout=timeout, **{**self._options, **options})
        return remote

    def begin_connect(self) -> Remote:
        """A reader that was not told to connect yet."""
        remote = Remote(self._handle, f"{self.url}#{len(self._remotes)}")
        self._remotes.append(remote)
        return remote

    def connect_here(self, *, timeout: float = PATIENCE) -> KVLink:
        """A reader's end in this process, for what needs its objects."""
        link = KVLink.connect(self.url, timeout=timeout, **self._options)
        self._links.append(link)
        return link

    @property
    def options(self) -> dict[str, Any]:
        return dict(self._options)

    def close(self) -> None:
        for remote in self._remotes:
            remote.do("forget")
        for link in self._links:
            link.close()
        self._links.clear()


def until_disconnected(reader: Remote) -> None:
    """Wait until a reader knows that its producer is gone."""
    until(lambda: not reader.do("stats")["connected"], "the reader noticed")


def until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    """Wait for something that no event announces; the only loop that looks again and again."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:g} s still not: {what}")
        time.sleep(0.002)


def until_asked(producer: KVLink, readers: int) -> None:
    """Wait until so many readers wait, or have what is being written coming already."""

    def have_asked() -> bool:
        transfers = producer.stats()["transfers"]
        return bool(transfers["waiting"] + transfers["leased"] == readers)

    until(have_asked, "every want arrived")


def until_freed(producer: KVLink, timeout: float = PATIENCE) -> None:
    """Wait until no byte of the producer's memory is taken."""

    def is_free() -> bool:
        used: int = producer.stats()["memory"]["used"]
        return used == 0

    try:
        until(is_free, "no memory used", timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}: {producer.stats()}") from None


def expect(
    kind: type[Problem],
    call: Callable[[], Any],
    *,
    within: float = PATIENCE,
    words: tuple[str, ...] = (),
) -> Problem:
    """The error that `call` must raise: exactly of this kind, in time, its text naming `words`."""
    started = time.monotonic()
    try:
        found = call()
    except kind as error:
        took = time.monotonic() - started
        if type(error) is not kind:
            raise AssertionError(f"wanted {kind.__name__}, got {error!r}") from error
        if took > within:
            raise AssertionError(
                f"{kind.__name__} came after {took:.3f} s, not {within:.3f}"
            ) from error
        for word in words:
            if word not in str(error):
                raise AssertionError(f"{word!r} is missing in: {error}") from error
        error.__traceback__ = None
        return error
    except Exception as error:
        raise AssertionError(f"wanted {kind.__name__}, got {error!r}") from error
    raise AssertionError(f"wanted {kind.__name__}, got the result {found!r}")
