"""`StepDiffusionModelRunner`: runs requests of a diffusion stage one denoising step at a time."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.errors import EngineDeadError, EngineError, RequestAborted, as_engine_error
from omni_kvlink.engine.outputs import DiffusionOutput, ModelRunnerOutput
from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.worker.gpu_diffusion_model_runner import GPUDiffusionModelRunner
from omni_kvlink.engine.worker.parallel_model_runner import share_passes
from omni_kvlink.engine.worker.step_execution import supports_step_execution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.engine.config import OmniDiffusionConfig
    from omni_kvlink.engine.outputs import StepSchedulerOutput

Errors = dict[str, Exception]
"""By request id."""


@dataclasses.dataclass(eq=False)
class _Running:
    """A request between two steps, and its state in the pipeline once it is prepared."""

    request: OmniDiffusionRequest
    state: Any = None
    noise_pred: Any = None
    started: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def key(self) -> str:
        return self.request.request_id


class StepDiffusionModelRunner(GPUDiffusionModelRunner):
    """Owns the pipeline, and the requests between two steps; on one rank, or one of a group.

    The ranks of a group are given the same steps; an error on one of them is the request's error on
    all. Which requests are aborted is part of a step, so that the ranks need not agree on it.
    """

    def __init__(
        self,
        config: OmniDiffusionConfig,
        device: torch.device,
        process_group: ProcessGroup | None = None,
    ):
        process_group = process_group or ProcessGroup()
        self._batch_sync = BatchSync(process_group)
        self._running: dict[str, _Running] = {}
        super().__init__(config, device, process_group)

    @torch.inference_mode()
    def execute_stepwise(self, scheduler_output: StepSchedulerOutput) -> ModelRunnerOutput:
        """Run one step of all scheduled requests; a result for each that ends with it.

        New requests are prepared first, then one pass runs them with those that go on. A request
        that ends, by an abort, an error or its last step, releases its KV. EngineDeadError: a rank
        that computes with this one is gone.
        """
        try:
            results = self._step(scheduler_output)
        except BaseException:
            for key in scheduler_output.request_ids:
                self._drop(key)
            raise
        for output in results.values():
            output.clear_traceback()
        return ModelRunnerOutput(list(results), [r.output for r in results.values()], results)

    def abort(self, request_id: str) -> None:
        """Does nothing: `aborted_request_ids` of the next step has the request."""

    def close(self) -> None:
        """Drop all requests, release all KV, and close the links."""
        for key in list(self._running):
            self._drop(key)
        super().close()

    def _load_model(self) -> None:
        super()._load_model()
        if not supports_step_execution(self.pipeline):
            name = type(self.pipeline).__name__
            text = f"step_execution: {name} has no supports_step_execution, it runs whole requests"
            raise EngineError(f"{text}; leave step_execution off")
        if not self.process_group.is_alone:
            share_passes(self.pipeline, self.utility.branches, self.process_group, self._batch_sync)

    def _step(self, work: StepSchedulerOutput) -> dict[str, DiffusionOutput]:
        """Runs alike on every rank of the group."""
        for key in [key for key in self._running if key not in work.request_ids]:
            self._drop(key)  # it failed elsewhere
        for request in work.requests:
            self._running[request.request_id] = _Running(request)
        self._batch_sync.begin(work.request_ids)
        errors: Errors = {
            key: RequestAborted(f"request {key!r} was aborted while it ran")
            for key in work.aborted_request_ids
        }
        results = self._fail_all(errors)
        results |= self._fail_all(self._prepare(work.requests))
        active = [self._running[key] for key in work.request_ids if key not in results]
        results |= self._fail_all(self._denoise(active))
        active = [entry for entry in active if entry.key not in results]
        return results | self._advance(active)

    def _prepare(self, requests: Sequence[OmniDiffusionRequest]) -> Errors:
        """Give new requests their KV and a state; returns the errors of those that failed."""
        errors: Errors = {}
        for request in requests:
            key = request.request_id
            try:
                request.lora = self.lora_manager.resolve(request.sampling_params)
                self._take_kv_cache(request)
                self.lora_manager.activate(request.lora)
                self._running[key].state = self.pipeline.prepare_encode(request)
            except Exception as error:
                errors[key] = as_engine_error(error, f"request {key!r} failed")
        return self._batch_sync.sync_errors(errors) if requests else {}

    def _denoise(self, running: Sequence[_Running]) -> Errors:
        """Predict the noise of all requests; one by one if that failed, to find whose error it is.

        No request has taken its step yet, so that the second pass is the same as the first.
        """
        errors = self._pass(running)
        is_dead = any(isinstance(error, EngineDeadError) for error in errors.values())
        if not errors or is_dead or len(running) == 1:
            return errors
        for key, error in errors.items():
            DiffusionOutput(key, error=error).clear_traceback()
        return {key: error for entry in running for key, error in self._pass([entry]).items()}

    def _pass(self, running: Sequence[_Running]) -> Errors:
        errors: Errors = {}
        try:
            if running:  # of all: it is in their key
                self.lora_manager.activate(running[0].request.lora)
            predictions = (
                self.pipeline.denoise_step([entry.state for entry in running]) if running else []
            )
            for entry, noise_pred in zip(running, predictions, strict=True):
                entry.noise_pred = noise_pred
        except Exception as error:
            errors = {
                entry.key: as_engine_error(error, f"request {entry.key!r} failed")
                for entry in running
            }
        return self._batch_sync.sync_errors(errors)

    def _advance(self, running: Sequence[_Running]) -> dict[str, DiffusionOutput]:
        """Let requests take their step; returns the results of those that are done or failed."""
        errors: Errors = {}
        outputs: dict[str, DiffusionOutput] = {}
        for entry in running:
            try:
                noise_pred, entry.noise_pred = entry.noise_pred, None
                self.pipeline.step_scheduler(entry.state, noise_pred)
            except Exception as error:  # noqa: PERF203 - each request has its own error
                errors[entry.key] = as_engine_error(error, f"request {entry.key!r} failed")
        errors = self._shared_errors(errors)
        for entry in running:
            if entry.key in errors or not entry.state.denoise_completed:
                continue
            try:
                decoded = self.pipeline.post_decode(entry.state)
                outputs[entry.key] = self._handle_kv_transfer(entry.request, decoded)
            except Exception as error:
                errors[entry.key] = as_engine_error(error, f"request {entry.key!r} failed")
            errors = self._shared_errors(errors)
        errors |= {key: output.error for key, output in outputs.items() if output.error is not None}
        results = self._fail_all(self._batch_sync.end(errors))
        for key in outputs.keys() - results.keys():
            results[key] = self._ended(key, outputs[key])
        return results

    def _shared_errors(self, errors: Errors) -> Errors:
        """The errors of all ranks, if they decode images together: then none may skip one alone."""
        is_shared = self.process_group.parallel.vae_patch_parallel_size > 1
        return self._batch_sync.sync_errors(errors) if is_shared else errors

    def _fail_all(self, errors: Errors) -> dict[str, DiffusionOutput]:
        """End requests in errors; the next stage gets them, too."""
        return {
            key: self._ended(key, self._failed(self._running[key].request, error))
            for key, error in errors.items()
            if key in self._running  # a rank that is gone fails all requests of the step
        }

    def _ended(self, request_id: str, output: DiffusionOutput) -> DiffusionOutput:
        """The output of a request that ends now, and drops what it holds."""
        output.seconds["execute"] = time.perf_counter() - self._running[request_id].started
        self._drop(request_id)
        return output

    def _drop(self, request_id: str) -> None:
        """Drop a request's state, and its KV; unknown ids are ignored."""
        if running := self._running.pop(request_id, None):
            running.state = running.noise_pred = None
            self._release(running.request)
