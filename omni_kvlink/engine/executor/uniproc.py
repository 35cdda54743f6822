"""`UniprocExecutor`: one worker, in this process."""

from __future__ import annotations

from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.executor.base import Executor, FailureCallback
from omni_kvlink.engine.outputs import (
    ARSchedulerOutput,
    BatchRunnerOutput,
    DiffusionSchedulerOutput,
    ModelRunnerOutput,
)
from omni_kvlink.engine.worker.gpu_ar_worker import GPUARWorker
from omni_kvlink.engine.worker.gpu_diffusion_worker import GPUDiffusionWorker
from omni_kvlink.errors import TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.request import OmniDiffusionRequest


class UniprocExecutor(Executor):
    """Runs a diffusion stage on one worker in this process.

    Attributes:
        worker: the worker, its model loaded.
    """

    worker: GPUDiffusionWorker | GPUARWorker

    def _init_executor(self) -> None:
        self._is_shut_down = False
        self.worker = self._make_worker()
        self.worker.init_device()
        self.kv_manager = self.worker.runner.kv_manager
        pipeline = self.worker.runner.utility.pipeline
        self.supports_request_batch = getattr(pipeline, "supports_request_batch", False)

    def _make_worker(self) -> GPUDiffusionWorker | GPUARWorker:
        assert isinstance(self.config, OmniDiffusionConfig)
        return GPUDiffusionWorker(0, 0, self.config)

    def prepare(self, request: OmniDiffusionRequest) -> None:
        """Fill in the loaded model's defaults; see `Executor.prepare`."""
        self.worker.runner.utility.prepare(request)

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run each request in a call of its own."""
        assert isinstance(self.worker, GPUDiffusionWorker)
        single = [self.worker.execute_model([request]) for request in scheduler_output.requests]
        return BatchRunnerOutput([output for batch in single for output in batch.runner_outputs])

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run all requests in one call."""
        assert isinstance(self.worker, GPUDiffusionWorker)
        return self.worker.execute_model(scheduler_output.requests)

    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker; with a timeout, in a thread of its own."""
        call = partial(getattr(self.worker, method), *args, **(kwargs or {}))
        if timeout is None:
            return [call()]
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=run, daemon=True).start()
        if not wait([answer], timeout).done:
            raise TransferTimeout(f"{method} took more than {timeout:g} s", waited=timeout)
        return [answer.result()]

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Does nothing: the worker lives as long as this process."""

    def check_health(self, *, timeout: float) -> None:
        """Raises EngineDeadError after `shutdown`."""
        if self._is_shut_down:
            raise EngineDeadError("the executor was shut down")

    def determine_available_memory(self) -> list[int]:
        """Bytes free on the worker's device."""
        return [self.worker.determine_available_memory()]

    def abort(self, request_id: str) -> None:
        """End a running request at its next denoising step."""
        self.worker.abort(request_id)

    def shutdown(self) -> None:
        """Shut the worker down; idempotent."""
        self._is_shut_down = True
        self.worker.shutdown()


class ARExecutor(UniprocExecutor):
    """Runs an AR stage on one worker in this process."""

    def _make_worker(self) -> GPUARWorker:
        assert isinstance(self.config, OmniARConfig)
        return GPUARWorker(0, 0, self.config)

    def execute_model(self, scheduler_output: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        """Read the scheduled prompts."""
        assert isinstance(scheduler_output, ARSchedulerOutput)
        assert isinstance(self.worker, GPUARWorker)
        return self.worker.execute_model(scheduler_output)
