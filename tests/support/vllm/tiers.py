"""Tiered offloading for engines of the tests, whose blocks and primary tier are small."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.vllm.steps import SteppedEngine

# Reaches into _transfers: vLLM calls the tier alone.

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


def tier_of(engine: SteppedEngine) -> Any:
    """The tier of an engine."""
    return engine.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]


def counted(engine: SteppedEngine) -> Counter[str]:
    """What its tier has counted, as vLLM's metrics have it."""
    found = Counter[str]()
    for report in engine.reported:
        for name, values in report["data"].items():
            if name.startswith(PREFIX):
                found[name.removeprefix(PREFIX)] += sum(values.values())
    return found


def client_of(engine: SteppedEngine) -> Any:
    """What keeps the chunks of its tier."""
    return tier_of(engine)._transfers._client
