"""`StageProcess`: a stage in a process of its own, as seen from here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from ..errors import ClosedError, KVLinkError, TransferTimeout
from .child import Child
from .codec import pack_config
from .config import OmniARConfig, OmniDiffusionConfig
from .errors import EngineDeadError, EngineError
from .outputs import DiffusionOutput
from .request import OmniDiffusionRequest


class StageProcess:
    """The verbs of `StageEngine`, done by a child; thread-safe; a context manager.

    Args:
        config: of the stage.
        on_death: called once, from another thread, when the process, or a worker of it, is gone.
        environment: variables of the child besides this process's own.
        timeout: seconds until it must have loaded its model and opened its links.

    Raises:
        TransferTimeout: it was not ready in time.
        What loading the model and opening the links raises.
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
        self.sink_urls: tuple[str, ...] = ()
        self._start()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def submit(self, request: OmniDiffusionRequest) -> Future[DiffusionOutput]:
        """Queue a request there; its future has the output, which may hold the request's error.

        Raises:
            EngineDeadError: the process is gone: `restart` first.
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
        answer = self._child.call("submit", [request])
        answer.add_done_callback(partial(self._on_output, key, future))
        return future

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; unknown ones are left alone."""
        self._child.call("abort", [request_id])

    def discard(self, request_id: str, reason: str) -> None:
        """The next stage will not take what this one sent for a request: its memory goes back."""
        self._child.call("discard", [request_id, reason])

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
        self._open: set[str] = set()
        config = self.config.served_at(self.sink_urls)
        self._child = Child(
            "stage_main",
            pack_config(config),
            name=f"the {config.stage} stage",
            on_death=self._on_child_death,
            on_message=self._on_message,
            environment=self._environment,
        )
        started = self._child.call("start")
        try:
            if not wait([started], self._timeout).done:
                raise TransferTimeout(
                    f"the {config.stage} stage was not ready within {self._timeout:g} s",
                    waited=self._timeout,
                    phase="starting",
                )
            self.sink_urls = started.result()
        except BaseException:
            self._end()
            raise

    def _on_output(
        self, key: str, future: Future[DiffusionOutput], answer: Future[DiffusionOutput]
    ) -> None:
        self._open.discard(key)
        error: Any = answer.exception()
        future.set_result(answer.result() if error is None else DiffusionOutput(key, error=error))

    def _on_message(self, message: dict[str, Any]) -> None:
        """A worker of the stage is gone."""
        if self._on_death is not None:
            self._on_death(message["died"])

    def _on_child_death(self, error: EngineDeadError) -> None:
        self._dead = error
        if self._on_death is not None:
            self._on_death(error)

    def _call(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        self._check_alive()
        answer = self._child.call(method, args)
        if not wait([answer], timeout).done:
            raise TransferTimeout(f"{method}: no answer after {timeout:g} s", waited=timeout)
        return answer.result()

    def _end(self) -> None:
        self._child.end()
        self._child.join()

    def _check_alive(self) -> None:
        if self._closed:
            raise ClosedError("the stage is closed")
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}: restart() first")
