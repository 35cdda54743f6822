"""`Executor`: the interface between an engine and its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink.engine.config import StageConfig, load_class
from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.executor.pipeline_classes import PIPELINE_CLASSES
from omni_kvlink.engine.outputs import BatchRunnerOutput, DiffusionSchedulerOutput
from omni_kvlink.engine.tokens.events import EventBuffer
from omni_kvlink.engine.worker.model import model_utility
from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from omni_kvlink.engine.config import StageConfig
    from omni_kvlink.engine.kv.kv_manager import KVManager
    from omni_kvlink.engine.lora.request import LoRARequest
    from omni_kvlink.engine.outputs import ModelRunnerOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest

FailureCallback: TypeAlias = Callable[[EngineError], None]

_EXECUTORS = {
    "uni": "omni_kvlink.engine.executor.uniproc:UniprocExecutor",
    "mp": "omni_kvlink.engine.executor.distributed:MultiprocExecutor",
    "ray": "omni_kvlink.engine.ray.executor:RayExecutor",
    "diffusers": "omni_kvlink.engine.models.diffusers_executor:DiffusersPipelineExecutor",
}


class WorkerCalls(ABC):
    """Memory, compilation, sleep, adapters and traces of an executor's workers."""

    config: StageConfig

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

        Raises what the method raised; TransferTimeout if a worker did not answer within `timeout`
        seconds, EngineDeadError if one is gone, NotImplementedError if there are no workers.
        """

    def determine_available_memory(self) -> list[int]:
        """Bytes free on each worker's device."""
        return self.collective_rpc("determine_available_memory")

    def compile_or_warm_up_model(self) -> list[float]:
        """Compile and warm up every worker's model, as configured; the seconds it took on each.

        Blocks for up to `config.start_timeout` seconds, then raises TransferTimeout.
        """
        timeout = self.config.start_timeout
        return self.collective_rpc("compile_or_warm_up_model", timeout=timeout)

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of every worker's memory: level 1 keeps them elsewhere, 2 not."""
        return all(self.collective_rpc("sleep", args=(level,)))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took: "weights", "kv_cache", or both if None."""
        return all(self.collective_rpc("wake_up", args=(tags,)))

    @property
    def sleeping_tags(self) -> set[str]:
        """The tags that `sleep` has taken, such as "weights"; asks all workers, and blocks."""
        return set[str]().union(*self.collective_rpc("sleeping_tags"))

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` has taken anything that `wake_up` has not brought back; blocks."""
        return bool(self.sleeping_tags)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every worker, or on none; False if it was there.

        Blocks while its files are read. Raises what `LoRAManager.add_adapter` raises.
        """
        was_there = lora_request.lora_int_id in self.list_loras()
        try:
            return any(self.collective_rpc("add_lora", args=(lora_request,)))
        except KVLinkError:
            if not was_there:
                self.remove_lora(lora_request.lora_int_id)
            raise

    def remove_lora(self, lora_int_id: int) -> bool:
        """Release an adapter on every worker; False if it was not there."""
        return any(self.collective_rpc("remove_lora", args=(lora_int_id,)))

    def list_loras(self) -> list[int]:
        """The numbers of the adapters that every worker holds."""
        return sorted(set.intersection(*map(set, self.collective_rpc("list_loras"))))

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed; False if it is not there."""
        return all(self.collective_rpc("pin_lora", args=(lora_int_id,)))

    def start_profile(self, directory: str = "") -> None:
        """Begin to record what the workers compute, in a directory on their machines.

        It is `profiler_config`'s `torch_profiler_dir` if empty; EngineError without both.
        """
        trace_dir = directory or self.config.profiler_config.torch_profiler_dir
        if not trace_dir:
            raise EngineError(
                "start_profile: no directory; give one, or set torch_profiler_dir in the stage's "
                "profiler_config"
            )
        self.profile(trace_dir)

    def stop_profile(self) -> list[str]:
        """Write the Chrome trace of each worker; their paths, by rank."""
        return self.profile(None)

    def profile(self, directory: str | None) -> list[str]:
        """Record what every worker computes, for a `directory` on its machine; stop it with None.

        Stopping writes a Chrome trace for each worker, and returns their paths by rank.
        """
        if directory is None:
            return self.collective_rpc("stop_profile")
        self.collective_rpc("start_profile", args=(directory,))
        return []


