"""`GPUARModelRunner`: reads prompts into paged KV, and sends it to the diffusion stage."""

from __future__ import annotations

import time

import torch

from omni_kvlink.engine.config import OmniARConfig
from omni_kvlink.engine.errors import RequestAborted, RequestFailed, forget_frames
from omni_kvlink.engine.kv.block_manager import KVPools
from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.outputs import ARSchedulerOutput, DiffusionOutput, ModelRunnerOutput
from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.worker.model import ModelUtility, model_utility
from omni_kvlink.errors import KVLinkError
from omni_kvlink.link import Payload


class GPUARModelRunner:
    """Owns the model and the pools; which blocks are whose is the scheduler's to say.

    Args:
        mates: the ranks that hold the other heads. All are given the same requests in the same
            order; what one of them lacks is an error on each.

    Attributes:
        utility: the model, with its cache's two forms.
        pools: K and V of each layer, in blocks.
        handover: the producer's end of the link to the next stage.
    """

    def __init__(
        self, config: OmniARConfig, device: torch.device, mates: ProcessGroup | None = None
    ):
        self.config, self.device = config, device
        self.mates = ProcessGroup() if mates is None else mates
        self.kv_manager: DiffusionKVManager | None = None  # no KV comes from elsewhere
        self.utility: ModelUtility = model_utility(config)(config, device, self.mates)
        self._sink = KVSink(
            config.kv, heads=self.utility.kv_heads(), tensor=self.mates.place.tensor
        )
        self.handover: KVSink | None = self._sink
        self._agreement = BatchSync(self.mates)
        layers, row = self.utility.kv_row()
        self.pools = KVPools(
            num_layers=layers,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            row=row,
            dtype=config.torch_dtype,
            device=device,
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: ARSchedulerOutput) -> ModelRunnerOutput:
        """Read each scheduled prompt into its blocks and send it on; a result for each.

        When a result is there its blocks are free: the link has a copy, or nobody wants one.

        Raises:
            EngineDeadError: a rank that computes with this one is gone.
        """
        self._agreement.begin(scheduler_output.request_ids)
        results = {}
        for request in scheduler_output.requests:
            if request.is_cancelled():  # it was aborted on its way here
                self.abort(request.request_id)
            blocks = scheduler_output.block_ids[request.request_id]
            results[request.request_id] = self._execute(request, blocks)
        self._agreement.end({})
        ids = scheduler_output.request_ids
        return ModelRunnerOutput(ids, [None] * len(ids), results)

    def abort(self, request_id: str) -> None:
        """A running request is not sent on; of others this knows nothing."""
        self._agreement.abort(request_id)

    def close(self) -> None:
        """Close the link; what the next stage has not fetched is lost."""
        self._sink.close()

    def _execute(
        self, request: OmniDiffusionRequest, blocks: dict[str, list[int]]
    ) -> DiffusionOutput:
        """On every rank alike: they agree before they compute together, and after."""
        started, key = time.perf_counter(), request.request_id
        output = DiffusionOutput(key)
        errors = self._agreement.settle(self._unwanted(request))
        if not errors:
            try:
                output = self._read_and_send(request, blocks, started)
            except Exception as error:
                errors[key] = error
            finally:
                request.past_key_values = None
            errors = self._agreement.settle(errors)
        return self._failed(request, errors[key]) if key in errors else output

    def _read_and_send(
        self, request: OmniDiffusionRequest, blocks: dict[str, list[int]], started: float
    ) -> DiffusionOutput:
        output = self.utility.prefill(request, self.pools, blocks)
        output.seconds["prefill"] = time.perf_counter() - started
        for error in self._unwanted(request).values():
            raise error
        output.kv_sent = self._sink.send(self._extract_kv_cache(request))
        output.seconds["execute"] = time.perf_counter() - started
        return output

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> Payload:
        """The request's KV where its blocks lie; the one copy, of `put`, reads them there."""
        return self.utility.extract(request)

    def _unwanted(self, request: OmniDiffusionRequest) -> dict[str, Exception]:
        """Its error, by its id, if this rank has heard that it was aborted."""
        key = request.request_id
        if not self._agreement.has_heard(key):
            return {}
        return {key: RequestAborted(f"request {key!r} was aborted")}

    def _failed(self, request: OmniDiffusionRequest, error: Exception) -> DiffusionOutput:
        """The request's error, which whoever waits for its KV shall hear at once."""
        self._sink.fail(request.request_id, str(error) or repr(error))
        if not isinstance(error, KVLinkError):
            failure = RequestFailed(f"request {request.request_id!r} failed: {error!r}")
            failure.__cause__ = error
            error = failure
        forget_frames(error)
        return DiffusionOutput(request.request_id, error=error)
