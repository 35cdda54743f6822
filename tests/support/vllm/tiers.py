"""Tiered offloading for engines of the tests, whose blocks and primary tier are small."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from support.vllm.engine_process import BLOCK, prompt

if TYPE_CHECKING:
    from support.vllm.steps import SteppedEngine

# Reaches into _client, _transfers: vLLM calls the tier alone.

LENGTH = 4 * BLOCK + 7
WHOLE = 4 * BLOCK
"""Tokens of the whole blocks of a prompt, which are offloaded."""
PREFIX = "vllm:omni_kvlink_tier_"
CHUNK_BYTES = 1 << 12
"""Bytes of a block of the stepped engine's two layers, rounded to pages."""


def offloading(*tiers: dict[str, Any], chunks: int = 6, **extra: Any) -> dict[str, Any]:
    """An engine's `--kv-transfer-config`: a primary tier of so many chunks, and these behind it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "omni_kvlink.integrations.vllm",
            "cpu_bytes_to_use": chunks * CHUNK_BYTES * extra.get("blocks_per_chunk", 1),
            "secondary_tiers": [*tiers],
            **extra,
        },
    }


def tier(url: str, **settings: Any) -> dict[str, Any]:
    """An entry of `secondary_tiers`."""
    return {
        "type": "OmniKVLinkTier",
        "module_path": "omni_kvlink.integrations.vllm",
        "url": url,
        "model": "tiny",
        **settings,
    }


def counted(engine: SteppedEngine) -> Counter[str]:
    """What its tier has counted, as vLLM's metrics have it."""
    found = Counter[str]()
    for report in engine.reported:
        for name, values in report["data"].items():
            if name.startswith(PREFIX):
                found[name.removeprefix(PREFIX)] += sum(values.values())
    return found


def client_of(scheduler: Any) -> Any:
    """What keeps the chunks of the tier of an engine with this scheduler."""
    [tier] = scheduler.connector.connector_scheduler.manager.secondary_tiers
    return tier._transfers._client


def compute(engine: SteppedEngine, tokens: list[int]) -> int:
    """Run a request to its end, and its offloading too; the tokens that were not computed.

    Afterwards the engine's own blocks are empty, and the primary tier is not.
    """
    name = f"request {len(engine.ended)}"
    engine.add(name, tokens, None)
    engine.run(name)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    return engine.cached[name]


def evict(engine: SteppedEngine) -> None:
    """Fill a primary tier of 12 chunks or less with other prompts."""
    for seed in range(100, 104):
        compute(engine, prompt(LENGTH, seed=seed))
