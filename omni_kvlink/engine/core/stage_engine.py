"""`StageEngine`: the engine of one stage, from its start to its end."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omni_kvlink.engine.config import OmniDiffusionConfig, StageConfig
from omni_kvlink.engine.core.engine_core import EngineCore
from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.sched.scheduler import SyncScheduler
from omni_kvlink.engine.sched.step_scheduler import StepScheduler
from omni_kvlink.errors import ClosedError, KVLinkError, TransferTimeout, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.engine.lora.request import LoRARequest
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.sched.scheduler import Scheduler
    from omni_kvlink.engine.tokens.events import Event

C = TypeVar("C", bound=StageConfig)
_ANSWER_SECONDS = 5.0  # in which workers return URLs and statistics, also while they compute
_HANG_SECONDS = 5.0  # after which an aborted batch may hang: the workers' health is checked


class StageCalls(ABC):
    """Calls of a stage besides running requests; they run between batches.

    All raise TransferTimeout after `timeout` seconds. Adapters are the same on all ranks.
    """

    @abstractmethod
    def _call_executor(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        """Call a method of the stage's executor between batches; returns what it returns."""

    def add_lora(self, lora_request: LoRARequest, *, timeout: float = 60.0) -> bool:
        """Load an adapter on all ranks; False if it was there.

        Raises EngineError or SchemaError if it cannot be used; then no rank has it.
        """
        return bool(self._call_executor("add_lora", [lora_request], timeout))

    def remove_lora(self, lora_int_id: int, *, timeout: float = 60.0) -> bool:
        """Release an adapter; False if it was not there."""
        return bool(self._call_executor("remove_lora", [lora_int_id], timeout))

    def list_loras(self, *, timeout: float = 60.0) -> list[int]:
        """The numbers of the adapters that all ranks hold."""
        return list(self._call_executor("list_loras", [], timeout))

    def pin_lora(self, lora_int_id: int, *, timeout: float = 60.0) -> bool:
        """Keep an adapter until it is removed; False if it is not there."""
        return bool(self._call_executor("pin_lora", [lora_int_id], timeout))

    def sleep(self, level: int = 1, *, timeout: float = 60.0) -> bool:
        """Take the weights out of the stage's device memory; requests fail until `wake_up`."""
        return bool(self._call_executor("sleep", [level], timeout))

    def wake_up(self, tags: Sequence[str] | None = None, *, timeout: float = 60.0) -> bool:
        """Bring back what `sleep` took."""
        return bool(self._call_executor("wake_up", [tags], timeout))

    def start_profile(self, directory: str = "", *, timeout: float = 60.0) -> None:
        """Begin to record what the stage's workers compute; see `Executor.start_profile`."""
        self._call_executor("start_profile", [directory], timeout)

    def stop_profile(self, *, timeout: float = 60.0) -> list[str]:
        """Write the Chrome trace of each worker; their paths, by rank."""
        return list(self._call_executor("stop_profile", [], timeout))


class StageEngine(EngineCore, StageCalls, Generic[C]):
    """An `EngineCore` with a model loaded and links open; thread-safe; a context manager.

    `on_death` is called once, from any thread, when a worker is gone. `sink_urls` is what the next
    stage connects to, by tensor rank; empty in the last stage.
    """

    def __init__(self, config: C, *, on_death: Callable[[EngineError], None] | None = None):
        super().__init__()
        self.config, self._on_death = config, on_death
        self._start()

    @abstractmethod
    def _make(self) -> tuple[Scheduler, Executor]:
        """A new scheduler and executor."""

    def generate(
        self, requests: Sequence[OmniDiffusionRequest], *, timeout: float | None = None
    ) -> list[DiffusionOutput]:
        """Submit requests and block until all have ended; their outputs, in order.

        After `timeout` seconds those that are not done are aborted: TransferTimeout.
        """
        futures = {request.request_id: self.submit(request) for request in requests}
        pending = wait(futures.values(), timeout).not_done
        if pending:
            names = [name for name, future in futures.items() if future in pending]
            for name in names:
                self.abort(name)
            text = f"{', '.join(names)} not done after {format_seconds(timeout or 0.0)}"
            raise TransferTimeout(text, waited=timeout or 0.0, phase="running")
        return [future.result() for future in futures.values()]

    def step(self, requests: Sequence[OmniDiffusionRequest] = ()) -> list[DiffusionOutput]:
        """Run requests as `generate` does; without any, do one step of the engine's own loop."""
        return self.generate(requests) if requests else super().step()

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Fail a KV that this stage sent: its memory is released, its readers get `reason`."""
        self.executor.fail_kv(request_id, reason)

    def take_events(self) -> Future[list[Event]]:
        """A future of the next events of streamed requests; see `EventBuffer.take`."""
        return self.executor.events.take()

    def _call_executor(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        return self.call(partial(getattr(self.executor, method), *args), timeout=timeout)

    def restart(self) -> None:
        """Start new workers, at the same URLs; requests that have not ended end in an error."""
        self._stop(EngineDeadError("the engine is restarted"))
        self.config = self.config.served_at(self.sink_urls)
        self._start()

    def stats(self) -> dict[str, Any]:
        """Queues, steps, KV held, and the "link" to the next stage, as JSON values.

        Several tensor ranks have a link each: "links", in their order.
        """
        stats = self.scheduler.stats()
        if self.config.kv.sinks:
            links = self.executor.collective_rpc("sink_stats", timeout=_ANSWER_SECONDS)
            stats |= {"link": links[0]} if len(links) == 1 else {"links": links}
        return stats

    def close(self) -> None:
        """End every request with ClosedError, and release all memory; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop(ClosedError("the engine was closed"))

    def __enter__(self) -> StageEngine[C]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        scheduler, executor = self._make()
        self.sink_urls: tuple[str, ...] = ()
        try:
            if self.config.warmup_sizes or not self.config.enforce_eager:
                executor.compile_or_warm_up_model()
            if self.config.kv.sinks:
                self.sink_urls = tuple(executor.collective_rpc("sink_url", timeout=_ANSWER_SECONDS))
        except BaseException:
            executor.shutdown()
            raise
        batched = executor.supports_request_batch
        wait_ms = getattr(self.config, "request_batch_max_wait_ms", 0.0) if batched else 0.0
        self.start(scheduler, executor, max_wait=wait_ms / 1e3)
        executor.register_failure_callback(self._on_failure)

    def _stop(self, error: KVLinkError) -> None:
        self.scheduler.stop()
        for request_id in list(self._futures):
            self.abort(request_id)
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_HANG_SECONDS)
            if self._thread.is_alive():
                with contextlib.suppress(EngineDeadError):  # which ends what the thread waits for
                    self.executor.check_health(timeout=_HANG_SECONDS)
        self.executor.shutdown()
        self.executor.events.close()
        self._resolve(self.scheduler.fail_all(error))

    def _on_failure(self, error: EngineError) -> None:
        """Called in any thread when a worker is gone: no request could run any more."""
        with self._lock:
            self._dead = error
        self._resolve(self.scheduler.fail_all(error))
        if self._on_death is not None:
            self._on_death(error)


class DiffusionEngine(StageEngine[OmniDiffusionConfig]):
    """Generates images; requests whose KV another stage sends have `need_kv_receive` set."""

    def _make(self) -> tuple[SyncScheduler, Executor]:
        executor = Executor.get_class(self.config)(self.config)
        scheduler = StepScheduler if self.config.step_execution else SyncScheduler
        return scheduler(self.config, executor.kv_manager), executor
