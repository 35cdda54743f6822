"""The versions of vLLM that the connectors are tested with, and what differs between them.

A method of a connector that only later versions call needs no entry here.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(f"vllm.{__name__}")

TESTED = ("0.30", "0.31", "0.32")


def is_tested(version: str, releases: tuple[str, ...] = TESTED) -> bool:
    """Whether a version such as "0.30.1" is of one of the releases."""
    return any(version == release or version.startswith(f"{release}.") for release in releases)


def warn_if_untested() -> None:
    """Log the version of vLLM if the connectors are not tested with it."""
    import vllm

    version = str(vllm.__version__)
    if not is_tested(version):
        log.warning(
            "omni_kvlink is not tested with vLLM %s, but with %s (docs/vllm.md)",
            version,
            ", ".join(TESTED),
        )


def supports_invalid_blocks_of_groups() -> bool:
    """Whether a scheduler with several groups accepts `get_block_ids_with_load_errors`.

    In 0.31 and later it raises, which ends the engine. A failed asynchronous load is reported by
    its request instead (`failed_recving`), in every version.
    """
    import vllm

    return bool(tuple(vllm.__version_tuple__[:2]) == (0, 30))


def cache_hit_sources(tokens: int) -> dict[Any, int]:
    """Loaded tokens by their `CacheHitSource`, which 0.32 has introduced, for vLLM's metrics."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return {CacheHitSource.P2P: tokens} if tokens else {}


def has_bounded_replay(spec: Any) -> bool:
    """Whether vLLM recomputes a layer's window after a prefix-cache hit (DeepSeek V4.1, 0.31)."""
    return bool(getattr(spec, "prefix_replay_tokens", 0))
