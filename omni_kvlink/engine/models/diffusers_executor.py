"""`DiffusersPipelineExecutor`: runs a pipeline of diffusers in this process, without a worker."""

from __future__ import annotations

import importlib
import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from omni_kvlink.engine.errors import EngineDeadError, EngineError, NoWorkersError
from omni_kvlink.engine.executor.base import Executor, FailureCallback
from omni_kvlink.engine.executor.pipeline_classes import PIPELINE_CLASSES
from omni_kvlink.engine.lora.calls import AdapterHolder
from omni_kvlink.engine.lora.manager import LoRAManager
from omni_kvlink.engine.models.diffusers_pipeline import DiffusersPipeline, refuse_kv
from omni_kvlink.engine.models.diffusers_settings import apply_settings, check_settings
from omni_kvlink.engine.outputs import (
    BatchRunnerOutput,
    DiffusionOutput,
    DiffusionSchedulerOutput,
    RunnerOutput,
)
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.engine.step_cache.cache_backend import make_cache_backend
from omni_kvlink.engine.worker.offload import OffloadableWeights, available_memory, trim_memory
from omni_kvlink.engine.worker.profiler import Profiler
from omni_kvlink.errors import KVLinkError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import OmniDiffusionConfig
    from omni_kvlink.engine.lora.adapter import LoRATargets


