"""Remote procedure calls between the processes of an engine: `RpcClient` and `answer_call`.

Answers may come in any order. How messages travel, and how the end of the other process is
noticed, is the business of an `RpcTransport`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferTimeout,
    format_seconds,
)

_log = logging.getLogger(__name__)

DeathCallback: TypeAlias = Callable[[EngineDeadError], None]
Methods: TypeAlias = Mapping[str, Callable[..., Any]]
Send: TypeAlias = "Callable[[Reply], None]"

SHUTDOWN_TIMEOUT = 10.0
"""Seconds that a process may take to shut down before it is killed."""
_EXIT_REPORT_SECONDS = 5.0
"""The time in which a transport reports the end of a process that has been killed."""


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message to a process: the service that it makes, and where it imports from."""

    service: str
    config: dict[str, Any]
    args: list[int]
    path: list[str]


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a service's method."""

    number: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result or the error of a call; it has no number if the call could not be decoded."""

    number: int | None
    value: Any = None
    error: Any = None


class RpcTransport(Protocol):
    """Carries messages to one process and back, and ends that process.

    `receive` and `describe_exit` are called by one thread, everything else by any. `name` is the
    process's, for errors; `pid` is 0 while unknown.
    """

    name: str
    pid: int

    def send(self, message: Call) -> None:
        """Send a message; does not wait for the other process.

        Raises SchemaError or CapacityError if the message cannot be sent, and EngineDeadError if
        the process is unreachable and `receive` will not report it.
        """

    def receive(self) -> Reply:
        """Wait for the next message; PeerLostError if the process is gone, or after `close`."""

    def describe_exit(self, error: Exception) -> str:
        """Make sure that the process ends; say how. `error` is what `receive` raised."""

    def shutdown(self) -> None:
        """Ask the process to release everything and exit; returns at once."""

    def kill(self) -> None:
        """Kill the process; returns at once."""

    def join(self, timeout: float) -> None:
        """Wait until the process has ended; kill it after `timeout` seconds."""

    def close(self) -> None:
        """Release what this side holds; a `receive` that waits raises."""


class RpcClient:
    """Calls methods of a service in another process, over a transport it owns; thread-safe.

    `on_death` is called once, in the reader thread, when the process has ended without `shutdown`
    or `kill`; every pending call has failed by then. Once it is gone, calls fail with `error`.
    """

    def __init__(self, transport: RpcTransport, on_death: DeathCallback):
        self.error: EngineError | ClosedError | None = None
        self._transport, self._on_death = transport, on_death
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._ended_by = ""  # "shutdown" or "kill", whichever was called first
        self._reader = threading.Thread(target=self._read, name=f"{self.name}-reader", daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        """Name of the process, for errors."""
        return self._transport.name

    @property
    def pid(self) -> int:
        """Process id; 0 while unknown."""
        return self._transport.pid

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """Call a method of the service; returns a future of its result, at once.

        The future fails with what the method raised, SchemaError or CapacityError if the arguments
        cannot be sent, EngineDeadError if the process dies, and ClosedError after `shutdown`.
        """
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            error: KVLinkError | None = self.error
            number = next(self._numbers)
            if error is None:
                self._pending[number] = answer
        if error is not None:
            answer.set_exception(error)
            return answer
        try:
            self._transport.send(Call(number, method, list(args), dict(kwargs or {})))
        except KVLinkError as unsent:
            self._on_answer(Reply(number, error=unsent))
        return answer

    def request(
        self, method: str, args: Sequence[Any] = (), *, timeout: float, phase: str = "running"
    ) -> Any:
        """Call a method, and wait for its result; raises what the future of `call` fails with.

        After `timeout` seconds it raises TransferTimeout; the call goes on.
        """
        answer = self.call(method, args)
        if not wait([answer], timeout).done:
            text = f"{method}: no answer of {self.name} within {format_seconds(timeout)}"
            raise TransferTimeout(text, waited=timeout, phase=phase)
        return answer.result()

    def shutdown(self) -> None:
        """Ask the process to release everything and exit, without `on_death`; returns at once."""
        if not self._ended_by:
            self._ended_by = "shutdown"
            self._transport.shutdown()

    def kill(self) -> None:
        """Kill the process, without `on_death`; returns at once."""
        self._ended_by = self._ended_by or "kill"
        self._transport.kill()

    def join(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """Wait until the process has ended; kill it after `timeout` seconds."""
        self._transport.join(timeout)
        if threading.current_thread() is self._reader:  # called by `on_death`, which runs in it
            self._transport.close()
            return
        self._reader.join(_EXIT_REPORT_SECONDS)
        self._transport.close()
        self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                self._on_answer(self._transport.receive())
        except PeerLostError as lost:
            error: Exception = lost
        except Exception as unreadable:  # the answers to all later calls are unknown
            _log.exception("%s sent a message that cannot be read", self.name)
            error = unreadable
            self._transport.kill()
        ended_by = self._ended_by  # before waiting for the exit, in which the owner may kill it
        text = self._transport.describe_exit(error)
        death = EngineDeadError(text)
        with self._lock:
            self.error = ClosedError(text) if ended_by == "shutdown" else death
            pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.set_exception(self.error)
        if not ended_by:
            self._on_death(death)

    def _on_answer(self, message: Reply) -> None:
        with self._lock:
            answer = None if message.number is None else self._pending.pop(message.number, None)
        if answer is None:
            return
        if message.error is not None:
            answer.set_exception(message.error)
        else:
            answer.set_result(message.value)


def answer_call(methods: Methods, call: Call, send: Send) -> None:
    """Run the method that a call names in this thread, and `send` its answer.

    Where the method returns a Future, the answer is sent from the thread that sets its result.
    """

    def run() -> Any:
        method = methods.get(call.method)
        if method is None:
            raise AttributeError(f"no method {call.method!r} can be called here")
        return method(*call.args, **call.kwargs)

    answer: Future[Any] = Future()
    set_result_of(answer, run)
    answer.add_done_callback(partial(_send_answer, send, call.number))


def public_methods(service: object) -> dict[str, Callable[..., Any]]:
    """The methods of an object whose names have no leading underscore, by name."""
    kind = type(service)
    names = (name for name in dir(kind) if not name.startswith("_"))
    return {name: getattr(service, name) for name in names if callable(getattr(kind, name))}


def set_result_of(future: Future[Any], call: Callable[[], Any]) -> None:
    """Set a future to the result or the error of a call; a Future as result is waited for."""
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(partial(_copy_result, future))
    else:
        future.set_result(result)


def _copy_result(future: Future[Any], source: Future[Any]) -> None:
    error = source.exception()
    if error is None:
        future.set_result(source.result())
    else:
        future.set_exception(error)


def _send_answer(send: Send, number: int, answer: Future[Any]) -> None:
    error = answer.exception()
    with contextlib.suppress(EngineDeadError):  # the client is gone: nothing waits for the answer
        if error is None:
            try:
                send(Reply(number, answer.result()))
                return
            except (SchemaError, CapacityError) as unsent:
                error = unsent
        send(Reply(number, error=error))
