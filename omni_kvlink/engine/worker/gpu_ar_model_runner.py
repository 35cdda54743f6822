"""`GPUARModelRunner`: reads prompts into paged KV and sends it to the next stage."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.errors import EngineError, RequestAborted, as_engine_error
from omni_kvlink.engine.kv.block_manager import KVPools
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.kv.kv_transfer import (
    KVTransferConsumer,
    KVTransferProducer,
    name_of_weights,
)
from omni_kvlink.engine.lora.manager import LoRAManager
from omni_kvlink.engine.outputs import DiffusionOutput, ModelRunnerOutput
from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.tokens.outputs import KVConnectorOutput
from omni_kvlink.engine.tokens.token_log import TokenLog, step_outputs
from omni_kvlink.engine.worker.model import ModelUtility, model_utility
from omni_kvlink.engine.worker.pass_clock import PassClock
from omni_kvlink.engine.worker.prefill_utility import PrefillSteps, TextPass
from omni_kvlink.engine.worker.token_budget import divide_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink import KVPayload
    from omni_kvlink.engine.ar_outputs import ARSchedulerOutput
    from omni_kvlink.engine.config import OmniARConfig
    from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
    from omni_kvlink.engine.lora.adapter import ActiveLoRA


@dataclasses.dataclass(eq=False)
class _Prefill:
    """A request that runs: its steps, the pass that it waits for, and the last one's result."""

    request: OmniDiffusionRequest
    steps: PrefillSteps
    clock: PassClock
    next_pass: TextPass | None = None
    result: Any = None
    is_new: bool = True
    num_computed_tokens: int = 0  # in blocks, as far as the passes tell
    is_aborted: bool = False
    error: Exception | None = None
    started: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def key(self) -> str:
        return self.request.request_id

    def set_pass(self, next_pass: TextPass | None) -> None:
        """Set the pass that it waits for; None if it is to go on by itself."""
        self.next_pass = next_pass
        if next_pass is not None:
            self.num_computed_tokens = max(self.num_computed_tokens, next_pass.num_computed_tokens)

    def end_chunk(self, chunk: TextPass, result: Any) -> None:
        """Take the result of its pass, or of a part of it, after which it waits for the rest."""
        assert self.next_pass is not None
        if chunk.num_tokens == self.next_pass.num_tokens:
            self.next_pass, self.result = None, result
        else:
            self.set_pass(self.next_pass.rest(chunk.num_tokens, result))


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
        self.lora_manager = LoRAManager(config.lora_config, self.utility.lora_targets)
        heads, coords = self.utility.kv_heads(), self.process_group.coords
        if config.enable_prefix_caching or config.kv_transfer:
            _check_prefixes(self.utility)
        transfer = config.kv_transfer
        self.kv_sink: KVSink | None = None  # the link to the next stage
        if config.kv.sinks:
            self.kv_sink = KVSink(config.kv, heads=heads, tensor=coords.tensor)
        self.kv_transfer: KVTransferProducer | KVTransferConsumer | None = None
        if transfer is not None:
            kind = KVTransferProducer if transfer.is_producer else KVTransferConsumer
            self.kv_transfer = kind(transfer, name_of_weights(self.utility.modules()))
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

        One request reads an image. All texts that are written get their next token, and prompts
        their next tokens up to `max_num_batched_tokens`, in one pass. Each layer of a request's KV
        leaves in the last pass that extends it, when its computation is enqueued; with the last
        step all of it is sent, and its blocks are free: the link has a copy. That of a request for
        a text alone is not sent. EngineDeadError: a rank that computes with this one is gone.
        """
        self.utility.release_caches()
        ids = scheduler_output.request_ids
        self._batch_sync.begin(ids)
        for key in [key for key in self._prefills if key not in ids]:  # they failed elsewhere
            self._end(key)
        for request in scheduler_output.requests:
            self._prefills[request.request_id] = self._begin(request, scheduler_output)
        logs = {key: self._prefills[key].request.token_log or TokenLog() for key in ids}
        results = self._step([self._prefills[key] for key in ids])
        self._batch_sync.end({})
        return _model_output(logs, results)

    def _begin(self, request: OmniDiffusionRequest, output: ARSchedulerOutput) -> _Prefill:
        """A request's first steps, and its adapter, or the error that it has instead."""
        key = request.request_id
        computed = output.num_computed_tokens.get(key, 0)
        request.token_log = TokenLog(request.sampling_params.logprobs)
        if self.kv_sink is not None and not request.sampling_params.is_text_only:
            request.kv_stream = self.kv_sink.open()
        steps = self._steps(request, output.block_ids[key], computed)
        prefill = _Prefill(request, steps, PassClock(self.device))
        try:
            request.lora = self.lora_manager.resolve(request.sampling_params)
        except Exception as error:
            prefill.error = error
        return prefill

    def get_past_key_values(self) -> Any:
        """Return the cache of the request that the last step ended, in the model's form.

        It lies in the request's blocks, which the next step may give to others: it is valid until
        then, and until `release_caches` or `sleep`. RuntimeError if that step ended no request.
        """
        return self.utility.pipeline.get_past_key_values()

    def release_caches(self) -> None:
        """Drop what `get_past_key_values` returns."""
        self.utility.release_caches()

    def num_computed_tokens(self) -> dict[str, int]:
        """Count the first tokens of each running request that are in its blocks, at least."""
        return {key: prefill.num_computed_tokens for key, prefill in self._prefills.items()}

    def abort(self, request_id: str) -> None:
        """End a running request before its next step; unknown ids are ignored."""
        if prefill := self._prefills.get(request_id):
            prefill.is_aborted = True
        self._batch_sync.abort(request_id)

    def close(self) -> None:
        """Close the link; what the next stage has not received is lost."""
        for key in list(self._prefills):
            self._end(key)
        self.release_caches()
        for end in (self.kv_transfer, self.kv_sink):
            if end is not None:
                end.close()

    def _steps(
        self, request: OmniDiffusionRequest, block_ids: dict[str, list[int]], computed: int
    ) -> PrefillSteps:
        """Read a prompt; with `kv_transfer` for a decode stage, or after what a prefill stage read.

        If that read all of the beginning, no forward pass of it is left.
        """
        transfer, utility = self.kv_transfer, self.utility
        if isinstance(transfer, KVTransferProducer):
            return (yield from self._prefix_steps(transfer, request, block_ids, computed))
        if transfer is not None and (tokens := utility.prefix_tokens(request)):
            first = next(iter(block_ids.values()))
            computed = transfer.receive(tokens, self.pools, first, computed)
        return (yield from utility.prefill_steps(request, self.pools, block_ids, computed))

    def _prefix_steps(
        self,
        transfer: KVTransferProducer,
        request: OmniDiffusionRequest,
        block_ids: dict[str, list[int]],
        computed: int,
    ) -> PrefillSteps:
        """Read what a prompt begins with, and keep its K and V for decode stages."""
        if tokens := self.utility.prefix_tokens(request):
            first, args = next(iter(block_ids.values())), (request, self.pools, block_ids)
            hidden = yield from self.utility.prefix_steps(*args, computed)
            transfer.insert(tokens, self.pools, first, hidden)
        return DiffusionOutput(request.request_id)

    def _step(self, prefills: Sequence[_Prefill]) -> dict[str, DiffusionOutput]:
        """Runs alike on every rank: the ranks agree before each pass, and after."""
        errors: dict[str, Exception] = {}
        for prefill in prefills:
            if prefill.is_aborted or prefill.request.is_cancelled():
                self._batch_sync.abort(prefill.key)
            if prefill.error is not None:
                errors[prefill.key] = prefill.error
            errors |= self._aborted(prefill)
        errors = self._batch_sync.sync_errors(errors)
        results = {key: self._failed(self._prefills[key], errors[key]) for key in errors}
        active = [prefill for prefill in prefills if prefill.key not in results]
        reader = next((p for p in active if p.next_pass is None and not p.is_new), None)
        for prefill in active:
            if prefill is reader or prefill.is_new:
                results |= self._resume(prefill)
        waiting = [p for p in active if p.next_pass is not None and p.key not in results]
        results |= self._advance(waiting)
        for prefill in waiting:
            if prefill.next_pass is None and prefill.key not in results:
                results |= self._resume(prefill)
        return results

    def _resume(self, prefill: _Prefill) -> dict[str, DiffusionOutput]:
        """Run a request up to its next pass or image; return its result, if it ends."""
        errors, output = dict[str, Exception](), None
        result, prefill.result, prefill.is_new = prefill.result, None, False
        try:
            self.lora_manager.activate(prefill.request.lora)
            prefill.set_pass(prefill.steps.send(result))
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
        prefill.clock.stop()
        try:
            if (transfer := self.config.kv_transfer) is not None and transfer.is_producer:
                return {}  # a prefill stage, which has no answer of its own
            if prefill.request.sampling_params.is_text_only:
                _check_text(prefill.request, output)
                return {}
            stream = prefill.request.kv_stream
            if stream is None:
                raise EngineError(
                    "this stage has no next one: set kv.sinks, or ask for modalities ('text',)"
                )
            hidden = prefill.request.sampling_params.transfer_hidden_states
            if hidden:
                self._send_hidden(prefill.request, output)
            if not stream.is_begun:  # no layer of it has left: all leave now
                stream.begin(self._extract_kv_cache(prefill.request))
            sent = stream.finish()
            output.kv_sent = dataclasses.replace(sent, has_hidden_states=hidden)
            output.seconds["execute"] = time.perf_counter() - prefill.started
        except Exception as error:
            return {prefill.key: error}
        finally:
            output.seconds["prefill"] = prefill.clock.seconds()
        return {}

    def _send_hidden(self, request: OmniDiffusionRequest, output: DiffusionOutput) -> None:
        """Send a request's hidden states, which the caller gets only if they were asked for."""
        if output.hidden_states is None:
            name = type(self.utility).__name__
            raise EngineError(f"transfer_hidden_states: {name} has no hidden states")
        assert self.kv_sink is not None
        self.kv_sink.send_hidden(request.request_id, output.hidden_states)
        keep = request.sampling_params.return_hidden_states
        output.hidden_states = output.hidden_states[-1] if keep == "last" else output.hidden_states
        output.hidden_states = None if keep is None else output.hidden_states

    def _advance(self, prefills: Sequence[_Prefill]) -> dict[str, DiffusionOutput]:
        """Run the passes that requests wait for, those with one adapter as one.

        Returns the results of those that fail. A request whose pass has ended has its `result`; one
        whose text was divided has another pass.
        """
        if not prefills:
            return {}
        errors: dict[str, Exception] = {}
        chunks = self._chunks(prefills)
        for lora in dict.fromkeys(prefill.request.lora for prefill, _ in chunks):
            errors |= self._advance_with(lora, [x for x in chunks if x[0].request.lora == lora])
        errors = self._batch_sync.sync_errors(errors)
        failed = [prefill for prefill in prefills if prefill.key in errors]
        return {prefill.key: self._failed(prefill, errors[prefill.key]) for prefill in failed}

    def _advance_with(
        self, lora: ActiveLoRA | None, chunks: Sequence[tuple[_Prefill, TextPass]]
    ) -> dict[str, Exception]:
        """Run passes of one adapter as one; returns the errors by request id."""
        try:
            self.lora_manager.activate(lora)
            results = self.utility.advance([chunk for _, chunk in chunks])
            for (prefill, chunk), result in zip(chunks, results, strict=True):
                prefill.end_chunk(chunk, result)
        except Exception as error:
            return {prefill.key: error for prefill, _ in chunks}
        return {}

    def _chunks(self, prefills: Sequence[_Prefill]) -> list[tuple[_Prefill, TextPass]]:
        """Choose who reads in this step: all that is left of a request's text, or its beginning."""
        waiting = [(p, p.next_pass) for p in prefills if p.next_pass is not None]
        config, num_tokens = self.config, [text_pass.num_tokens for _, text_pass in waiting]
        counts = divide_tokens(
            num_tokens, config.max_num_batched_tokens, chunked=config.enable_chunked_prefill
        )
        return [
            (prefill, text_pass if count == text_pass.num_tokens else text_pass.chunk(count))
            for (prefill, text_pass), count in zip(waiting, counts, strict=True)
            if count
        ]

    def _extract_kv_cache(self, request: OmniDiffusionRequest) -> KVPayload:
        """Views of the request's KV in its blocks, from where it is copied."""
        return self.utility.extract(request)

    def _aborted(self, prefill: _Prefill) -> dict[str, Exception]:
        """A RequestAborted by request id, if this rank knows that the request was aborted."""
        error = RequestAborted(f"request {prefill.key!r} was aborted")
        return {prefill.key: error} if self._batch_sync.is_aborted_here(prefill.key) else {}

    def _failed(self, prefill: _Prefill, error: Exception) -> DiffusionOutput:
        """The output of a request that failed; the next stage gets the error, too."""
        key = prefill.key
        self._end(key, str(error) or repr(error))
        if self.kv_sink is not None:
            self.kv_sink.fail(key, str(error) or repr(error))
        output = DiffusionOutput(key, error=as_engine_error(error, f"request {key!r} failed"))
        output.clear_traceback()
        return output

    def _end(self, request_id: str, reason: str = "its stage gave it up") -> None:
        """Drop what a request holds: its KV unless it is sent, its contexts, its steps' frames."""
        prefill = self._prefills.pop(request_id)
        prefill.steps.close()
        if (stream := prefill.request.kv_stream) is not None:
            stream.fail(reason)
            prefill.request.kv_stream = None
        prefill.request.past_key_values = prefill.request.lora = None
        prefill.next_pass = prefill.result = None


def _check_prefixes(utility: ModelUtility) -> None:
    """Raise ValueError unless the model says which tokens prefixes are made of."""
    if type(utility).prefix_tokens is ModelUtility.prefix_tokens:
        name = type(utility).__name__
        field = "enable_prefix_caching or kv_transfer"
        raise ValueError(f"{field}: {name} has no prefix_tokens; leave it off")


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
