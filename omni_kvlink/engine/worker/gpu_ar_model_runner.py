"""`GPUARModelRunner`: reads prompts into paged KV, and sends it to the diffusion stage."""

from __future__ import annotations

import threading
import time

import torch

from ...errors import KVLinkError
from ...link import Payload
from ..blocks import KVPools
from ..config import OmniARConfig
from ..errors import RequestAborted, RequestFailed, forget_frames
from ..kv_manager import DiffusionKVManager
from ..model import ModelUtility, model_utility
from ..outputs import ARSchedulerOutput, DiffusionOutput, ModelRunnerOutput
from ..request import OmniDiffusionRequest
from .handover import Handover


class GPUARModelRunner:
    """Owns the model and the pools; which blocks are whose is the scheduler's to say.

    Attributes:
        utility: the model, with its cache's two forms.
        pools: K and V of each layer, in blocks.
        handover: the producer's end of the link to the next stage.
    """

    def __init__(self, config: OmniARConfig, device: torch.device):
        self.config, self.device = config, device
        self.kv_manager: DiffusionKVManager | None = None  # no KV comes from elsewhere
        self.handover: Handover | None = Handover(config.kv)
        self._sink = self.handover
        self.utility: ModelUtility = model_utility(config)(config, device)
        layers, row = self.utility.kv_row()
        self.pools = KVPools(
            num_layers=layers,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            row=row,
            dtype=config.torch_dtype,
            device=device,
        )
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._cancelled: set[str] = set()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: ARSchedulerOutput) -> ModelRunnerOutput:
        """Read each scheduled prompt into its blocks and send it on; a result for each.

        When a result is there its blocks are free: the link has a copy, or nobody wants one.
        """
        with self._lock:
            self._running = set(scheduler_output.request_ids)
        results = {}
        for request in scheduler_output.requests:
            if request.is_cancelled():  # it was aborted on its way here
                self.abort(request.request_id)
            blocks = scheduler_output.block_ids[request.request_id]
            results[request.request_id] = self._execute(request, blocks)
        with self._lock:
            self._running, self._cancelled = set(), set()
        ids = scheduler_output.request_ids
        return ModelRunnerOutput(ids, [None] * len(ids), results)

    def abort(self, request_id: str) -> None:
        """A running request is not sent on; of others this knows nothing."""
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)

    def close(self) -> None:
        """Close the link; what the next stage has not fetched is lost."""
        self._sink.close()

    def _execute(
        self, request: OmniDiffusionRequest, blocks: dict[str, list[int]]
    ) -> DiffusionOutput:
        started = time.perf_counter()
        try:
            self._check_wanted(request)
            output = self.utility.prefill(request, self.pools, blocks)
            output.seconds["prefill"] = time.perf_counter() - started
            self._check_wanted(request)
            output.kv_sent = self._sink.send(self._extract_kv_cache(request))
            output.seconds["execute"] = time.perf_counter() - started
            return output
        except Exception as error:
            return self._failed(request, error)
        finally:
            request.past_key_values = None

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> Payload:
        """The request's KV where its blocks lie; the one copy, of `put`, reads them there."""
        return self.utility.extract(request)

    def _check_wanted(self, request: OmniDiffusionRequest) -> None:
        if request.request_id in self._cancelled:
            raise RequestAborted(f"request {request.request_id!r} was aborted")

    def _failed(self, request: OmniDiffusionRequest, error: Exception) -> DiffusionOutput:
        """The request's error, which whoever waits for its KV shall hear at once."""
        self._sink.fail(request.request_id, str(error) or repr(error))
        if not isinstance(error, KVLinkError):
            failure = RequestFailed(f"request {request.request_id!r} failed: {error!r}")
            failure.__cause__ = error
            error = failure
        forget_frames(error)
        return DiffusionOutput(request.request_id, error=error)
