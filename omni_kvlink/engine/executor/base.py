"""The contract of an executor: between an engine and whoever does its work."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from omni_kvlink.engine.config import OmniARConfig, StageConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_manager import KVManager
from omni_kvlink.engine.outputs import (
    BatchRunnerOutput,
    DiffusionSchedulerOutput,
    ModelRunnerOutput,
)
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.worker.model import model_utility

FailureCallback: TypeAlias = Callable[[EngineError], None]

_ROWS = {
    "uni": "omni_kvlink.engine.executor.uniproc:UniprocExecutor",
    "mp": "omni_kvlink.engine.executor.multiproc:MultiprocExecutor",
    "ray": "omni_kvlink.engine.ray.executor:RayExecutor",
    "diffusers": "omni_kvlink.engine.executor.diffusers:DiffusersPipelineExecutor",
}

_AR_ROWS = {**_ROWS, "uni": "omni_kvlink.engine.executor.uniproc:ARExecutor"}


class Executor(ABC):
    """Runs what a scheduler hands out, on one worker or many.

    Calls come from one thread, but `abort`, `fail_kv`, `check_health` and
    `register_failure_callback` may come from any.

    Attributes:
        supports_request_batch: whether the pipeline takes a batch in one pass.
        kv_manager: what the scheduler owns: the runner's own where there is one process, and what
            speaks for the workers' where there are several. None if no KV comes from elsewhere.
    """

    supports_request_batch: bool = False
    kv_manager: KVManager | None = None

    def __init__(self, config: StageConfig):
        self.config = config
        self._init_executor()

    @staticmethod
    def get_class(config: StageConfig) -> type[Executor]:
        """The executor that the configuration names: "uni" for one rank, "mp" for more.

        Raises:
            ValueError: no such executor, or it is no executor.
            ImportError: its module, or what it needs, is not installed.
        """
        ranks = config.parallel_config.world_size
        name = config.distributed_executor_backend or ("uni" if ranks == 1 else "mp")
        rows = _AR_ROWS if isinstance(config, OmniARConfig) else _ROWS
        module, separator, attribute = rows.get(name, name).partition(":")
        if not separator:
            raise ValueError(f"no executor {name!r}; there are {', '.join(_ROWS)}, 'module:Class'")
        found = getattr(importlib.import_module(module), attribute)
        if not (isinstance(found, type) and issubclass(found, Executor)):
            raise ValueError(f"{name} is no Executor")
        return found

    @abstractmethod
    def _init_executor(self) -> None:
        """Start the workers, and load their models; called once."""

    def prepare(self, request: OmniDiffusionRequest) -> None:
        """Complete a request before it is queued, with the model's defaults; in any thread.

        Raises:
            EngineError: it cannot run here.
        """
        model_utility(self.config).prepare(request)

    def execute_model(self, scheduler_output: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        """Run everything that was scheduled. A request's own error is in its result.

        Raises:
            EngineDeadError: the workers are gone; nothing came of any request.
        """
        batch = self.supports_request_batch and len(scheduler_output.requests) > 1
        run = self.execute_batch if batch else self.execute_request
        return run(scheduler_output).as_model_output()

    @abstractmethod
    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """One call of the workers for each request."""

    @abstractmethod
    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """One call of the workers for all of them: one forward pass."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; the answers in the order of the ranks.

        Args:
            timeout: seconds in which all must have answered; no limit if None.

        Raises:
            TransferTimeout: a worker did not answer in time.
            EngineDeadError: a worker is gone.
            Exception: what the method raised.
            NotImplementedError: this executor has no workers.
        """

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call this, from any thread, once, when a worker is gone; at once if it is already."""

    @abstractmethod
    def check_health(self, *, timeout: float) -> None:
        """Return if every worker lives and answers.

        Raises:
            EngineDeadError: one does not.
        """

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Bytes that each worker's device could still take."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """A running request ends at its next denoising step, in RequestAborted; no other does."""

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage, where there is one, that this request's KV will not come."""
        if self.config.kv.sinks:
            self.collective_rpc("fail_kv", args=(request_id, reason))

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of every worker's memory: 1 keeps them elsewhere, 2 drops them."""
        return all(self.collective_rpc("sleep", args=(level,)))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took: "weights", "kv_cache", or both if None."""
        return all(self.collective_rpc("wake_up", args=(tags,)))

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers, give back their memory; a second call does nothing."""
