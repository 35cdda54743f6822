"""Accelerations that reuse what an earlier denoising step computed; off by default."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

_ROWS: dict[str, str] = {
    "tea_cache": "omni_kvlink.engine.step_cache.tea_cache:TeaCache",
    "block_cache": "omni_kvlink.engine.step_cache.block_cache:BlockCache",
}
"""Backends by name, as "module:Class"; imported when they are used."""


class CacheBackend(ABC):
    """One acceleration. It changes outputs, so nobody gets it without asking.

    The runner calls `enable` once after loading, and `refresh` before every generation. What it may
    hook into is the pipeline's to offer: BAGEL's `pipeline.hooks`, a `DenoiseHooks`.

    Args:
        config: the backend's own settings.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = dict(config)
        self.enabled = False

    @abstractmethod
    def enable(self, pipeline: Any) -> None:
        """Hook into the pipeline.

        Raises:
            ValueError: a setting is unknown, or the pipeline offers no hook for this.
        """

    @abstractmethod
    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Forget everything of the last generation; a new one begins."""

    def is_enabled(self) -> bool:
        return self.enabled


def register_cache_backend(name: str, target: str) -> None:
    """Add a backend: `target` is "module:Class"."""
    _ROWS[name] = target


def make_cache_backend(name: str, config: Mapping[str, Any]) -> CacheBackend | None:
    """The backend of this name; None for "none".

    Raises:
        ValueError: there is no such backend, or it does not take these settings.
    """
    if name == "none":
        return None
    if name not in _ROWS:
        raise ValueError(f"no cache backend {name!r}; there are {', '.join(['none', *_ROWS])}")
    module, _, attribute = _ROWS[name].partition(":")
    made: CacheBackend = getattr(importlib.import_module(module), attribute)(config)
    return made
