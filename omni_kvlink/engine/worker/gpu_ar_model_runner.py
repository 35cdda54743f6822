"""`GPUARModelRunner`: reads prompts into paged KV and sends it to the next stage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from omni_kvlink.engine.errors import RequestAborted, as_engine_error
from omni_kvlink.engine.kv.block_manager import KVPools
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.outputs import ARSchedulerOutput, DiffusionOutput, ModelRunnerOutput
from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.worker.model import ModelUtility, model_utility

if TYPE_CHECKING:
    from omni_kvlink import KVPayload
    from omni_kvlink.engine.config import OmniARConfig
    from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
    from omni_kvlink.engine.request import OmniDiffusionRequest


class GPUARModelRunner:
    """Owns the model and the KV pools; the scheduler owns their blocks.

    The ranks of the process group hold the other heads. All are given the same requests in the same
    order; an error on one of them is the request's error on all.
    """

    kv_manager: DiffusionKVManager | None = None  # no KV comes from another stage

    def __init__(
        self, config: OmniARConfig, device: torch.device, process_group: ProcessGroup | None = None
    ):
        self.config, self.device = config, device
        self.process_group = process_group or ProcessGroup()
        self.utility: ModelUtility = model_utility(config)(config, device, self.process_group)
        heads, coords = self.utility.kv_heads(), self.process_group.coords
        self._sink = KVSink(config.kv, heads=heads, tensor=coords.tensor)
        self.kv_sink: KVSink | None = self._sink
        self._batch_sync = BatchSync(self.process_group)
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
        """Read each scheduled prompt into its blocks and send their KV; a result for each.

        The blocks are free when this returns: the link has a copy of those that were sent.
        EngineDeadError: a rank that computes with this one is gone.
        """
        self._batch_sync.begin(scheduler_output.request_ids)
        results = {}
        for request in scheduler_output.requests:
            if request.is_cancelled():  # it was aborted before it came here
                self.abort(request.request_id)
            blocks = scheduler_output.block_ids[request.request_id]
            results[request.request_id] = self._execute(request, blocks)
        self._batch_sync.end({})
        ids = scheduler_output.request_ids
        return ModelRunnerOutput(ids, [None] * len(ids), results)

    def abort(self, request_id: str) -> None:
        """Do not send the KV of a running request; unknown ids are ignored."""
        self._batch_sync.abort(request_id)

    def close(self) -> None:
        """Close the link; what the next stage has not received is lost."""
        self._sink.close()

    def _execute(
        self, request: OmniDiffusionRequest, blocks: dict[str, list[int]]
    ) -> DiffusionOutput:
        """Runs alike on every rank: the ranks agree before they compute, and after."""
        started, key = time.perf_counter(), request.request_id
        output = DiffusionOutput(key)
        errors = self._batch_sync.sync_errors(self._aborted(request))
        if not errors:
            try:
                output = self.utility.prefill(request, self.pools, blocks)
                output.seconds["prefill"] = time.perf_counter() - started
                errors = self._aborted(request)
                if not errors:
                    output.kv_sent = self._sink.send(self._extract_kv_cache(request))
                    output.seconds["execute"] = time.perf_counter() - started
            except Exception as error:
                errors[key] = error
            finally:
                request.past_key_values = None
            errors = self._batch_sync.sync_errors(errors)
        return self._failed(request, errors[key]) if key in errors else output

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> KVPayload:
        """Views of the request's KV in its blocks; `put` copies from there."""
        return self.utility.extract(request)

    def _aborted(self, request: OmniDiffusionRequest) -> dict[str, Exception]:
        """A RequestAborted by request id, if this rank knows that the request was aborted."""
        key = request.request_id
        error = RequestAborted(f"request {key!r} was aborted")
        return {key: error} if self._batch_sync.is_aborted_here(key) else {}

    def _failed(self, request: OmniDiffusionRequest, error: Exception) -> DiffusionOutput:
        """The output of a request that failed; the next stage gets the error, too."""
        key = request.request_id
        self._sink.fail(key, str(error) or repr(error))
        output = DiffusionOutput(key, error=as_engine_error(error, f"request {key!r} failed"))
        output.clear_traceback()
        return output
