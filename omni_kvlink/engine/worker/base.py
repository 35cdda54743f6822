"""`WorkerBase`: what workers of both kinds of stage have: a device, weights that can sleep."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from omni_kvlink.engine.errors import EngineAsleepError, EngineError
from omni_kvlink.engine.lora.calls import AdapterHolder
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.worker.cpu_offload import CpuOffload, move_weights
from omni_kvlink.engine.worker.offload import OffloadableWeights, available_memory, drop_weights
from omni_kvlink.engine.worker.profiler import ProfiledRank, Profiler
from omni_kvlink.engine.worker.quantization import clear_quantized, quantize_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig
    from omni_kvlink.engine.lora.manager import LoRAManager
    from omni_kvlink.engine.outputs import ModelRunnerOutput, StepSchedulerOutput
    from omni_kvlink.engine.worker.gpu_ar_model_runner import GPUARModelRunner
    from omni_kvlink.engine.worker.gpu_diffusion_model_runner import GPUDiffusionModelRunner

TAGS = ("weights", "kv_cache")


R = TypeVar("R", bound="GPUDiffusionModelRunner | GPUARModelRunner")


class WorkerBase(ProfiledRank, AdapterHolder, Generic[R]):
    """A rank's device; its model runner, made by `init_device`, loads and runs the model.

    `local_rank` is on this machine and selects the device, `rank` is among the stage's workers.
    """

    def __init__(self, local_rank: int, rank: int, config: StageConfig):
        self.local_rank, self.rank, self.config = local_rank, rank, config
        self.device = config.device_of(local_rank)
        self.model_runner: R | None = None
        self.profiler = Profiler.of(config, rank)
        self.process_group = ProcessGroup()  # the ranks that compute with this one
        self.weights = OffloadableWeights(
            modules=self._modules, drop=self._drop_weights, reload=self._reload_weights
        )
        self.cpu_offload: CpuOffload | None = None

    @abstractmethod
    def _make_runner(self) -> R:
        """A runner for this kind of stage."""

    @abstractmethod
    def execute_model(self, scheduled: Any) -> Any:
        """Run what was scheduled; raises EngineAsleepError while the weights are out of memory.

        A diffusion stage gives requests that make one batch, and gets their `BatchRunnerOutput`; an
        AR stage gives an `ARSchedulerOutput`, and gets a `ModelRunnerOutput`.
        """

    def execute_stepwise(self, scheduler_output: StepSchedulerOutput) -> ModelRunnerOutput:
        """Run one denoising step, where a stage has `step_execution`; else EngineError."""
        raise EngineError(f"{type(self).__name__} runs whole batches: leave step_execution off")

    @property
    def runner(self) -> R:
        """The model runner; raises EngineError before `init_device`."""
        if self.model_runner is None:
            raise self._unready_error()
        return self.model_runner

    def _unready_error(self) -> EngineError:
        """Why nothing can run: there is no model yet, or its weights are not in memory."""
        if self.model_runner is None:
            return EngineError("this worker has no runner yet: init_device() makes it")
        return EngineAsleepError(f"asleep at level {self.weights.level}: wake_up() first")

    def _adapters(self, *, awake: bool) -> LoRAManager:
        if awake and self.weights.level:
            raise self._unready_error()
        return self.runner.lora_manager

    def _modules(self) -> Mapping[str, torch.nn.Module]:
        return {**self.runner.utility.modules(), **self.runner.lora_manager.modules()}

    def init_device(self) -> None:
        """Select the device, join the other ranks (NCCL on GPUs, gloo on CPUs), load the model."""
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.process_group = ProcessGroup.join(self.rank, self.config, self.device)
        self.model_runner = self._make_runner()
        if self.config.quantization:
            quantize_layers(self.runner.utility.layers())
        self.cpu_offload = CpuOffload.of(self.config, self.runner.utility, self.device)

    def compile_or_warm_up_model(self) -> float:
        """Compile the layers and run each warm-up size, as configured; returns the seconds it took.

        All ranks that share a batch must run this together. Only the sizes compile at once: without
        any, the first requests do.
        """
        started, utility = time.perf_counter(), self.runner.utility
        if not self.config.enforce_eager:
            utility.compile(**self.config.compilation_config.options())
        if self.config.warmup_sizes:
            with torch.inference_mode():
                utility.warm_up(self.config.warmup_sizes)
        return time.perf_counter() - started

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of memory, to be kept elsewhere at level 1; False if they were out.

        Level 2 drops them, to be read from the checkpoint again.
        """
        if self.cpu_offload is not None:
            self.cpu_offload.unload()  # what is in host memory stays there at level 1
        return self.weights.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back "weights", "kv_cache", or both if None; returns whether any was asleep."""
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise ValueError(f"tags {unknown}; there are {', '.join(TAGS)}")
        return (tags is None or "weights" in tags) and self.weights.wake_up()

    def sleeping_tags(self) -> list[str]:
        """Return what `sleep` has taken and `wake_up` has not brought back."""
        return ["weights"] if self.weights.level else []

    def _drop_weights(self) -> None:
        self.runner.lora_manager.drop()
        if self.cpu_offload is not None:
            self.cpu_offload.drop()
        if self.config.quantization:
            clear_quantized(self.runner.utility.layers())
        drop_weights(self.runner.utility.modules())

    def _reload_weights(self) -> None:
        self.runner.utility.reload()
        if self.config.quantization:
            quantize_layers(self.runner.utility.layers())
        if self.cpu_offload is not None:
            self.cpu_offload.take()
            move_weights(self.runner.utility.modules(), self.device)
        self.runner.lora_manager.reload()

    def determine_available_memory(self) -> int:
        """Bytes free on the device."""
        return available_memory(self.device)

    def check_health(self) -> bool:
        """True; that it answers is the check."""
        return True

    def abort(self, request_id: str) -> None:
        """End a running request as soon as possible; may be called while `execute_model` runs."""
        self.runner.abort(request_id)

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage, if there is one, that this request's KV will not come."""
        if self.runner.kv_sink is not None:
            self.runner.kv_sink.fail(request_id, reason)

    def sink_url(self) -> str:
        """The URL to which the next stage connects; empty if there is none."""
        return "" if self.runner.kv_sink is None else self.runner.kv_sink.link.url

    def sink_stats(self) -> dict[str, Any]:
        """The statistics of the link to the next stage; empty if there is none."""
        return {} if self.runner.kv_sink is None else self.runner.kv_sink.link.stats()

    def shutdown(self) -> None:
        """Leave the other ranks, and release everything; idempotent."""
        self.profiler.close()
        self.weights.close()
        self.process_group.close()
        if self.model_runner is not None:
            self.model_runner.close()
