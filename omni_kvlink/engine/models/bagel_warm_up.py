"""Runs BAGEL once for given sizes, so that the first requests compile and allocate nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_kvlink.models.bagel import BagelContext, BagelContexts, DenoiseParams, NaiveCache
from omni_kvlink.models.bagel.hooks import DenoiseHooks
from omni_kvlink.models.bagel.prefill_steps import NextToken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_kvlink.models.bagel import BagelPipeline

_CONTEXT_TOKENS = 16  # of each context, where no AR stage has read a prompt
_PARAMS = DenoiseParams(4.0, 2.0, cfg_interval=(0.0, 1.0), num_timesteps=3)  # all three contexts


def warm_up(pipeline: BagelPipeline, size: tuple[int, int], batches: Iterable[int]) -> None:
    """Run what the pipeline's stage does for an image of `size`, height and width in pixels.

    `batches` are numbers of requests that run together. Every rank computes all by itself, with its
    part of the heads. SchemaError if the model has no image of this size.
    """
    contexts = _dummy(pipeline, size) if pipeline.stage == "dit" else _read(pipeline, size, batches)
    if pipeline.stage != "ar":
        _generate(pipeline, contexts, batches)
    pipeline.release_caches()


def _read(pipeline: BagelPipeline, size: tuple[int, int], batches: Iterable[int]) -> BagelContexts:
    """Read a text and an image, and write a token in each number of texts."""
    contexts = pipeline.prefill(["warm up", torch.zeros(3, *size)])
    if pipeline.stage == "ar":
        for count in batches:
            pipeline.advance([NextToken(contexts.gen, pipeline.special_tokens.bos)] * count)
    text = pipeline.prefill("warm up", image_shape=size)
    return text


def _generate(pipeline: BagelPipeline, contexts: BagelContexts, batches: Iterable[int]) -> None:
    noise = torch.zeros_like(pipeline.initial_noise(contexts.image_shape, torch.Generator()))
    hooks, pipeline.hooks = pipeline.hooks, DenoiseHooks()
    try:
        latents = [
            pipeline.denoise_batch([contexts] * count, [noise] * count, _PARAMS)
            for count in batches
        ]
        pipeline.decode(latents[-1][0])
    finally:
        pipeline.hooks = hooks


def _dummy(pipeline: BagelPipeline, size: tuple[int, int]) -> BagelContexts:
    """Contexts of zeros, as a stage before would send them."""
    cache = NaiveCache(len(pipeline.model.kv_layers))
    shape = (_CONTEXT_TOKENS, len(pipeline.model.kv_heads), pipeline.config.llm.head_dim)
    for layer in range(len(pipeline.model.kv_layers)):
        zeros = torch.zeros(shape, dtype=pipeline.dtype, device=pipeline.device)
        cache.key_cache[layer] = cache.value_cache[layer] = zeros
    context = BagelContext([_CONTEXT_TOKENS], [_CONTEXT_TOKENS], cache)
    return BagelContexts(context, context, context, size)
