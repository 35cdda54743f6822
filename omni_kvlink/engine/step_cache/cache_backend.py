"""`CacheBackend`: an acceleration that reuses what an earlier denoising step computed."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.models.bagel.hooks import LayersHook

_BACKENDS: dict[str, str] = {
    "tea_cache": "omni_kvlink.engine.step_cache.tea_cache:TeaCache",
    "cache_dit": "omni_kvlink.engine.step_cache.cache_dit:CacheDiT",
    "block_cache": "omni_kvlink.engine.step_cache.block_cache:BlockCache",
}
"""Backends by name, as "module:Class"; imported when a configuration names them."""


class CacheBackend(ABC):
    """One acceleration. It changes outputs, so it is off unless a configuration names it.

    The runner calls `enable` once after loading, and `refresh` before every generation. The
    pipeline provides the hooks: BAGEL's are `pipeline.hooks`, a `DenoiseHooks`; a pipeline of
    diffusers is given as it is. `config` holds the backend's own settings.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = dict(config)
        self.enabled = False

    @abstractmethod
    def enable(self, pipeline: Any) -> None:
        """Hook into the pipeline; raises ValueError if it offers no hook for this."""

    @abstractmethod
    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Clear what the last generation left; a new one begins."""

    def cached_steps(self, pipeline: Any) -> int | None:
        """Passes of the last generation that reused something; None if they are not counted."""
        return None

    def is_enabled(self) -> bool:
        """Whether `enable` was called."""
        return self.enabled

    def _hook_into(self, pipeline: Any, layers: LayersHook) -> None:
        """Let `layers` run the pipeline's layers from now on.

        Raises ValueError if the pipeline has no such hook, or if it is taken.
        """
        hooks: Any = getattr(pipeline, "hooks", None)
        if not hasattr(hooks, "layers"):
            raise ValueError(
                f"{type(self).__name__} needs hooks.layers, which {type(pipeline).__name__} "
                'does not offer: use cache_backend "none"'
            )
        if hooks.layers is not None:
            raise ValueError("hooks.layers is taken: a pipeline has one cache backend")
        hooks.layers = layers
        self.enabled = True


def check_ends(settings: Any, pipeline: Any) -> None:
    """Raise ValueError unless a layer is between `Fn_compute_blocks` and `Bn_compute_blocks`."""
    first, last = settings.Fn_compute_blocks, settings.Bn_compute_blocks
    layers = getattr(pipeline, "num_layers", 0)
    if layers and first + last >= layers:
        raise ValueError(
            f"Fn_compute_blocks {first} and Bn_compute_blocks {last} leave none of the {layers} "
            "layers to be reused"
        )


def register_cache_backend(name: str, target: str) -> None:
    """Add a backend: `target` is "module:Class"."""
    _BACKENDS[name] = target


def make_cache_backend(name: str, config: Mapping[str, Any]) -> CacheBackend | None:
    """The backend of this name, None for "none"; ValueError if it does not take these settings."""
    if name == "none":
        return None
    if name not in _BACKENDS:
        raise ValueError(f"no cache backend {name!r}; there are {', '.join(['none', *_BACKENDS])}")
    module, _, attribute = _BACKENDS[name].partition(":")
    backend: CacheBackend = getattr(importlib.import_module(module), attribute)(config)
    return backend
