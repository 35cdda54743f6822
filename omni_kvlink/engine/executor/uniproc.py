"""`UniprocExecutor`: one worker, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig, StageConfig
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.executor.base import Executor, FailureCallback
from omni_kvlink.engine.outputs import (
    ARSchedulerOutput,
    BatchRunnerOutput,
    DiffusionSchedulerOutput,
    ModelRunnerOutput,
)
from omni_kvlink.engine.worker.base import WorkerBase
from omni_kvlink.engine.worker.gpu_ar_worker import GPUARWorker
from omni_kvlink.engine.worker.gpu_diffusion_worker import GPUDiffusionWorker
from omni_kvlink.errors import TransferTimeout


class InProcess(Executor):
    """What executors with their one worker in this process have in common."""

    worker: WorkerBase[Any]

    @staticmethod
    def make_worker(config: StageConfig) -> WorkerBase[Any]:
        """The worker of a stage's kind."""
        raise NotImplementedError

    def _init_executor(self) -> None:
        self._is_shut = False
        self.worker = self.make_worker(self.config)
        self.worker.init_device()
        self.kv_manager = self.worker.runner.kv_manager
        pipeline = self.worker.runner.utility.pipeline
        self.supports_request_batch = getattr(pipeline, "supports_request_batch", False)

    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        call = partial(getattr(self.worker, method), *args, **(kwargs or {}))
        if timeout is None:
            return [call()]
        answer: Future[Any] = Future()
        threading.Thread(target=_answer, args=(answer, call), daemon=True).start()
        if not wait([answer], timeout).done:
            raise TransferTimeout(f"{method} took more than {timeout:g} s", waited=timeout)
        return [answer.result()]

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """This worker lives as long as the process: there is nothing to report."""

    def check_health(self, *, timeout: float) -> None:
        if self._is_shut:
            raise EngineDeadError("the executor was shut down")

    def determine_available_memory(self) -> list[int]:
        return [self.worker.determine_available_memory()]

    def abort(self, request_id: str) -> None:
        self.worker.abort(request_id)

    def shutdown(self) -> None:
        self._is_shut = True
        self.worker.shutdown()


class UniprocExecutor(InProcess):
    """A diffusion stage in this process."""

    worker: GPUDiffusionWorker

    @staticmethod
    def make_worker(config: StageConfig) -> GPUDiffusionWorker:
        assert isinstance(config, OmniDiffusionConfig)
        return GPUDiffusionWorker(0, 0, config)

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        single = [self.worker.execute_model([request]) for request in scheduler_output.requests]
        return BatchRunnerOutput([output for batch in single for output in batch.runner_outputs])

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        return self.worker.execute_model(scheduler_output.requests)


class ARExecutor(InProcess):
    """An AR stage in this process."""

    worker: GPUARWorker

    @staticmethod
    def make_worker(config: StageConfig) -> GPUARWorker:
        assert isinstance(config, OmniARConfig)
        return GPUARWorker(0, 0, config)

    def execute_model(self, scheduler_output: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        assert isinstance(scheduler_output, ARSchedulerOutput)
        return self.worker.execute_model(scheduler_output)

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        raise NotImplementedError("prompts are read by execute_model")

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        raise NotImplementedError("prompts are read by execute_model")


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