class DiffusersPipelineExecutor(AdapterHolder, Executor):
    """Generates images or videos for requests that need no KV; one that needs it gets an error.

    `config.model` is a directory that `save_pretrained` of diffusers made; a subclass may load its
    pipeline from elsewhere. It must be of the class `config.model_class_name`, by diffusers' or
    vLLM-Omni's name, unless that is "bagel", the default. `config.stage` is ignored; a setting that
    has no meaning here raises EngineError.
    """

    config: OmniDiffusionConfig
    pipeline_class: ClassVar[type[DiffusersPipeline]] = DiffusersPipeline
    supports_pp: ClassVar[bool] = False  # one process: no pipeline, tensor or data parallelism

    def load_pipeline(self) -> Any:
        """Load the pipeline; called once, and again by `wake_up` after sleep level 2.

        Reads safetensors alone, runs no code of the directory, and does not use the network.
        """
        directory = Path(self.config.model)
        index = directory / "model_index.json"
        if not index.is_file():
            raise FileNotFoundError(f"{directory}: no model_index.json; save_pretrained makes one")
        self._check_class(str(json.loads(index.read_text()).get("_class_name")))
        try:
            diffusers = importlib.import_module("diffusers")
        except ImportError as error:
            text = f"diffusers cannot be imported ({error}): pip install 'omni-kvlink[diffusers]'"
            raise UnavailableError(text) from error
        return diffusers.DiffusionPipeline.from_pretrained(
            directory,
            dtype=self.config.torch_dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )

    def _init_executor(self) -> None:
        check_settings(self.config)
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        self._is_shut_down = False
        self._profiler = Profiler.of(self.config, 0)
        self.device = self.config.device_of(0)
        self.pipeline: DiffusersPipeline | None = self._load()
        self.lora_manager = LoRAManager(self.config.lora_config, self._lora_targets)
        self.supports_request_batch = self.pipeline.supports_request_batch
        self._weights = OffloadableWeights(
            modules=self._modules, drop=self._drop_pipeline, reload=self._reload_pipeline
        )

    def _load(self) -> DiffusersPipeline:
        pipe = self.load_pipeline()
        self._check_class(type(pipe).__name__)
        pipeline = self.pipeline_class(apply_settings(pipe, self.config, self.device))
        try:
            pipeline.use_cache(
                make_cache_backend(self.config.cache_backend, self.config.cache_config)
            )
        except ValueError as error:
            raise EngineError(f"cache_backend {self.config.cache_backend!r}: {error}") from error
        return pipeline

    def _check_class(self, class_name: str) -> None:
        name = self.config.model_class_name
        if name != "bagel" and class_name != PIPELINE_CLASSES.get(name, name):
            raise EngineError(
                f"{self.config.model} has a {class_name}, and model_class_name is {name}: name "
                f"{class_name}, or another directory"
            )

    def prepare(self, request: OmniDiffusionRequest) -> None:
        """Refuse a request that needs KV; params that it leaves open are the pipeline's choice."""
        refuse_kv(request)

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run each request in a call of its own."""
        single = [self._execute([request]) for request in scheduler_output.requests]
        return BatchRunnerOutput([output for batch in single for output in batch.runner_outputs])

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run all requests in one call of the pipeline."""
        return self._execute(scheduler_output.requests)

    def _execute(self, requests: Sequence[OmniDiffusionRequest]) -> BatchRunnerOutput:
        self.check_health(timeout=0.0)
        self._weights.check_awake()
        assert self.pipeline is not None
        started = time.perf_counter()
        batch = DiffusionRequestBatch(requests)
        with self._lock:
            self._running.update(batch.request_ids)
        try:
            for request in batch:
                request.is_cancelled = partial(self._cancelled.__contains__, request.request_id)
            outputs = self._forward(batch)
        finally:
            with self._lock:
                self._running.difference_update(batch.request_ids)
                self._cancelled.difference_update(batch.request_ids)
        for output in outputs:
            output.seconds["execute"] = time.perf_counter() - started
            output.clear_traceback()
        return BatchRunnerOutput([RunnerOutput(output.request_id, output) for output in outputs])

    def _forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Run the pipeline with the adapter of the batch, or return why that cannot be used."""
        assert self.pipeline is not None
        try:
            lora = self.lora_manager.resolve(batch.sampling_params)
        except KVLinkError as error:
            return [DiffusionOutput(key, error=error) for key in batch.request_ids]
        self.lora_manager.activate(lora)
        for request in batch:
            request.lora = lora
        return self.pipeline.forward(batch)

    def abort(self, request_id: str) -> None:
        """End a running request at its next denoising step."""
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)

    def collective_rpc(self, method: str, **_: Any) -> NoReturn:
        """Raises NoWorkersError."""
        raise NoWorkersError(
            f"{method}: a pipeline of diffusers runs without workers, in the engine's own process;"
            " distributed_executor_backend 'uni' or 'mp' has workers"
        )

    def initialize_from_config(self, kv_cache_configs: Sequence[Any]) -> None:
        """Does nothing: there is no KV to reserve memory for."""

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Does nothing: the pipeline lives as long as this process."""

    def check_health(self, *, timeout: float) -> None:
        """Raises EngineDeadError after `shutdown`."""
        if self._is_shut_down:
            raise EngineDeadError("the executor was shut down")

    def determine_available_memory(self) -> list[int]:
        """Bytes free on the device."""
        return [available_memory(self.device)]

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of memory: 1 keeps them elsewhere, 2 drops the pipeline."""
        return self._weights.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took; there is no "kv_cache" to bring back."""
        return (tags is None or "weights" in tags) and self._weights.wake_up()

    @property
    def sleeping_tags(self) -> set[str]:
        """The tags that `sleep` has taken: {"weights"} or none; does not block."""
        return {"weights"} if self._weights.level else set()

    def profile(self, directory: str | None) -> list[str]:
        """Record what the pipeline computes; with None, stop and write its Chrome trace."""
        if directory is None:
            return [self._profiler.stop()]
        self._profiler.start(directory)
        return []

    def shutdown(self) -> None:
        """Release the pipeline; idempotent."""
        self._is_shut_down = True
        self._profiler.close()
        self._weights.close()
        self._drop_pipeline()

    def _adapters(self, *, awake: bool) -> LoRAManager:
        if awake:
            self._weights.check_awake()
        return self.lora_manager

    def _modules(self) -> Mapping[str, torch.nn.Module]:
        assert self.pipeline is not None  # dropped by level 2 alone
        return {**self.pipeline.modules(), **self.lora_manager.modules()}

    def _lora_targets(self) -> LoRATargets | None:
        assert self.pipeline is not None
        return self.pipeline.lora_targets(self.device)

    def _reload_pipeline(self) -> None:
        self.pipeline = self._load()
        self.lora_manager.reload()

    def _drop_pipeline(self) -> None:
        self.lora_manager.drop()
        self.pipeline = None
        trim_memory()
