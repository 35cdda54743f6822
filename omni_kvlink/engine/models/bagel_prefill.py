"""`BagelPrefill`: how an AR stage reads BAGEL's prompts into blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.adapters import pack_generator
from omni_kvlink.engine.kv.sequence_blocks import SequenceBlocks
from omni_kvlink.engine.lora.adapter import identity_of
from omni_kvlink.engine.models.bagel_text import (
    answer_steps,
    count_options,
    keep_hidden,
    plan_options,
    readable,
    text_fields,
)
from omni_kvlink.engine.models.paged_naive_cache import PagedNaiveCache
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.worker.model import ModelUtility
from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import BagelContext, BagelContexts
from omni_kvlink.models.bagel.prefill_steps import PromptTokens

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from omni_kvlink.engine.kv.block_manager import KVPools
    from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.worker.prefill_utility import PrefillSteps


class BagelPrefill(ModelUtility):
    """The AR stage's part of `BagelUtility`."""

    _pipeline: OmniBagelPipeline
    _think: bool  # of the stage; a request may say otherwise
    _reads_prefixes: bool  # it is the prefill stage of a decode stage

    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The most tokens that a prompt can put into each context."""
        if self._reads_prefixes:
            return {"gen": len(self.prefix_tokens(request))}
        options = count_options(request.sampling_params, think=self._think)
        return self._pipeline.count_tokens(readable(request.prompt), **options)

    def prefill_steps(
        self,
        request: OmniDiffusionRequest,
        pools: KVPools,
        block_ids: Mapping[str, list[int]],
        num_computed_tokens: int = 0,
    ) -> PrefillSteps:
        """Read a prompt into blocks; see `PrefillUtility.prefill_steps`."""
        params, pipeline = request.sampling_params, self._pipeline
        n = num_computed_tokens
        cached = {"gen": self.prefix_tokens(request)[:n]} if n else {}
        caches = {
            name: PagedNaiveCache(SequenceBlocks(pools, blocks, cached.get(name, ())))
            for name, blocks in block_ids.items()
        }
        if params.is_text_only:
            return (yield from answer_steps(pipeline, request, think=self._think, caches=caches))
        generator = torch.Generator().manual_seed(params.seed or 0)
        on_last_pass = partial(self._begin_stream, request, generator)
        contexts = yield from pipeline.prefill_steps(
            readable(request.prompt),
            image_shape=_shape(params.height, params.width),
            generator=generator,
            caches=caches,
            on_last_pass=on_last_pass if request.kv_stream is not None else None,
            **plan_options(pipeline, request, think=self._think),
        )
        contexts.extra = _extra(request, generator)
        _check_announced(request, contexts)
        request.past_key_values = contexts
        hidden = None if contexts.gen.hidden is None else contexts.gen.hidden.tensor()
        fields = text_fields(request, pipeline.special_tokens.eos, contexts.text)
        return DiffusionOutput(request.request_id, hidden_states=hidden, **fields)

    def _begin_stream(
        self, request: OmniDiffusionRequest, generator: torch.Generator, coming: BagelContexts
    ) -> None:
        """Let each layer leave when its K and V are in the blocks; `coming` are the contexts."""
        stream = request.kv_stream
        assert stream is not None
        coming.extra = _extra(request, generator)
        request.past_key_values = coming
        stream.begin(self.extract(request))
        tables: dict[SequenceBlocks, tuple[int, str]] = {}
        for name in ("cfg_img", "gen"):  # the last: where both are in one table, its rows are gen's
            context: BagelContext = getattr(coming, name)
            if isinstance(context.past_key_values, PagedNaiveCache):
                tables[context.past_key_values.table] = context.kv_lens[0], name
        for table, (tokens, name) in tables.items():
            table.watch(tokens, partial(stream.write_layer, branch=name))

    def prefix_tokens(self, request: OmniDiffusionRequest) -> list[int]:
        """Return the leading token ids that other requests may share.

        They are those of think mode's prompt, and of the texts before the first image. There are
        none with a LoRA adapter, which makes other KV of the same tokens, and none if hidden states
        are wanted, which are not kept with blocks.
        """
        params = request.sampling_params
        if params.lora_int_id is not None or keep_hidden(request) is not None:
            return []
        options = count_options(params, think=self._think)
        del options["max_think_tokens"]
        return self._pipeline.prefix_tokens(readable(request.prompt), **options)

    def prefix_steps(
        self,
        request: OmniDiffusionRequest,
        pools: KVPools,
        block_ids: Mapping[str, list[int]],
        num_computed_tokens: int = 0,
    ) -> Generator[Any, Any, torch.Tensor]:
        """Read these texts alone into the blocks of gen; see `PrefillUtility.prefix_steps`."""
        ids, n = self.prefix_tokens(request), num_computed_tokens
        table = SequenceBlocks(pools, block_ids["gen"], ids[:n])
        context = BagelContext([n], [n], PagedNaiveCache(table).with_cached(ids[:n]))
        _, hidden = yield PromptTokens(context, ids[n:])
        return torch.as_tensor(hidden[-1:])

    def release_caches(self) -> None:
        """Drop the contexts of the last request, which its blocks hold."""
        self._pipeline.release_caches()

    def advance(self, passes: Sequence[Any]) -> list[Any]:
        """Read the next tokens of several texts in one pass."""
        return list(self._pipeline.advance(passes))


def _extra(request: OmniDiffusionRequest, generator: torch.Generator) -> dict[str, Any]:
    """Return what the next stage needs beside K and V: the generator's state, the adapter."""
    identity = identity_of(request.lora)
    extra = {"generator": pack_generator(generator)}
    return extra if identity is None else {**extra, "lora": identity}


def _check_announced(request: OmniDiffusionRequest, contexts: BagelContexts) -> None:
    """Raise SchemaError if the KV that is being sent was announced as something else."""
    stream, coming = request.kv_stream, request.past_key_values
    if stream is not None and stream.is_begun and _about(coming) != _about(contexts):
        raise SchemaError(f"the KV of {request.request_id!r} is not what was announced")


def _about(contexts: BagelContexts) -> tuple[Any, ...]:
    each = (contexts.gen, contexts.cfg_text, contexts.cfg_img)
    return [(c.kv_lens, c.ropes) for c in each], contexts.image_shape, contexts.extra


def _shape(height: int | None, width: int | None) -> tuple[int, int] | None:
    if height is None and width is None:
        return None
    if height is None or width is None:
        raise SchemaError(f"height {height} and width {width}: give both or none")
    return height, width
