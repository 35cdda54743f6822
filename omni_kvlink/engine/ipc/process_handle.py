"""`ProcessHandle`: a process that this one started, and calls."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.pending_calls import PendingCalls, failed
from omni_kvlink.errors import CapacityError, ClosedError, KVLinkError, PeerLostError, SchemaError

_log = logging.getLogger(__name__)

Call: TypeAlias = Callable[[str, Sequence[Any], Mapping[str, Any]], "Future[Any]"]
"""Method, args, kwargs: what to do; the answer comes in the future."""

END = 10.0
"""Seconds that a process has to end when it is told to, before it is killed."""


class ProcessHandle:
    """A module of this package, running in a process of its own; thread-safe.

    The module answers each {"number", "method", "args", "kwargs"} with {"number", "value"} or
    {"number", "error"}, when it can.

    Args:
        module: such as "stage.stage_main"; its argument is the descriptor of its channel.
        first: its first message.
        name: of the process, in errors.
        on_death: called in the reader's thread, once, when the process has ended that nobody told
            to, and so has all that was asked of it.
        environment: variables of the child besides this process's own.
    """

    def __init__(
        self,
        module: str,
        first: dict[str, Any],
        *,
        name: str,
        on_death: Callable[[EngineDeadError], None],
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        self._on_death = on_death
        self._asked = PendingCalls()
        self._told_to = ""
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", f"omni_kvlink.engine.{module}", str(there.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[there.fileno()], env={**os.environ, **(environment or {})}
            )
        self.channel = RpcChannel(here)
        self.channel.send(first)
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> EngineError | ClosedError | None:
        """What all calls end in, once the process is gone."""
        return self._asked.ended

    @property
    def is_alive(self) -> bool:
        """Whether it could answer still; a process that is frozen is alive."""
        return self._asked.ended is None and self._process.poll() is None

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """Call a method there, and return; the future has the answer, or why there is none.

        That is what the method raised, EngineDeadError, or ClosedError after `end`.
        """
        try:
            number, answer = self._asked.add()
        except (EngineError, ClosedError) as error:
            return failed(error)
        message = {"number": number, "method": method, "args": list(args), "kwargs": kwargs or {}}
        try:
            self.channel.send(message)
        except EngineDeadError:
            pass  # the reader sees it too, and ends every future
        except KVLinkError as error:
            self._asked.settle(number, {"error": error})
        return answer

    def end(self) -> None:
        """Tell it to end, and return."""
        self._told_to = self._told_to or "end"
        self.channel.close()

    def kill(self) -> None:
        """End it at once, and return; what was asked of it ends in EngineDeadError."""
        self._told_to = self._told_to or "die"
        self._process.kill()

    def join(self, timeout: float = END) -> None:
        """Wait until it has ended, which `end` or `kill` asked for; after `timeout`, kill it."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self.channel.release()

    # In the reader's thread.

    def _read(self) -> None:
        try:
            while True:
                message = self.channel.receive()
                self._asked.settle(message["number"], message)
        except PeerLostError:
            pass
        except Exception:  # nobody knows any more what it means
            _log.exception("%s sent what cannot be read", self.name)
            self._process.kill()
        self._on_gone(self._told_to)

    def _on_gone(self, told_to: str) -> None:
        """The channel is over, and so is the process, or will be."""
        self.channel.close()
        try:
            status = self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        words = f"{self.name}, process {self.pid}, ended with status {status}"
        death = EngineDeadError(words)
        self._asked.end(ClosedError(words) if told_to == "end" else death)
        if not told_to:
            self._on_death(death)


def serve_calls(channel: RpcChannel, call: Call) -> None:
    """In the child: do what is called until the other side closes the channel, or is gone."""
    with contextlib.suppress(PeerLostError):
        while True:
            message = channel.receive()
            answer = call(message["method"], message["args"], message["kwargs"])
            answer.add_done_callback(partial(_say, channel, message["number"]))


def _say(channel: RpcChannel, number: int, answer: Future[Any]) -> None:
    error = answer.exception()
    with contextlib.suppress(EngineDeadError):  # nobody waits for it; `receive` ends
        if error is None:
            try:
                channel.send({"number": number, "value": answer.result()})
                return
            except (SchemaError, CapacityError) as unsent:
                error = unsent
        channel.send({"number": number, "error": error})
