"""`Executor`: the interface between an engine and its workers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink.engine.config import OmniARConfig, StageConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.worker.model import model_utility

if TYPE_CHECKING:
    from omni_kvlink.engine.kv.interface import KVManager
    from omni_kvlink.engine.outputs import (
        BatchRunnerOutput,
        DiffusionSchedulerOutput,
        ModelRunnerOutput,
    )
    from omni_kvlink.engine.request import OmniDiffusionRequest

FailureCallback: TypeAlias = Callable[[EngineError], None]

_EXECUTORS = {
    "uni": "omni_kvlink.engine.executor.uniproc:UniprocExecutor",
    "mp": "omni_kvlink.engine.executor.multiproc:MultiprocExecutor",
    "ray": "omni_kvlink.engine.ray.executor:RayExecutor",
    "diffusers": "omni_kvlink.engine.models.diffusers_executor:DiffusersPipelineExecutor",
}
"""Executors by name, as "module:Class"; imported when a configuration names them."""

_AR_EXECUTORS = {**_EXECUTORS, "uni": "omni_kvlink.engine.executor.uniproc:ARExecutor"}


class Executor(ABC):
    """Runs what a scheduler chose, on one worker or several.

    Calls come from one thread, except `abort`, `fail_kv`, `check_health` and
    `register_failure_callback`, which may come from any.

    Attributes:
        supports_request_batch: whether the pipeline runs a batch in one pass.
        kv_manager: for the scheduler: the runner's own, or a proxy of those in other processes;
            None if no KV comes from another stage.
    """

    supports_request_batch: bool = False
    kv_manager: KVManager | None = None

    def __init__(self, config: StageConfig):
        self.config = config
        self._init_executor()

    @staticmethod
    def get_class(config: StageConfig) -> type[Executor]:
        """The executor class that a configuration names; "uni" for one rank, "mp" for more.

        Raises:
            ValueError: there is no such executor, or the named class is none.
            ImportError: its module, or what that needs, is not installed.
        """
        ranks = config.parallel_config.world_size
        name = config.distributed_executor_backend or ("uni" if ranks == 1 else "mp")
        table = _AR_EXECUTORS if isinstance(config, OmniARConfig) else _EXECUTORS
        module, separator, attribute = table.get(name, name).partition(":")
        if not separator:
            names = ", ".join(_EXECUTORS)
            raise ValueError(f"no executor {name!r}; there are {names}, 'module:Class'")
        found = getattr(importlib.import_module(module), attribute)
        if not (isinstance(found, type) and issubclass(found, Executor)):
            raise ValueError(f"{name} is no Executor")
        return found

    @abstractmethod
    def _init_executor(self) -> None:
        """Start the workers and load their models; called once."""

    def prepare(self, request: OmniDiffusionRequest) -> None:
        """Fill in the model's defaults before a request is queued; from any thread.

        Raises:
            EngineError: the request cannot run here.
        """
        model_utility(self.config).prepare(request)

    def execute_model(self, scheduler_output: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        """Run all scheduled requests. A request's own error is in its output.

        Raises:
            EngineDeadError: the workers are gone; no request has an output.
        """
        batch = self.supports_request_batch and len(scheduler_output.requests) > 1
        run = self.execute_batch if batch else self.execute_request
        return run(scheduler_output).as_model_output()

    @abstractmethod
    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run each request in a call of its own."""

    @abstractmethod
    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run all requests in one call: one forward pass."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; returns the answers in the order of the ranks.

        Args:
            method: its name.
            timeout: seconds in which all must have answered; no limit if None.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            TransferTimeout: a worker did not answer in time.
            EngineDeadError: a worker is gone.
            NotImplementedError: this executor has no workers.
            Exception: what the method raised.
        """

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call `callback` once, from any thread, when a worker is gone; at once if one is."""

    @abstractmethod
    def check_health(self, *, timeout: float) -> None:
        """Return if every worker answers within `timeout` seconds.

        Raises:
            EngineDeadError: one does not.
        """

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Bytes free on each worker's device."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a running request with RequestAborted, at its next denoising step."""

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage, if there is one, that this request's KV will not come."""
        if self.config.kv.sinks:
            self.collective_rpc("fail_kv", args=(request_id, reason))

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of every worker's memory: level 1 keeps them elsewhere, 2 not."""
        return all(self.collective_rpc("sleep", args=(level,)))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took: "weights", "kv_cache", or both if None."""
        return all(self.collective_rpc("wake_up", args=(tags,)))

    @abstractmethod
    def shutdown(self) -> None:
        """Shut the workers down and release their memory; idempotent."""
