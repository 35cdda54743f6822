"""`UniprocExecutor`: one worker, in this process."""

from __future__ import annotations

from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.executor.base import Executor
from omni_kvlink.engine.ipc.rpc import set_result_of
from omni_kvlink.engine.outputs import ARSchedulerOutput, StepSchedulerOutput
from omni_kvlink.engine.worker import WorkerBase, make_worker
from omni_kvlink.errors import TransferTimeout, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.outputs import (
        BatchRunnerOutput,
        DiffusionSchedulerOutput,
        ModelRunnerOutput,
    )
    from omni_kvlink.engine.request import OmniDiffusionRequest


class UniprocExecutor(Executor):
    """Runs a stage of either kind on one worker in this process, its model loaded."""

    supports_step_execution = True
    worker: WorkerBase[Any]

    def _init_executor(self) -> None:
        self.worker = make_worker(self.config, 0, 0)
        self.worker.init_device()
        self.kv_manager, self._utility = self.worker.runner.kv_manager, self.worker.runner.utility
        pipeline = self._utility.pipeline
        self.supports_request_batch = getattr(pipeline, "supports_request_batch", False)

    def prepare(self, request: OmniDiffusionRequest) -> None:
        """Fill in the loaded model's defaults."""
        self._utility.prepare(request)
        request.emit = self.events.put

    def execute_model(self, scheduler_output: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        """Run all scheduled requests, in one pass if the pipeline can; or read the prompts."""
        if isinstance(scheduler_output, ARSchedulerOutput):
            ended: ModelRunnerOutput = self.worker.execute_model(scheduler_output)
            return ended
        if isinstance(scheduler_output, StepSchedulerOutput):
            return self.worker.execute_stepwise(scheduler_output)
        run = self.execute_batch if self.supports_request_batch else self.execute_request
        return run(scheduler_output).as_model_output()

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run all requests in one call."""
        output: BatchRunnerOutput = self.worker.execute_model(scheduler_output.requests)
        return output

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
        Thread(target=set_result_of, args=(answer, call), daemon=True).start()
        if not wait([answer], timeout).done:
            text = f"{method} took more than {format_seconds(timeout)}"
            raise TransferTimeout(text, waited=timeout)
        return [answer.result()]

    def shutdown(self) -> None:
        """Shut the worker down; idempotent."""
        self._is_shut_down = True
        self.worker.shutdown()
