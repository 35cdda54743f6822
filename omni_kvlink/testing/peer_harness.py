"""Peers of a test or a benchmark: a set of commands that runs in this process or in another one.

A peer's process reads one JSON command a line, such as
`{"id": 1, "command": "get", "arguments": {"link": "a", "key": "k", "timeout": 5}}`, and writes one
JSON reply a line: `{"id": 1, "result": …}` or `{"id": 1, "error": …}`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import omni_kvlink
from omni_kvlink import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PATIENCE = 120.0
"""Seconds after which a call of a peer is given up; a process imports much, on a busy machine."""
_ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


class PeerExited(Exception):
    """The peer's process ended before it replied; the text has its exit status."""


class PeerError(Exception):
    """A command raised an error that is no `KVLinkError`; the text is its `repr`."""


class CommandSet:
    """Commands of a peer: the public methods, by name. They take and return JSON values."""

    def run(self, command: str, arguments: dict[str, Any]) -> Any:
        """Run a command."""
        return getattr(self, command)(**arguments)

    def ping(self) -> int:
        """The moment at which the peer runs this command, in monotonic nanoseconds."""
        return time.monotonic_ns()

    def close_all(self) -> None:
        """Close everything that the commands opened; is no command itself."""


def serve(commands: CommandSet, *, concurrent: bool) -> None:
    """Run the commands that standard input has, until it ends.

    With `concurrent` each has a thread of its own, so that others can abort, close or kill while
    it waits; without, they run in turn in this thread.
    """
    lock = threading.Lock()

    def run(line: str) -> None:
        reply = json.dumps(_reply(commands, json.loads(line)))
        with lock:
            sys.stdout.write(reply + "\n")
            sys.stdout.flush()

    for line in sys.stdin:
        if concurrent:
            threading.Thread(target=run, args=(line,), daemon=True).start()
        else:
            run(line)


def _reply(commands: CommandSet, request: dict[str, Any]) -> dict[str, Any]:
    number = request["id"]
    try:
        return {"id": number, "result": commands.run(request["command"], request["arguments"])}
    except errors.KVLinkError as error:
        public = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        kind = type(error).__name__
        return {"id": number, "error": kind, "text": str(error), "attributes": public}
    except Exception as error:
        return {"id": number, "error": "", "text": repr(error), "attributes": {}}


class Peer(ABC):
    """Runs the commands of a `CommandSet` somewhere."""

    @abstractmethod
    def submit(self, command: str, **arguments: Any) -> Future[Any]:
        """Begin a command: a future of its result or error. `PeerExited`: the process has ended."""

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command, and wait for its result at most `PATIENCE` seconds."""
        return self.submit(command, **arguments).result(PATIENCE)

    @abstractmethod
    def close(self) -> None:
        """Close everything that the commands opened, and end the peer."""


class ThreadPeer(Peer):
    """A peer in this process; if not `concurrent`, one thread runs all commands in turn."""

    def __init__(self, commands: CommandSet, *, concurrent: bool = True):
        self._commands = commands
        self._pool = None if concurrent else ThreadPoolExecutor(1, "kvlink-peer")

    def submit(self, command: str, **arguments: Any) -> Future[Any]:
        """Begin a command."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self._commands.run(command, arguments))
            except Exception as error:
                errors.without_frames(error)  # they would keep the payload alive
                is_own = isinstance(error, errors.KVLinkError)
                future.set_exception(error if is_own else PeerError(repr(error)))

        if self._pool is None:
            threading.Thread(target=run, name="kvlink-peer", daemon=True).start()
        else:
            self._pool.submit(run)
        return future

    def close(self) -> None:
        """Close everything that the commands opened; in turn: after them, in at most 60 seconds."""
        if self._pool is None:
            self._commands.close_all()
        else:
            futures.wait([self._pool.submit(self._commands.close_all)], 60)
            self._pool.shutdown(wait=False)


class ProcessPeer(Peer):
    """A peer in a process of its own, whose imports are done when the constructor returns.

    A test may stop or kill `process`. It runs `module`, which calls `serve`, or a `program`, which
    answers as `serve` does and need not have this library; a `prefix` such as
    `("ip", "netns", "exec", "other")` makes it another host's. If `concurrent`, a thread of this
    process receives the replies; if not, only `result` reads them, in its caller's thread, and
    nothing else of this process runs while a command is timed.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        *,
        module: str = "omni_kvlink.testing",
        program: Sequence[str] = (),
        arguments: Sequence[str] = (),
        concurrent: bool = True,
    ):
        env = os.environ if env is None else env
        root = str(Path(omni_kvlink.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [*prefix, *(program or (sys.executable, "-m", module)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env if program else {**env, "PYTHONPATH": path},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._exited = False
        self._unread = b""
        self._receiver: threading.Thread | None = None
        if concurrent:
            self._receiver = threading.Thread(target=self._receive_all, daemon=True)
            self._receiver.start()
        try:
            self.call("ping")
        except BaseException:
            self.process.kill()
            self.close()
            raise

    def submit(self, command: str, **arguments: Any) -> Future[Any]:
        """Begin a command; blocks only while the process reads no input."""
        with self._lock:
            if self._exited:
                raise self._exit_error()
            number = next(self._numbers)
            request = {"id": number, "command": command, "arguments": arguments}
            if self._receiver is None:  # only this thread reads replies: write first, it is timed
                self._write(request)
                future: Future[Any] = _PulledFuture(self._receive)
                self._pending[number] = future
            else:
                future = self._pending[number] = Future()
                self._write(request)
        return future

    def close(self) -> None:
        """Close the process's input, and kill it if it has not ended after 60 seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._receiver is not None:
            self._receiver.join()
        self._stdout.close()

    def _write(self, request: dict[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            self._pending.pop(request["id"], None)
            raise self._exit_error() from None

    def _receive_all(self) -> None:
        while not self._exited:
            self._receive(None)

    def _receive(self, timeout: float | None) -> bool:
        """Read what the process wrote, and complete its futures; False if nothing came in time."""
        if not select.select([self._stdout], [], [], timeout)[0]:
            return False
        data = os.read(self._stdout.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            with self._lock:
                future = self._pending.pop(reply["id"])
            if "error" in reply:
                error: Exception = _ERRORS.get(reply["error"], PeerError)(reply["text"])
                vars(error).update(reply["attributes"])
                future.set_exception(error)
            else:
                future.set_result(reply["result"])
        if not data:
            with self._lock:
                self._exited = True
                unanswered, self._pending = list(self._pending.values()), {}
            for future in unanswered:
                future.set_exception(self._exit_error())
        return True

    def _exit_error(self) -> PeerExited:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return PeerExited(f"the peer's process ended with status {self.process.returncode}")


class _PulledFuture(Future[Any]):
    """A future whose `result` reads the replies itself, for a caller with a single thread."""

    def __init__(self, receive: Callable[[float | None], bool]):
        super().__init__()
        self._receive = receive

    def result(self, timeout: float | None = None) -> Any:
        """The command's result; raises its error, or `TimeoutError`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._receive(seconds):
                break
        return super().result(0)


class RemoteLink:
    """One named link of a peer that has the commands of `LinkCommands`."""

    def __init__(self, peer: Peer, name: str):
        self.peer, self._name = peer, name

    def submit(self, command: str, **arguments: Any) -> Future[Any]:
        """Begin a command of this link."""
        return self.peer.submit(command, link=self._name, **arguments)

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command of this link, and wait for its result at most `PATIENCE` seconds."""
        return self.submit(command, **arguments).result(PATIENCE)