class Executor(WorkerCalls):
    """Runs what a scheduler chose, on one worker or several.

    Calls come from one thread, except `prepare`, `abort`, `fail_kv`, `check_health` and
    `register_failure_callback`, which may come from any.
    """

    supports_request_batch: bool = False  # whether the pipeline runs a batch in one pass
    supports_step_execution: bool = False  # whether `execute_model` runs a `StepSchedulerOutput`
    kv_manager: KVManager[Any] | None = None  # the runner's, or a proxy; None: no KV is received
    _is_shut_down = False

    def __init__(self, config: StageConfig):
        self.config = config
        if getattr(config, "step_execution", False) and not self.supports_step_execution:
            text = f"step_execution: {type(self).__name__} runs whole requests"
            raise EngineError(f"{text}; leave step_execution off")
        batches = getattr(config, "max_concurrent_batches", 1)
        if batches > self.max_concurrent_batches:
            text = f"max_concurrent_batches {batches}: {type(self).__name__} runs one at a time"
            raise EngineError(f"{text}; set 1, or distributed_executor_backend 'mp' or 'ray'")
        self.events = EventBuffer()  # of requests that are streamed
        self._init_executor()

    @staticmethod
    def get_class(config: StageConfig) -> type[Executor]:
        """The executor class that a configuration names; "uni" for one rank, "mp" for more.

        A `model_class_name` that is a pipeline of diffusers has "diffusers".
        """
        ranks = config.parallel_config.world_size
        usual = "uni" if ranks == 1 else "mp"
        usual = "diffusers" if config.model_class_name in PIPELINE_CLASSES else usual
        name = config.distributed_executor_backend or usual
        executor_class = load_class("executor", name, _EXECUTORS)
        if not (isinstance(executor_class, type) and issubclass(executor_class, Executor)):
            raise ValueError(f"{name} is no Executor")
        return executor_class

    @abstractmethod
    def _init_executor(self) -> None:
        """Start the workers and load their models; called once."""

    @property
    def max_concurrent_batches(self) -> int:
        """The number of batches that `execute_model` takes before the first of them has ended."""
        return 1

    def prepare(self, request: OmniDiffusionRequest) -> None:
        """Fill in the model's defaults before a request is queued; EngineError if it cannot run."""
        model_utility(self.config).prepare(request)

    def execute_model(
        self, scheduler_output: DiffusionSchedulerOutput
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run all requests; a request's error is in its output, EngineDeadError is of them all.

        Blocks until they have run, or returns a Future if `max_concurrent_batches` is above 1.
        """
        run = self.execute_batch if self.supports_request_batch else self.execute_request
        return run(scheduler_output).as_model_output()

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run each request in a call of its own."""
        parts = [DiffusionSchedulerOutput([request]) for request in scheduler_output.requests]
        return BatchRunnerOutput([self.execute_batch(part).runner_outputs[0] for part in parts])

    @abstractmethod
    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run all requests in one call: one forward pass."""

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call `callback` once, from any thread, when a worker elsewhere is gone; at once if so."""

    def check_health(self, *, timeout: float) -> None:
        """Raise EngineDeadError unless every worker answers within `timeout` seconds."""
        if self._is_shut_down:
            raise EngineDeadError("the executor was shut down")

    def abort(self, request_id: str) -> None:
        """End a running request with RequestAborted, at its next denoising step."""
        self.collective_rpc("abort", args=(request_id,))

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage, if there is one, that this request's KV will not come."""
        if self.config.kv.sinks:
            self.collective_rpc("fail_kv", args=(request_id, reason))

    @abstractmethod
    def shutdown(self) -> None:
        """Shut the workers down and release their memory; idempotent."""
