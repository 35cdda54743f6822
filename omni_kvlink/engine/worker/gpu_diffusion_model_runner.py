"""`GPUDiffusionModelRunner`: the model of a diffusion stage, and the KV that goes in and out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import torch

from ...errors import KVLinkError
from ...link import KVLink, Payload
from ..cache_backend import CacheBackend, make_cache_backend
from ..config import OmniDiffusionConfig
from ..errors import EngineError, RequestFailed, forget_frames
from ..kv_manager import DiffusionKVManager
from ..model import ModelUtility, model_utility
from ..outputs import BatchRunnerOutput, DiffusionOutput
from ..request import DiffusionRequestBatch, OmniDiffusionRequest
from .handover import Handover


class GPUDiffusionModelRunner:
    """Owns the pipeline, and all that is done with KV caches.

    Attributes:
        utility: the model, with its cache's two forms.
        pipeline: the utility's.
        connector: the consumer's end of the link to the stage before, or None.
        handover: the producer's end of the link to the stage after, or None.
        kv_manager: the KV of this runner's requests; the scheduler owns it, where it is in the
            same process.
    """

    def __init__(self, config: OmniDiffusionConfig, device: torch.device):
        self.config, self.device = config, device
        self.kv_manager: DiffusionKVManager | None = None
        self.connector: KVLink | None = None
        self.handover: Handover | None = None
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        self._load_model()
        self._init_connector()

    @torch.inference_mode()
    def execute_model(self, requests: Sequence[OmniDiffusionRequest]) -> BatchRunnerOutput:
        """Run requests that fit into one batch; a result for each.

        What one request lacks, or does wrong, is its own error. Its KV is given back in any case.
        """
        outputs: dict[str, DiffusionOutput] = {}
        started = time.perf_counter()
        try:
            self._begin(requests)
            ready = [request for request in requests if self._take_kv_cache(request, outputs)]
            for request, output in zip(ready, self._forward(ready), strict=True):
                outputs[request.request_id] = self._handle_kv_transfer(request, output)
        finally:
            for request in requests:
                self._let_go(request)
        for output in outputs.values():
            output.seconds["execute"] = time.perf_counter() - started
            forget_frames(output.error)
        return BatchRunnerOutput.of([request.request_id for request in requests], outputs)

    def abort(self, request_id: str) -> None:
        """A running request ends at its next step; of others this knows nothing."""
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)

    def close(self) -> None:
        """Give back every KV, and close both links."""
        if self.kv_manager is not None:
            self.kv_manager.close()
        if self.connector is not None:
            self.connector.close()
        if self.handover is not None:
            self.handover.close()

    # Beginning.

    def _load_model(self) -> None:
        self.utility: ModelUtility = model_utility(self.config)(self.config, self.device)
        self.pipeline = self.utility.pipeline
        self.cache_backend: CacheBackend | None = make_cache_backend(
            self.config.cache_backend, self.config.cache_config
        )
        if self.cache_backend is not None:
            self.cache_backend.enable(self.pipeline)

    def _init_connector(self) -> None:
        kv = self.config.kv
        if kv.sinks:
            self.handover = Handover(kv)
        if kv.sources:
            timeout = kv.connect_timeout
            self.connector = KVLink.connect(kv.sources[0], timeout=timeout, **kv.source_options)
            self.kv_manager = DiffusionKVManager(self.connector, kv, device=self.device)

    # One batch.

    def _begin(self, requests: Sequence[OmniDiffusionRequest]) -> None:
        with self._lock:
            self._running = {request.request_id for request in requests}
        for request in requests:
            if request.is_cancelled():  # it was aborted on its way here
                self.abort(request.request_id)
            request.is_cancelled = partial(self._cancelled.__contains__, request.request_id)

    def _take_kv_cache(
        self, request: OmniDiffusionRequest, outputs: dict[str, DiffusionOutput]
    ) -> bool:
        """Convert a request's KV for the model; False, and its error, if there is none to take."""
        if not request.need_kv_receive:
            return True
        try:
            if self.kv_manager is None:
                raise EngineError("this stage has no KV source: set kv.sources")
            data = self.kv_manager.get_kv_cache(request.request_id)
            request.past_key_values = self.utility.convert(data, request)
        except KVLinkError as error:
            outputs[request.request_id] = self._failed(request, error)
            return False
        return True

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
            failure = RequestFailed(f"the pipeline failed: {error!r}")
            failure.__cause__ = error
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
        except KVLinkError as error:
            return self._failed(request, error)
        return output

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> Payload:
        """The request's KV as the schema has it; the tensors are borrowed, and `block_ids` empty.

        A `KVCacheTransferData` with `key_cache` and `value_cache` by layer and `kv_lens`, `ropes`
        and `num_layers`; or, of a model with several contexts, a `KVCacheBundle` of those.
        """
        return self.utility.extract(request)

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
        with self._lock:
            self._running.discard(request.request_id)
            self._cancelled.discard(request.request_id)
        if hasattr(self.pipeline, "forget"):
            self.pipeline.forget()
