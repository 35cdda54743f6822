"""`GPUDiffusionModelRunner`: runs the model of a diffusion stage on the KV it received."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink.engine.errors import EngineError, as_engine_error
from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
from omni_kvlink.engine.kv.kv_sink import KVSink, receive_hidden
from omni_kvlink.engine.kv.partitioned_source import connect_source
from omni_kvlink.engine.lora.manager import LoRAManager
from omni_kvlink.engine.outputs import BatchRunnerOutput, DiffusionOutput
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.engine.step_cache.cache_backend import make_cache_backend
from omni_kvlink.engine.worker.model import model_utility

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink import KVPayload
    from omni_kvlink.engine.config import OmniDiffusionConfig
    from omni_kvlink.engine.kv.kv_source import KVSource

_NONE = (None, 1.0)  # number and scale of no adapter


class GPUDiffusionModelRunner:
    """Owns the pipeline, and all that is done with KV caches.

    `_begin`, `_all_errors` and `_end` are overridden where ranks of a process group share a batch.
    """

    connector: KVSource | None = None  # the link to the stage before
    kv_manager: DiffusionKVManager | None = None  # receives from there
    kv_sink: KVSink | None = None  # the link to the next stage

    def __init__(
        self,
        config: OmniDiffusionConfig,
        device: torch.device,
        process_group: ProcessGroup | None = None,
    ):
        self.config, self.device = config, device
        self.process_group = process_group or ProcessGroup()
        self._cancelled: dict[str, bool] = {}
        self._load_model()
        self._init_connector()

    def _load_model(self) -> None:
        config = self.config
        self.utility = model_utility(config)(config, self.device, self.process_group)
        self.pipeline = self.utility.pipeline
        self.lora_manager = LoRAManager(config.lora_config, self.utility.lora_targets)
        self.cache_backend = make_cache_backend(config.cache_backend, config.cache_config)
        if self.cache_backend is not None:
            self.cache_backend.enable(self.pipeline)

    def _init_connector(self) -> None:
        kv, coords = self.config.kv, self.process_group.coords
        if kv.sinks:
            self.kv_sink = KVSink(kv, heads=self.utility.kv_heads(), tensor=coords.tensor)
        if kv.sources:
            parallel, heads = self.config.parallel_config, self.utility.kv_heads()
            self.connector = connect_source(kv, parallel, heads=heads, coords=coords)
            self.kv_manager = DiffusionKVManager(self.connector, kv, device=self.device)

    @torch.inference_mode()
    def execute_model(self, requests: Sequence[OmniDiffusionRequest]) -> BatchRunnerOutput:
        """Run requests that make one batch; returns an output for each, in their order.

        A request's own error is in its output. Every request's KV is released, errors or not.
        """
        started = time.perf_counter()
        try:
            self._begin(requests)
            errors = self._all_errors(self._take_kv_caches(requests))
            failed = [request for request in requests if request.request_id in errors]
            ready = [request for request in requests if request.request_id not in errors]
            outputs = {r.request_id: self._failed(r, errors[r.request_id]) for r in failed}
            for request, output in zip(ready, self._forward(ready), strict=True):
                outputs[request.request_id] = self._handle_kv_transfer(request, output)
            self._end(requests, outputs)
        finally:
            for request in requests:
                self._release(request)
        for output in outputs.values():
            output.seconds["execute"] = time.perf_counter() - started
            output.clear_traceback()
        return BatchRunnerOutput.of([request.request_id for request in requests], outputs)

    def abort(self, request_id: str) -> None:
        """End a running request at its next denoising step; unknown ids are ignored."""
        cancelled = self._cancelled
        if request_id in cancelled:
            cancelled[request_id] = True

    def close(self) -> None:
        """Release all KV, and close the links."""
        for owner in (self.kv_manager, self.connector, self.kv_sink):
            if owner is not None:
                owner.close()

    def _begin(self, requests: Sequence[OmniDiffusionRequest]) -> None:
        """From here on `abort` ends these requests, and no others."""
        self._cancelled = cancelled = {request.request_id: False for request in requests}
        for request in requests:
            if request.is_cancelled():  # it was aborted before it came here
                cancelled[request.request_id] = True
            request.is_cancelled = partial(cancelled.__getitem__, request.request_id)

    def _take_kv_caches(self, requests: Sequence[OmniDiffusionRequest]) -> dict[str, Exception]:
        """Give each request its adapter, and its KV in the model's form; returns their errors."""
        errors: dict[str, Exception] = {}
        for request in requests:
            try:
                params = request.sampling_params
                if self.lora_manager.is_used or (params.lora_int_id, params.lora_scale) != _NONE:
                    request.lora = self.lora_manager.resolve(params)
                self._take_kv_cache(request)
            except Exception as error:  # noqa: PERF203 - each request has its own error
                text = "its adapter or its KV could not be used"
                errors[request.request_id] = as_engine_error(error, text)
        return errors

    def _take_kv_cache(self, request: OmniDiffusionRequest) -> None:
        if not request.need_kv_receive:
            return
        if self.kv_manager is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        data, key = self.kv_manager.get_kv_cache(request.request_id), request.request_id
        if request.need_hidden_receive and self.connector is not None:
            request.hidden_states = receive_hidden(self.connector, key)
        request.past_key_values = self.utility.convert(data, request)

    def _all_errors(self, errors: dict[str, Exception]) -> dict[str, Exception]:
        """The errors of a batch so far, by request."""
        return errors

    def _forward(self, requests: Sequence[OmniDiffusionRequest]) -> list[DiffusionOutput]:
        if not requests:
            return []
        batch = DiffusionRequestBatch(requests)
        if len(batch) > 1 and not self.pipeline.supports_request_batch:
            raise EngineError(f"{type(self.pipeline).__name__} takes one request at a time")
        if self.lora_manager.is_used:
            self.lora_manager.activate(requests[0].lora)  # the batch's: it is in their key
        try:
            if self.cache_backend is not None:
                steps = batch.sampling_params.num_inference_steps or 0
                self.cache_backend.refresh(self.pipeline, steps)
            outputs: list[DiffusionOutput] = self.pipeline.forward(batch)
        except Exception as error:
            failure = as_engine_error(error, "the pipeline failed")
            return [DiffusionOutput(key, error=failure) for key in batch.request_ids]
        if [output.request_id for output in outputs] != batch.request_ids:
            raise EngineError(f"the pipeline gave {len(outputs)} outputs for {batch!r}")
        if self.cache_backend is not None:
            for output in outputs:
                output.cached_steps = self.cache_backend.cached_steps(self.pipeline)
        return outputs

    def _handle_kv_transfer(
        self, request: OmniDiffusionRequest, output: DiffusionOutput
    ) -> DiffusionOutput:
        """Send a request's KV to the next stage, if it needs that."""
        if not request.need_kv_transfer:
            return output
        if output.error is not None:
            return self._failed(request, output.error)
        try:
            if self.kv_sink is None:
                raise EngineError("this stage has no KV sink: set kv.sinks")
            output.kv_sent = self.kv_sink.send(self._extract_kv_cache(request))
        except Exception as error:
            return self._failed(request, as_engine_error(error, "its KV could not be sent"))
        return output

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> KVPayload:
        """The request's KV in the schema's form, see `ModelUtility.extract`."""
        return self.utility.extract(request)

    def _end(
        self, requests: Sequence[OmniDiffusionRequest], outputs: dict[str, DiffusionOutput]
    ) -> None:
        """The batch is done."""

    def _failed(self, request: OmniDiffusionRequest, error: Exception) -> DiffusionOutput:
        """The output of a request that failed; the next stage gets the error, too."""
        if request.need_kv_transfer and self.kv_sink is not None:
            self.kv_sink.fail(request.request_id, str(error))
        return DiffusionOutput(request.request_id, error=error)

    def _release(self, request: OmniDiffusionRequest) -> None:
        """Drop the last references to a request's KV, so that its memory is released."""
        request.past_key_values = request.sampling_params.generator = None
        request.lora = request.hidden_states = None
        if self.kv_manager is not None:
            self.kv_manager.free(request)
        if hasattr(self.pipeline, "release_caches"):
            self.pipeline.release_caches()
