"""`CacheDiT`: the package cache-dit on the transformer of a pipeline of diffusers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.step_cache.cache_backend import CacheBackend
from omni_kvlink.errors import SchemaError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULTS: dict[str, Any] = {
    "Fn_compute_blocks": 1,
    "Bn_compute_blocks": 0,
    "residual_diff_threshold": 0.24,
    "max_warmup_steps": 4,
    "max_cached_steps": -1,
    "max_continuous_cached_steps": 3,
    "enable_taylorseer": False,
    "taylorseer_order": 1,
    "scm_steps_mask_policy": None,
    "scm_steps_policy": "dynamic",
    "enable_separate_cfg": None,
}
"""All settings with vLLM-Omni's names and defaults; the last one is cache-dit's own."""

_LEAST = {
    "Fn_compute_blocks": 1,
    "Bn_compute_blocks": 0,
    "max_warmup_steps": 0,
    "max_cached_steps": -1,
    "max_continuous_cached_steps": -1,
    "taylorseer_order": 1,
}
"""Whole numbers, and the least of each; -1 is no limit."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "enable_taylorseer": (False, True),
    "scm_steps_mask_policy": (None, "slow", "medium", "fast", "ultra"),
    "scm_steps_policy": ("dynamic", "static"),
    "enable_separate_cfg": (None, False, True),
}


class CacheDiT(CacheBackend):
    """DBCache, with TaylorSeer or SCM if they are set, as cache-dit computes them.

    The first `Fn_compute_blocks` and the last `Bn_compute_blocks` layers run in each step, those
    between unless the change of the first ones is below `residual_diff_threshold`, after
    `max_warmup_steps`. `enable_taylorseer` extrapolates what is reused; `scm_steps_mask_policy`
    says which steps may reuse. `enable_separate_cfg` says whether every second pass is that of the
    negative prompt, also where a request has none; None is what cache-dit knows of the model.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__({**_DEFAULTS, **config})
        if unknown := sorted(config.keys() - _DEFAULTS.keys()):
            raise ValueError(
                f"cache_dit has no setting {', '.join(unknown)}; there are {', '.join(_DEFAULTS)}"
            )
        for name, value in self.config.items():
            _check(name, value)

    def enable(self, pipeline: Any) -> None:
        """Wrap the layers of the pipeline's transformer; see `CacheBackend.enable`.

        Raises UnavailableError without the package.
        """
        name, network = type(pipeline).__name__, getattr(pipeline, "transformer", None)
        if network is None or getattr(pipeline, "transformer_2", None) is not None:
            has = "two" if network is not None else "no"
            raise ValueError(
                f"cache_dit needs a pipeline of diffusers with one transformer, and {name} has "
                f'{has}: use another cache_backend, or "none"'
            )
        package, config = _package(), self.config
        names = [*_LEAST, "residual_diff_threshold", "enable_separate_cfg"]
        fields = {name: config[name] for name in names if name != "taylorseer_order"}
        order = {"taylorseer_order": config["taylorseer_order"]}
        seer = package.TaylorSeerCalibratorConfig(**order) if config["enable_taylorseer"] else None
        settings = package.DBCacheConfig(**fields)
        package.enable_cache(network, cache_config=settings, calibrator_config=seer)
        self.enabled = True

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Begin a generation; SchemaError if SCM has no mask for so few steps."""
        fields: dict[str, Any] = {"num_inference_steps": num_inference_steps}
        policy = self.config["scm_steps_mask_policy"]
        if policy is not None:
            if num_inference_steps < 8 and num_inference_steps not in (4, 6):
                raise SchemaError(
                    f"num_inference_steps {num_inference_steps} with scm_steps_mask_policy "
                    f"{policy!r}: 4, 6, 8 or more"
                )
            mask = _package().steps_mask(mask_policy=policy, total_steps=num_inference_steps)
            fields["steps_computation_mask"] = mask
            fields["steps_computation_policy"] = self.config["scm_steps_policy"]
        changes = _package().DBCacheConfig().reset(**fields)
        _package().refresh_context(pipeline.transformer, cache_config=changes)

    def cached_steps(self, pipeline: Any) -> int:
        """Steps of the last generation that reused layers, those of the negative prompt added."""
        # `summary` of the package has nothing of a generation in which it expected more passes.
        network = pipeline.transformer
        contexts = [network._context_manager.get_context(name) for name in network._context_names]
        return sum(
            len(context.cached_steps) + len(context.cfg_cached_steps) for context in contexts
        )


def _check(name: str, value: Any) -> None:
    """Raises ValueError if a setting does not have such a value."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if name in _LEAST:
        if not is_int or value < _LEAST[name]:
            raise ValueError(f"{name} {value!r}: a whole number, {_LEAST[name]} or more")
    elif name in _CHOICES:
        if not any(value is choice or value == choice for choice in _CHOICES[name]) or is_int:
            raise ValueError(f"{name} {value!r}: {' or '.join(map(repr, _CHOICES[name]))}")
    elif not (is_int or isinstance(value, float)) or not value >= 0:
        raise ValueError(f"{name} {value!r}: a number, 0 (off) or more")


def _package() -> Any:
    try:
        return importlib.import_module("cache_dit")
    except ImportError as error:
        text = f"cache_backend 'cache_dit' needs a package ({error}): pip install cache-dit"
        raise UnavailableError(text) from error
