"""`RemoteStage`: a stage that is elsewhere, as seen from here."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol, TypeVar

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig
from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.errors import ClosedError, KVLinkError, TransferTimeout

S = TypeVar("S", bound="RemoteStage")


class StageHandle(Protocol):
    """A `StageService` elsewhere; thread-safe. Nothing here waits but `join`."""

    def call(self, method: str, args: Sequence[Any] = ()) -> Future[Any]:
        """Call a method of the service; the future has the answer, or why there is none."""

    def end(self) -> None:
        """Tell it to give everything back and end; it is no death."""

    def join(self) -> None:
        """Wait until it has ended, which it was told to; one that does not is killed."""


class RemoteStage(ABC):
    """The verbs of `StageEngine`, done elsewhere; thread-safe; a context manager.

    Args:
        config: of the stage.
        on_death: called once, from another thread, when the stage, or a worker of it, is gone.
        timeout: seconds until it must have loaded its model and opened its links.

    Attributes:
        sink_urls: what the next stage connects to, by tensor rank; empty if this is the last one.

    Raises:
        TransferTimeout: it was not ready in time.
        What loading the model and opening the links raises.
    """

    def __init__(
        self,
        config: OmniARConfig | OmniDiffusionConfig,
        *,
        on_death: Callable[[EngineError], None] | None = None,
        timeout: float = 120.0,
    ):
        self.config, self._on_death, self._timeout = config, on_death, timeout
        self._lock = threading.Lock()
        self._closed = False
        self.sink_urls: tuple[str, ...] = ()
        self._start()

    @abstractmethod
    def _make(self, on_death: Callable[[EngineDeadError], None]) -> StageHandle:
        """Start the stage, at the URLs of its last life if it had one.

        Args:
            on_death: for the handle to call, from any thread, when it is gone that nobody told to.
        """

    def submit(self, request: OmniDiffusionRequest) -> Future[DiffusionOutput]:
        """Queue a request there; its future has the output, which may hold the request's error.

        Raises:
            EngineDeadError: the stage is gone: `restart` first.
            EngineError: this id is in use.
            ClosedError
        """
        future: Future[DiffusionOutput] = Future()
        future.set_running_or_notify_cancel()
        key = request.request_id
        with self._lock:
            self._check_alive()
            if key in self._open:
                raise EngineError(f"request {key!r} is here already")
            self._open.add(key)
        answer = self._handle.call("submit", [request])
        answer.add_done_callback(partial(self._on_output, key, future))
        return future

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; unknown ones are left alone."""
        self._handle.call("abort", [request_id])

    def discard(self, request_id: str, reason: str) -> None:
        """The next stage will not take what this one sent for a request: its memory goes back."""
        self._handle.call("discard", [request_id, reason])

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
        """Start it again; requests of before have ended with its last life."""
        self._end()
        self._start()

    def close(self) -> None:
        """End the stage and what it was doing; again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside.

    def _start(self) -> None:
        self._dead: KVLinkError | None = None
        self._open: set[str] = set()
        self._handle = self._make(self._on_gone)
        started = self._handle.call("start")
        try:
            if not wait([started], self._timeout).done:
                raise TransferTimeout(
                    f"the {self.config.stage} stage was not ready within {self._timeout:g} s",
                    waited=self._timeout,
                    phase="starting",
                )
            self.sink_urls = started.result()
        except BaseException:
            self._end()
            raise
        self._handle.call("watch").add_done_callback(self._on_watch)

    def _on_output(
        self, key: str, future: Future[DiffusionOutput], answer: Future[DiffusionOutput]
    ) -> None:
        self._open.discard(key)
        error: Any = answer.exception()
        future.set_result(answer.result() if error is None else DiffusionOutput(key, error=error))

    def _on_watch(self, answer: Future[EngineError]) -> None:
        """A worker of the stage is gone; or all of it, which is heard otherwise."""
        if answer.exception() is None and self._on_death is not None:
            self._on_death(answer.result())

    def _on_gone(self, error: EngineDeadError) -> None:
        self._dead = error
        if self._on_death is not None:
            self._on_death(error)

    def _call(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        self._check_alive()
        answer = self._handle.call(method, args)
        if not wait([answer], timeout).done:
            raise TransferTimeout(f"{method}: no answer after {timeout:g} s", waited=timeout)
        return answer.result()

    def _end(self) -> None:
        self._handle.end()
        self._handle.join()

    def _check_alive(self) -> None:
        if self._closed:
            raise ClosedError("the stage is closed")
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}: restart() first")
