"""`GPUARModelRunner`: reads prompts into paged KV and sends it to the next stage."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.errors import EngineError, RequestAborted, as_engine_error
from omni_kvlink.engine.kv.block_manager import KVPools
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.outputs import DiffusionOutput, ModelRunnerOutput
from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.tokens.outputs import KVConnectorOutput
from omni_kvlink.engine.tokens.token_log import TokenLog, step_outputs
from omni_kvlink.engine.worker.model import ModelUtility, PrefillSteps, model_utility

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink import KVPayload
    from omni_kvlink.engine.ar_outputs import ARSchedulerOutput
    from omni_kvlink.engine.config import OmniARConfig
    from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager


@dataclasses.dataclass(eq=False)
class _Prefill:
    """A request that runs: its steps, the pass that it waits for, and the last one's result."""

    request: OmniDiffusionRequest
    steps: PrefillSteps
    next_pass: Any = None
    result: Any = None
    is_aborted: bool = False
    started: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def key(self) -> str:
        return self.request.request_id


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
        self._prefills: dict[str, _Prefill] = {}
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
        """Run one step of all scheduled requests; its tokens, and a result for each that ends.

        The first request whose prompt is not read yet reads a part of it; all texts get their next
        token in one pass. The KV of a request is sent with its last step, and its blocks are free
        then: the link has a copy. That of a request for a text alone is not sent. EngineDeadError:
        a rank that computes with this one is gone.
        """
        ids = scheduler_output.request_ids
        self._batch_sync.begin(ids)
        for key in [key for key in self._prefills if key not in ids]:  # they failed elsewhere
            self._end(key)
        for request in scheduler_output.requests:
            blocks = scheduler_output.block_ids[request.request_id]
            request.token_log = TokenLog(request.sampling_params.logprobs)
            steps = self.utility.prefill_steps(request, self.pools, blocks)
            self._prefills[request.request_id] = _Prefill(request, steps)
        logs = {key: self._prefills[key].request.token_log or TokenLog() for key in ids}
        results = self._step([self._prefills[key] for key in ids])
        self._batch_sync.end({})
        return _model_output(logs, results)

    def abort(self, request_id: str) -> None:
        """End a running request before its next step; unknown ids are ignored."""
        if prefill := self._prefills.get(request_id):
            prefill.is_aborted = True
        self._batch_sync.abort(request_id)

    def close(self) -> None:
        """Close the link; what the next stage has not received is lost."""
        for key in list(self._prefills):
            self._end(key)
        self._sink.close()

    def _step(self, prefills: Sequence[_Prefill]) -> dict[str, DiffusionOutput]:
        """Runs alike on every rank: the ranks agree before each pass, and after."""
        errors: dict[str, Exception] = {}
        for one in prefills:
            if one.is_aborted or one.request.is_cancelled():
                self._batch_sync.abort(one.key)
            errors |= self._aborted(one)
        errors = self._batch_sync.sync_errors(errors)
        results = {key: self._failed(self._prefills[key], errors[key]) for key in errors}
        active = [one for one in prefills if one.key not in results]
        reader = next((one for one in active if one.next_pass is None), None)
        for one in active:
            if one is reader or one.next_pass is not None:
                results |= self._resume(one)
        waiting = [one for one in active if one.next_pass is not None and one.key not in results]
        return results | self._advance(waiting)

    def _resume(self, prefill: _Prefill) -> dict[str, DiffusionOutput]:
        """Run a request up to its next shared pass; return its result, if it ends."""
        errors, output = dict[str, Exception](), None
        try:
            prefill.next_pass = prefill.steps.send(prefill.result)
        except StopIteration as end:
            output = end.value
            errors = self._send(prefill, output)
        except Exception as error:
            errors[prefill.key] = error
        errors = self._batch_sync.sync_errors(errors)
        if prefill.key in errors:
            return {prefill.key: self._failed(prefill, errors[prefill.key])}
        if output is None:
            return {}
        self._end(prefill.key)
        return {prefill.key: output}

    def _send(self, prefill: _Prefill, output: DiffusionOutput) -> dict[str, Exception]:
        """Send a request's KV, unless the request was aborted; return its error, if any."""
        if aborted := self._aborted(prefill):
            return aborted
        try:
            output.seconds["prefill"] = time.perf_counter() - prefill.started
            if prefill.request.sampling_params.is_text_only:
                _check_text(prefill.request, output)
                return {}
            hidden = prefill.request.sampling_params.transfer_hidden_states
            if hidden:
                self._send_hidden(prefill.request, output)
            sent = self._sink.send(self._extract_kv_cache(prefill.request))
            output.kv_sent = dataclasses.replace(sent, has_hidden_states=hidden)
            output.seconds["execute"] = time.perf_counter() - prefill.started
        except Exception as error:
            return {prefill.key: error}
        return {}

    def _send_hidden(self, request: OmniDiffusionRequest, output: DiffusionOutput) -> None:
        """Send a request's hidden states, which the caller gets only if they were asked for."""
        if output.hidden_states is None:
            name = type(self.utility).__name__
            raise EngineError(f"transfer_hidden_states: {name} has no hidden states")
        self._sink.send_hidden(request.request_id, output.hidden_states)
        keep = request.sampling_params.return_hidden_states
        output.hidden_states = output.hidden_states[-1] if keep == "last" else output.hidden_states
        output.hidden_states = None if keep is None else output.hidden_states

    def _advance(self, prefills: Sequence[_Prefill]) -> dict[str, DiffusionOutput]:
        """Run the passes that requests wait for as one; return the results of those that fail."""
        if not prefills:
            return {}
        errors: dict[str, Exception] = {}
        try:
            found = self.utility.advance([one.next_pass for one in prefills])
            for one, result in zip(prefills, found, strict=True):
                one.result = result
        except Exception as error:
            errors = {one.key: error for one in prefills}
        errors = self._batch_sync.sync_errors(errors)
        failed = [one for one in prefills if one.key in errors]
        return {one.key: self._failed(one, errors[one.key]) for one in failed}

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> KVPayload:
        """Views of the request's KV in its blocks; `put` copies from there."""
        return self.utility.extract(request)

    def _aborted(self, prefill: _Prefill) -> dict[str, Exception]:
        """A RequestAborted by request id, if this rank knows that the request was aborted."""
        error = RequestAborted(f"request {prefill.key!r} was aborted")
        return {prefill.key: error} if self._batch_sync.is_aborted_here(prefill.key) else {}

    def _failed(self, prefill: _Prefill, error: Exception) -> DiffusionOutput:
        """The output of a request that failed; the next stage gets the error, too."""
        key = prefill.key
        self._end(key)
        self._sink.fail(key, str(error) or repr(error))
        output = DiffusionOutput(key, error=as_engine_error(error, f"request {key!r} failed"))
        output.clear_traceback()
        return output

    def _end(self, request_id: str) -> None:
        """Drop what a request holds: its contexts, and the frames of its steps."""
        prefill = self._prefills.pop(request_id)
        prefill.steps.close()
        prefill.request.past_key_values = None
        prefill.next_pass = prefill.result = None


def _model_output(
    logs: Mapping[str, TokenLog], results: dict[str, DiffusionOutput]
) -> ModelRunnerOutput:
    """The output of a step: the tokens of all its requests, and the results of those that end."""
    hidden: list[torch.Tensor | None] = []
    for key in logs:
        ended = results.get(key)
        kept = None if ended is None else ended.hidden_states
        hidden.append(None if kept is None else kept.cpu())
        if ended is not None:
            ended.hidden_states = None  # the scheduler sets it again from `pooler_output`
    sent = {key for key, result in results.items() if result.kv_sent is not None}
    connector = KVConnectorOutput(finished_sending=sent) if sent else None
    tokens = step_outputs(logs)
    return ModelRunnerOutput(list(logs), hidden, results, kv_connector_output=connector, **tokens)


def _check_text(request: OmniDiffusionRequest, output: DiffusionOutput) -> None:
    if output.text is None:
        raise EngineError(
            f"request {request.request_id!r} wants a text, and its model wrote none: leave "
            "modalities as they are"
        )
