"""A stage at work: one thread that steps, and a future for every request."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Generic, TypeVar

from omni_kvlink.engine.config import StageConfig
from omni_kvlink.engine.core.engine_core import EngineCore
from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sched.scheduler import Scheduler
from omni_kvlink.errors import ClosedError, KVLinkError, TransferTimeout

C = TypeVar("C", bound=StageConfig)
_ANSWER = 5.0
"""Seconds in which workers, whatever they compute, say how their links are."""
_IDLE = 60.0
"""Seconds after which an idle engine looks up; nothing depends on it."""
_HANGS = 5.0
"""Seconds after which a batch that was aborted may hang, with a worker that is frozen."""


class StageEngine(ABC, Generic[C]):
    """A scheduler, an executor and the thread that drives them; thread-safe; a context manager.

    Args:
        config: of the stage.
        on_death: called once, from any thread, when a worker is gone.

    Attributes:
        sink_urls: what the next stage connects to, by tensor rank; empty if this is the last one.

    Raises:
        What loading the model and opening the links raises.
    """

    def __init__(self, config: C, *, on_death: Callable[[EngineError], None] | None = None):
        self.config, self._on_death = config, on_death
        self._lock = threading.Lock()
        self._futures: dict[str, Future[DiffusionOutput]] = {}
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closed = False
        self._start()

    @abstractmethod
    def _make(self) -> tuple[Scheduler, Executor]:
        """A fresh scheduler and executor."""

    @abstractmethod
    def _prepare(self, request: OmniDiffusionRequest) -> None:
        """Complete a request before it is queued."""

    def submit(self, request: OmniDiffusionRequest) -> Future[DiffusionOutput]:
        """Queue a request; its future has the output, which may hold the request's error.

        Raises:
            EngineError: this id is in use.
            EngineDeadError: a worker is gone: `restart` first.
            ClosedError
        """
        self._prepare(request)
        future: Future[DiffusionOutput] = Future()
        future.set_running_or_notify_cancel()  # ended by the engine alone
        with self._lock:
            self._check_alive()
            if request.request_id in self._futures:
                raise EngineError(f"request {request.request_id!r} is here already")
            self._futures[request.request_id] = future
        try:
            self.scheduler.add_request(request)
        except BaseException:
            self._futures.pop(request.request_id, None)
            raise
        return future

    def generate(
        self, requests: Sequence[OmniDiffusionRequest], *, timeout: float | None = None
    ) -> list[DiffusionOutput]:
        """The outputs of some requests, in their order.

        Raises:
            TransferTimeout: `timeout` seconds passed; what was not done is aborted.
        """
        futures = {request.request_id: self.submit(request) for request in requests}
        late = wait(futures.values(), timeout).not_done
        if late:
            names = [name for name, future in futures.items() if future in late]
            for name in names:
                self.abort(name)
            raise TransferTimeout(
                f"{', '.join(names)} not done after {timeout:g} s",
                waited=timeout or 0.0,
                phase="running",
            )
        return [future.result() for future in futures.values()]

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; unknown ones are left alone."""
        self.core.abort(request_id)
        self._deliver_ended()

    def discard(self, request_id: str, reason: str) -> None:
        """The next stage will not take what this one sent for a request: its memory goes back."""
        self.executor.fail_kv(request_id, reason)

    def sleep(self, level: int = 1, *, timeout: float = 60.0) -> bool:
        """Between batches, take the weights out of memory; requests fail until `wake_up`."""
        return bool(self._call(partial(self.executor.sleep, level), timeout))

    def wake_up(self, tags: Sequence[str] | None = None, *, timeout: float = 60.0) -> bool:
        """Bring back what `sleep` took."""
        return bool(self._call(partial(self.executor.wake_up, tags), timeout))

    def restart(self) -> None:
        """New workers, after the old ones died, at the same URLs.

        Requests of before have ended with the old ones.
        """
        self._stop(EngineDeadError("the engine is restarted"))
        self.config = self.config.served_at(self.sink_urls)
        self._start()

    def stats(self) -> dict[str, Any]:
        """Queues, steps, what is held, and the link to the next stage, as JSON values.

        Several tensor ranks have a link each: "links", in their order.

        Raises:
            TransferTimeout: a worker does not answer.
        """
        stats = self.scheduler.stats()
        if self.config.kv.sinks:
            links = self.executor.collective_rpc("sink_stats", timeout=_ANSWER)
            stats |= {"link": links[0]} if len(links) == 1 else {"links": links}
        return stats

    def close(self) -> None:
        """End every request with ClosedError, and give back all memory; again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop(ClosedError("the engine was closed"))

    def __enter__(self) -> StageEngine[C]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside.

    def _start(self) -> None:
        self._dead: EngineError | None = None
        self.scheduler, self.executor = self._make()
        self.sink_urls = self._find_sinks()
        batched = self.executor.supports_request_batch
        wait_ms = getattr(self.config, "request_batch_max_wait_ms", 0.0) if batched else 0.0
        self.core = EngineCore(self.scheduler, self.executor, max_wait=wait_ms / 1e3)
        self.scheduler.listen(self._deliver_ended)
        self.executor.register_failure_callback(self._on_failure)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _find_sinks(self) -> tuple[str, ...]:
        try:
            if not self.config.kv.sinks:
                return ()
            return tuple(self.executor.collective_rpc("sink_url", timeout=_ANSWER))
        except BaseException:
            self.executor.shutdown()
            raise

    def _run(self) -> None:
        scheduler = self.scheduler
        while not scheduler.is_stopped:
            self._do_calls()
            if scheduler.wait(timeout=_IDLE):
                self._deliver(self.core.step())
        self._do_calls()

    def _stop(self, error: KVLinkError) -> None:
        self.scheduler.stop()
        for request_id in list(self._futures):
            self.core.abort(request_id)
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_HANGS)
            if self._thread.is_alive():
                with contextlib.suppress(EngineDeadError):  # which ends what it waits for
                    self.executor.check_health(timeout=_HANGS)
        self.executor.shutdown()
        self._deliver(self.scheduler.fail_all(error))

    def _on_failure(self, error: EngineError) -> None:
        """In any thread: a worker is gone. Nothing that waits could ever run."""
        with self._lock:
            self._dead = error
        self._deliver(self.scheduler.fail_all(error))
        if self._on_death is not None:
            self._on_death(error)

    def _deliver_ended(self) -> None:
        self._deliver(self.core.take_ended())

    def _deliver(self, outputs: Sequence[DiffusionOutput]) -> None:
        for output in outputs:
            with self._lock:
                future = self._futures.pop(output.request_id, None)
            if future is not None:
                future.set_result(output)

    def _call(self, call: Callable[[], Any], timeout: float) -> Any:
        """In the engine's thread, between two batches."""
        answer: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            self._calls.append((call, answer))
        self.scheduler.wake()
        if not wait([answer], timeout).done:
            raise TransferTimeout(f"the engine is busy since {timeout:g} s", waited=timeout)
        return answer.result()

    def _do_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call, answer in calls:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

    def _check_alive(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}: restart() first")
