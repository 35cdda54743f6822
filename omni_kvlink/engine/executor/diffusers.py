"""`DiffusersPipelineExecutor`: a pipeline of diffusers, without a worker."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.errors import (
    EngineAsleepError,
    EngineDeadError,
    EngineError,
    NoWorkersError,
)
from omni_kvlink.engine.executor.base import Executor, FailureCallback
from omni_kvlink.engine.models.diffusers_pipeline import DiffusersPipeline
from omni_kvlink.engine.outputs import BatchRunnerOutput, DiffusionOutput, DiffusionSchedulerOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.engine.worker.offload import ParkedWeights, available_memory, trim_memory
from omni_kvlink.errors import UnavailableError

INSTALL = "pip install 'omni-kvlink[diffusers]'"


class DiffusersPipelineExecutor(Executor):
    """Paints requests that need no KV; one that does is refused, and never painted without.

    `config.model` is a directory that `save_pretrained` of diffusers made; a subclass may have its
    pipeline from elsewhere. `config.model_class_name` and `config.stage` mean nothing here.

    Raises:
        UnavailableError: diffusers is not installed.
        FileNotFoundError: `config.model` is no such directory.
        EngineError: a setting that has no meaning for this executor.
    """

    config: OmniDiffusionConfig

    def load_pipeline(self) -> Any:
        """A pipeline of diffusers, anew; called once, and once for each waking from level 2.

        Neither the network is asked nor code of the directory run, and weights are safetensors.
        """
        directory = Path(self.config.model)
        if not (directory / "model_index.json").is_file():
            raise FileNotFoundError(f"{directory}: no model_index.json; save_pretrained makes one")
        return _diffusers().DiffusionPipeline.from_pretrained(
            directory,
            dtype=self.config.torch_dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )

    def _init_executor(self) -> None:
        _check(self.config)
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        self._level, self._is_shut = 0, False
        self._parked: ParkedWeights | None = None
        self.device = self.config.device_of(0)
        self.pipeline: DiffusersPipeline | None = self._load()
        self.supports_request_batch = self.pipeline.supports_request_batch

    def _load(self) -> DiffusersPipeline:
        return DiffusersPipeline(self.load_pipeline().to(self.device))

    def prepare(self, request: OmniDiffusionRequest) -> None:
        """Nothing is filled in: what a request leaves open is the pipeline's choice.

        Raises:
            EngineError: the request needs KV.
        """
        error = _needs_kv(request)
        if error is not None:
            raise error

    # One batch.

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        single = [self._execute([request]) for request in scheduler_output.requests]
        return BatchRunnerOutput([output for batch in single for output in batch.runner_outputs])

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        return self._execute(scheduler_output.requests)

    def _execute(self, requests: Sequence[OmniDiffusionRequest]) -> BatchRunnerOutput:
        self.check_health(timeout=0.0)
        if self._level or self.pipeline is None:
            raise EngineAsleepError(f"asleep at level {self._level}: wake_up() first")
        started = time.perf_counter()
        batch = DiffusionRequestBatch(requests)
        outputs = {
            request.request_id: DiffusionOutput(request.request_id, error=_needs_kv(request))
            for request in batch
        }
        ready = [request for request in batch if outputs[request.request_id].error is None]
        try:
            self._begin(ready)
            if ready:
                found = self.pipeline.forward(DiffusionRequestBatch(ready))
                outputs |= {output.request_id: output for output in found}
        finally:
            self._end(ready)
        for output in outputs.values():
            output.seconds["execute"] = time.perf_counter() - started
            output.clear_traceback()
        return BatchRunnerOutput.of(batch.request_ids, outputs)

    def _begin(self, requests: Sequence[OmniDiffusionRequest]) -> None:
        with self._lock:
            self._running |= {request.request_id for request in requests}
        for request in requests:
            request.is_cancelled = partial(self._cancelled.__contains__, request.request_id)

    def _end(self, requests: Sequence[OmniDiffusionRequest]) -> None:
        with self._lock:
            for request in requests:
                self._running.discard(request.request_id)
                self._cancelled.discard(request.request_id)

    def abort(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)

    # What there are no workers for.

    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise NoWorkersError(
            f"{method}: a pipeline of diffusers runs without workers, in the engine's own process;"
            " distributed_executor_backend 'uni' or 'mp' has workers"
        )

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """The pipeline lives as long as the process: there is nothing to report."""

    def check_health(self, *, timeout: float) -> None:
        if self._is_shut:
            raise EngineDeadError("the executor was shut down")

    def determine_available_memory(self) -> list[int]:
        return [available_memory(self.device)]

    # Memory.

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of the device's memory: 1 keeps them elsewhere, 2 drops them.

        Returns:
            Whether it was awake.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}; there are 1 and 2")
        if self._level or self.pipeline is None:
            return False
        if level == 1:
            self._parked = ParkedWeights(self.pipeline.modules())
        else:
            self._drop_pipeline()
        self._level = level
        return True

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took; there is no "kv_cache" here to bring back.

        Returns:
            Whether anything was asleep.
        """
        if not self._level or (tags is not None and "weights" not in tags):
            return False
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        else:
            self.pipeline = self._load()
        self._level = 0
        return True

    def shutdown(self) -> None:
        self._is_shut = True
        if self._parked is not None:
            self._parked.drop()
            self._parked = None
        self._drop_pipeline()

    def _drop_pipeline(self) -> None:
        self.pipeline = None
        trim_memory()


def _diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise UnavailableError(f"diffusers cannot be imported ({error}): {INSTALL}") from error


def _check(config: OmniDiffusionConfig) -> None:
    """What this executor has no use for is refused, not passed over."""
    useless = {
        "kv.sources": config.kv.sources,
        "kv.sinks": config.kv.sinks,
        "cache_backend": config.cache_backend != "none",
        "parallel_config": config.parallel_config.world_size > 1,
    }
    names = ", ".join(name for name, value in useless.items() if value)
    if names:
        raise EngineError(f"a pipeline of diffusers has no use for {names}: leave it out")


def _needs_kv(request: OmniDiffusionRequest) -> EngineError | None:
    if not (request.need_kv_receive or request.need_kv_transfer):
        return None
    return EngineError(
        f"request {request.request_id!r} needs KV, and a pipeline of diffusers neither takes nor"
        " gives any: use distributed_executor_backend 'uni' or 'mp'"
    )
