"""The identity of offloaded chunks: what decides their bytes beside vLLM's key of a chunk."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform

from omni_kvlink.kept import CacheIdentity

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

    from omni_kvlink.integrations.vllm.tier.settings import TierSettings


def cache_identity(config: OffloadingConfig, settings: TierSettings, nbytes: int) -> CacheIdentity:
    """The identity of the chunks of an engine, of `nbytes` each with the parts of all ranks.

    vLLM's key of a chunk stands for its tokens and those before it, with their media, salt, and
    the adapter's name and path.
    """
    return CacheIdentity(
        model=settings.model,
        dtype=config.model.dtype,
        layout=json.dumps(_layout(config, nbytes), sort_keys=True),
        adapter=settings.adapter,
        salt=settings.salt,
    )


def _layout(config: OffloadingConfig, nbytes: int) -> dict[str, Any]:
    """The layout of a chunk, in JSON values."""
    ranks = dataclasses.asdict(config.parallel)
    for name in ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"):
        del ranks[name]  # each engine has chunks of its own, with all its ranks
    device = current_platform.device_type
    return {
        "vllm": vllm.__version__,
        "device": f"{device} {torch.backends.cpu.get_cpu_capability()}" * (device == "cpu"),
        "blocks": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "cache": dataclasses.asdict(config.cache),
        "block_bytes": config.worker_kv_bytes_per_block,
        "chunk_bytes": nbytes,
        "ranks": ranks,
    }
