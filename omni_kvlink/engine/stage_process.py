"""`StageProcess`: a stage in a process of its own, as seen from here."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import msgspec

from ..errors import ClosedError, KVLinkError, PeerLostError, TransferTimeout
from .channel import Channel
from .codec import pack_request, unpack_error, unpack_output
from .config import OmniARConfig, OmniDiffusionConfig
from .errors import EngineDeadError, EngineError
from .outputs import DiffusionOutput
from .request import OmniDiffusionRequest

_END = 10.0
"""Seconds that a process has to end when it is told to, before it is killed."""


class StageProcess:
    """The verbs of `StageEngine`, done by a child; thread-safe; a context manager.

    Args:
        config: of the stage.
        on_death: called once, from another thread, when the process, or a worker of it, is gone.
        environment: variables of the child besides this process's own.
        timeout: seconds until it must have loaded its model and opened its links.

    Raises:
        TransferTimeout: it was not ready in time.
        KVLinkError: why it could not start.
    """

    def __init__(
        self,
        config: OmniARConfig | OmniDiffusionConfig,
        *,
        on_death: Callable[[EngineError], None] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ):
        self.config, self._on_death = config, on_death
        self._environment, self._timeout = dict(environment or {}), timeout
        self._lock = threading.Lock()
        self._closed = False
        self._numbers = itertools.count()
        self.sink_urls: tuple[str, ...] = ()
        self._start()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def submit(self, request: OmniDiffusionRequest) -> Future[DiffusionOutput]:
        """Queue a request there; its future has the output, which may hold the request's error.

        Raises:
            EngineDeadError: the process is gone: `restart` first.
            EngineError: this id is in use.
            ClosedError
        """
        future: Future[DiffusionOutput] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._check_alive()
            if request.request_id in self._futures:
                raise EngineError(f"request {request.request_id!r} is here already")
            self._futures[request.request_id] = future
        self._send({"op": "submit", "request": pack_request(request)})
        return future

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; unknown ones are left alone."""
        self._send({"op": "abort", "request_id": request_id})

    def discard(self, request_id: str, reason: str) -> None:
        """The next stage will not take what this one sent for a request: its memory goes back."""
        self._send({"op": "discard", "request_id": request_id, "reason": reason})

    def sleep(self, level: int = 1, *, timeout: float = 60.0) -> bool:
        """Between batches, take the weights out of its memory."""
        return bool(self._call("sleep", [level], timeout))

    def wake_up(self, tags: Sequence[str] | None = None, *, timeout: float = 60.0) -> bool:
        """Bring back what `sleep` took."""
        return bool(self._call("wake_up", [tags], timeout))

    def stats(self, *, timeout: float = 10.0) -> dict[str, Any]:
        """Queues, steps and what is held, as JSON values."""
        found: dict[str, Any] = self._call("stats", [], timeout)
        return found

    def restart(self) -> None:
        """A new process, at the same URL; requests of before have ended with the old one."""
        self._end()
        self._start()

    def close(self) -> None:
        """End the process and what it was doing; again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end()

    def __enter__(self) -> StageProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside.

    def _start(self) -> None:
        self._dead: KVLinkError | None = None
        self._futures: dict[str, Future[DiffusionOutput]] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._ready: Future[tuple[str, ...]] = Future()
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", "omni_kvlink.engine.stage_main", str(there.fileno())]
            environment = {**os.environ, **self._environment}
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        self._channel = Channel(here)
        self._reader = threading.Thread(target=self._read, name="stage-reader", daemon=True)
        self._reader.start()
        kind = "ar" if isinstance(self.config, OmniARConfig) else "dit"
        try:
            config = msgspec.to_builtins(self._at_same_url())
            self._send({"op": "start", "kind": kind, "config": config})
            if not wait([self._ready], self._timeout).done:
                raise TransferTimeout(
                    f"the {kind} stage was not ready within {self._timeout:g} s",
                    waited=self._timeout,
                    phase="starting",
                )
            self.sink_urls = self._ready.result()
        except BaseException:
            self._end()
            raise

    def _at_same_url(self) -> OmniARConfig | OmniDiffusionConfig:
        """Where the system chose a port, the next life has the same."""
        if not self.sink_urls:
            return self.config
        kv = dataclasses.replace(self.config.kv, sinks=self.sink_urls)
        return dataclasses.replace(self.config, kv=kv)

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except PeerLostError:
                break
            self._on_message(message)
        status = self._process.wait()
        words = f"process {self._process.pid} of the stage ended with status {status}"
        self._die(ClosedError(words) if self._closed else EngineDeadError(words))

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["op"]
        if kind == "output":
            output = unpack_output(message["output"])
            with self._lock:
                future = self._futures.pop(output.request_id, None)
            if future is not None:
                future.set_result(output)
        elif kind == "answer":
            answer = self._answers.pop(message["number"])
            if "error" in message:
                answer.set_exception(unpack_error(message["error"]))
            else:
                answer.set_result(message["value"])
        elif kind == "ready":
            self._ready.set_result(tuple(message["urls"]))
        elif kind == "failed":
            self._ready.set_exception(unpack_error(message["error"]))
        elif kind == "died" and self._on_death is not None:
            error = unpack_error(message["error"])
            self._on_death(EngineDeadError(str(error)))

    def _die(self, error: KVLinkError) -> None:
        """The process is gone, and with it all it was to do."""
        with self._lock:
            self._dead = error
            futures, self._futures = self._futures, {}
            answers, self._answers = self._answers, {}
        for request_id, future in futures.items():
            future.set_result(DiffusionOutput(request_id, error=error))
        for answer in answers.values():
            answer.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        elif isinstance(error, EngineError) and self._on_death is not None:
            self._on_death(error)

    def _call(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            number = next(self._numbers)
            self._answers[number] = answer
        self._send({"op": "call", "number": number, "method": method, "args": list(args)})
        if not wait([answer], timeout).done:
            raise TransferTimeout(f"{method}: no answer after {timeout:g} s", waited=timeout)
        return answer.result()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except EngineDeadError:
            return  # the reader sees it too, and ends every future

    def _end(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._channel.release()

    def _check_alive(self) -> None:
        if self._closed:
            raise ClosedError("the stage is closed")
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}: restart() first")
