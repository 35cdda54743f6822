"""`GPUDiffusionModelRunner`: the model of a diffusion stage, and the KV that goes in and out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.errors import EngineError, RequestFailed, forget_frames
from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
from omni_kvlink.engine.kv.kv_partition import KVPartition
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.kv.kv_source import KVSource
from omni_kvlink.engine.outputs import BatchRunnerOutput, DiffusionOutput
from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.guidance import SharedBranches
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.engine.step_cache.cache_backend import CacheBackend, make_cache_backend
from omni_kvlink.engine.worker.model import ModelUtility, model_utility
from omni_kvlink.errors import KVLinkError
from omni_kvlink.link import Payload


class GPUDiffusionModelRunner:
    """Owns the pipeline, and all that is done with KV caches.

    Args:
        mates: the ranks that compute with this one. All are given the same batches in the same
            order; what one of them lacks is an error on each.

    Attributes:
        utility: the model, with its cache's two forms.
        pipeline: the utility's.
        connector: where KV comes from, the links to the stage before; or None.
        handover: the producer's end of the link to the stage after, or None.
        kv_manager: the KV of this runner's requests; the scheduler owns it, where it is in the
            same process.
    """

    def __init__(
        self, config: OmniDiffusionConfig, device: torch.device, mates: ProcessGroup | None = None
    ):
        self.config, self.device = config, device
        self.mates = ProcessGroup() if mates is None else mates
        self.kv_manager: DiffusionKVManager | None = None
        self.connector: KVSource | None = None
        self.handover: KVSink | None = None
        self._agreement = BatchSync(self.mates)
        self._load_model()
        self._init_connector()

    @torch.inference_mode()
    def execute_model(self, requests: Sequence[OmniDiffusionRequest]) -> BatchRunnerOutput:
        """Run requests that fit into one batch; a result for each.

        What one request lacks, or does wrong, is its own error. Its KV is given back in any case.
        Images are the leader's alone: the others' results have none.

        Raises:
            EngineDeadError: a rank that computes with this one is gone.
        """
        outputs: dict[str, DiffusionOutput] = {}
        started = time.perf_counter()
        try:
            self._begin(requests)
            ready = self._take_kv_caches(requests, outputs)
            for request, output in zip(ready, self._forward(ready), strict=True):
                outputs[request.request_id] = self._handle_kv_transfer(request, output)
            self._end(requests, outputs)
        finally:
            for request in requests:
                self._let_go(request)
        for output in outputs.values():
            output.seconds["execute"] = time.perf_counter() - started
            forget_frames(output.error)
        return BatchRunnerOutput.of([request.request_id for request in requests], outputs)

    def abort(self, request_id: str) -> None:
        """A running request ends at its next step; of others this knows nothing."""
        self._agreement.abort(request_id)

    def close(self) -> None:
        """Give back every KV, and close all links."""
        if self.kv_manager is not None:
            self.kv_manager.close()
        if self.connector is not None:
            self.connector.close()
        if self.handover is not None:
            self.handover.close()

    # Beginning.

    def _load_model(self) -> None:
        self.utility: ModelUtility = model_utility(self.config)(
            self.config, self.device, self.mates
        )
        self.pipeline = self.utility.pipeline
        if not self.mates.is_alone:
            hooks, agreement = self.pipeline.hooks, self._agreement
            hooks.branches = SharedBranches(self.utility.branches, self.mates, agreement)
            hooks.settle, hooks.decode = agreement.settle, self.mates.place.is_leader
        self.cache_backend: CacheBackend | None = make_cache_backend(
            self.config.cache_backend, self.config.cache_config
        )
        if self.cache_backend is not None:
            self.cache_backend.enable(self.pipeline)

    def _init_connector(self) -> None:
        kv, heads = self.config.kv, self.utility.kv_heads()
        if kv.sinks:
            self.handover = KVSink(kv, heads=heads, tensor=self.mates.place.tensor)
        if kv.sources:
            division = KVPartition(heads, len(kv.sources), self.config.parallel_config)
            self.connector = KVSource.connect(kv, division, self.mates.place)
            self.kv_manager = DiffusionKVManager(self.connector, kv, device=self.device)

    # One batch.

    def _begin(self, requests: Sequence[OmniDiffusionRequest]) -> None:
        self._agreement.begin([request.request_id for request in requests])
        for request in requests:
            if request.is_cancelled():  # it was aborted on its way here
                self.abort(request.request_id)
            request.is_cancelled = partial(self._agreement.is_cancelled, request.request_id)

    def _take_kv_caches(
        self, requests: Sequence[OmniDiffusionRequest], outputs: dict[str, DiffusionOutput]
    ) -> list[OmniDiffusionRequest]:
        """Convert each request's KV for the model; those that have it on every rank."""
        errors: dict[str, Exception] = {}
        for request in requests:
            try:
                self._take_kv_cache(request)
            except Exception as error:
                errors[request.request_id] = _known("its KV could not be converted", error)
        errors = self._agreement.settle(errors)
        for request in requests:
            if request.request_id in errors:
                outputs[request.request_id] = self._failed(request, errors[request.request_id])
        return [request for request in requests if request.request_id not in errors]

    def _take_kv_cache(self, request: OmniDiffusionRequest) -> None:
        if not request.need_kv_receive:
            return
        if self.kv_manager is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        data = self.kv_manager.get_kv_cache(request.request_id)
        request.past_key_values = self.utility.convert(data, request)

    def _forward(self, requests: Sequence[OmniDiffusionRequest]) -> list[DiffusionOutput]:
        if not requests:
            return []
        batch = DiffusionRequestBatch(requests)
        if len(batch) > 1 and not self.pipeline.supports_request_batch:
            raise EngineError(f"{type(self.pipeline).__name__} takes one request at a time")
        if self.cache_backend is not None:
            steps = batch.sampling_params.num_inference_steps or 0
            self.cache_backend.refresh(self.pipeline, steps)
        try:
            outputs: list[DiffusionOutput] = self.pipeline.forward(batch)
        except Exception as error:
            failure = _known("the pipeline failed", error)
            return [DiffusionOutput(key, error=failure) for key in batch.request_ids]
        if [output.request_id for output in outputs] != batch.request_ids:
            raise EngineError(f"the pipeline gave {len(outputs)} outputs for {batch!r}")
        return outputs

    # What goes on to the next stage.

    def _handle_kv_transfer(
        self, request: OmniDiffusionRequest, output: DiffusionOutput
    ) -> DiffusionOutput:
        """Send a request's KV on, if it is wanted; a failure is this request's."""
        if not request.need_kv_transfer:
            return output
        if output.error is not None:
            return self._failed(request, output.error)
        try:
            if self.handover is None:
                raise EngineError("this stage has no KV sink: set kv.sinks")
            output.kv_sent = self.handover.send(self._extract_kv_cache(request))
        except Exception as error:
            return self._failed(request, _known("its KV could not be handed on", error))
        return output

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> Payload:
        """The request's KV as the schema has it; the tensors are borrowed, and `block_ids` empty.

        A `KVCacheTransferData` with `key_cache` and `value_cache` by layer and `kv_lens`, `ropes`
        and `num_layers`; or, of a model with several contexts, a `KVCacheBundle` of those.
        """
        return self.utility.extract(request)

    def _end(
        self, requests: Sequence[OmniDiffusionRequest], outputs: dict[str, DiffusionOutput]
    ) -> None:
        """What one rank could not paint, or hand on, has failed on all."""
        own = {key: output.error for key, output in outputs.items() if output.error is not None}
        errors = self._agreement.end(own)
        for request in requests:
            key = request.request_id
            if key in errors and key not in own:
                outputs[key] = self._failed(request, errors[key])

    def _failed(self, request: OmniDiffusionRequest, error: Exception) -> DiffusionOutput:
        """The request's error, which the next stage shall hear of, too."""
        if request.need_kv_transfer and self.handover is not None:
            self.handover.fail(request.request_id, str(error))
        return DiffusionOutput(request.request_id, error=error)

    def _let_go(self, request: OmniDiffusionRequest) -> None:
        """The last references to a request's KV: its memory goes back."""
        request.past_key_values = request.sampling_params.generator = None
        if self.kv_manager is not None:
            self.kv_manager.free(request)
        if hasattr(self.pipeline, "forget"):
            self.pipeline.forget()


def _known(what: str, error: Exception) -> KVLinkError:
    """An error of the library's family, this one or one that it caused."""
    if isinstance(error, KVLinkError):
        return error
    failure = RequestFailed(f"{what}: {error!r}")
    failure.__cause__ = error
    return failure
