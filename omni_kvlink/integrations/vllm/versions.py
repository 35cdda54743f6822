"""The versions of vLLM that the connectors are tested with, and what differs between them.

What only a later version calls needs nothing here: an earlier one ignores the method.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(f"vllm.{__name__}")

TESTED = ("0.30", "0.31", "0.32")


def warn_if_untested() -> None:
    """Log the version of vLLM if the connectors are not tested with it."""
    import vllm

    version = str(vllm.__version__)
    if not any(version == each or version.startswith(f"{each}.") for each in TESTED):
        log.warning(
            "omni_kvlink is not tested with vLLM %s, but with %s (docs/vllm.md)",
            version,
            ", ".join(TESTED),
        )


def fails_blocks_of_groups() -> bool:
    """Whether a scheduler with several block tables takes up blocks that were not loaded.

    That of 0.31 and later ends the engine instead; a failed asynchronous load has another way.
    """
    import vllm

    return bool(tuple(vllm.__version_tuple__[:2]) == (0, 30))


def loaded_from_a_peer(tokens: int) -> dict[Any, int]:
    """Tokens by their source, for vLLM's statistics; 0.32 and later ask for it."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return {CacheHitSource.P2P: tokens} if tokens else {}


def is_replayed(spec: Any) -> bool:
    """Whether the engine computes a window again behind a prefix-cache hit: since 0.31, DSV4.1."""
    return bool(getattr(spec, "prefix_replay_tokens", 0))
