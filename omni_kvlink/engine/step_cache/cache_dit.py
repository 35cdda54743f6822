"""`CacheDiT`: the package cache-dit on BAGEL, or on the transformer of a pipeline of diffusers."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import Tensor, nn

from omni_kvlink.engine.step_cache.cache_backend import CacheBackend, check_ends
from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.settings import Integer, Number, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.models.bagel.hooks import RunLayers

_Count = Annotated[int, Integer(1)]
_Limit = Annotated[int, Integer(-1)]  # -1 is no limit


@dataclasses.dataclass(frozen=True)
class CacheDiTSettings(Settings):
    """All settings, with vLLM-Omni's names and defaults; the last one is cache-dit's own."""

    Fn_compute_blocks: _Count = 1
    Bn_compute_blocks: Annotated[int, Integer(0)] = 0
    residual_diff_threshold: Annotated[float, Number(0)] = 0.24  # 0 is off
    max_warmup_steps: Annotated[int, Integer(0)] = 4
    max_cached_steps: _Limit = -1
    max_continuous_cached_steps: _Limit = 3
    enable_taylorseer: bool = False
    taylorseer_order: _Count = 1
    scm_steps_mask_policy: Literal["slow", "medium", "fast", "ultra"] | None = None
    scm_steps_policy: Literal["dynamic", "static"] = "dynamic"
    enable_separate_cfg: bool | None = None


class CacheDiT(CacheBackend):
    """DBCache, with TaylorSeer or SCM if they are set, as cache-dit computes them.

    The first `Fn_compute_blocks` and the last `Bn_compute_blocks` layers run in each step, those
    between unless the change of the first ones is below `residual_diff_threshold`, after
    `max_warmup_steps`. `enable_taylorseer` extrapolates what is reused; `scm_steps_mask_policy`
    says which steps may reuse. The requests of a batch reuse together.

    A pipeline with `hooks.layers` has a cache for each guidance branch. In a pipeline of diffusers
    all passes have one, and `enable_separate_cfg` says whether every second pass is that of the
    negative prompt, also where a request has none; None is what cache-dit knows of the model.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self._settings = CacheDiTSettings.read(config)
        self._networks: dict[str, Any] = {}  # "transformer" of diffusers, or by branch
        self._changes: dict[str, Any] = {}
        self._steps: dict[str, int] = {}  # the last one of each branch
        self._counted = 0  # reused passes of this batch's earlier generations

    def enable(self, pipeline: Any) -> None:
        """Wrap the pipeline's layers or its transformer; see `CacheBackend.enable`.

        Raises UnavailableError without the package.
        """
        if hasattr(getattr(pipeline, "hooks", None), "layers"):
            if self._settings.enable_separate_cfg:
                name = type(pipeline).__name__
                raise ValueError(f"enable_separate_cfg True: {name} separates all branches")
            _package()
            check_ends(self._settings, pipeline)
            self._hook_into(pipeline, self.layers)
            return
        name, network = type(pipeline).__name__, getattr(pipeline, "transformer", None)
        if network is None or getattr(pipeline, "transformer_2", None) is not None:
            has = "two" if network is not None else "no"
            raise ValueError(
                f"cache_dit needs a pipeline of diffusers with one transformer, and {name} has "
                f'{has}: use another cache_backend, or "none"'
            )
        self._wrap("transformer", network, network)
        self.enabled = True

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Begin a generation; SchemaError if SCM has no mask for so few steps."""
        self._changes = {"num_inference_steps": num_inference_steps}
        policy = self._settings.scm_steps_mask_policy
        if policy is not None:
            if num_inference_steps < 8 and num_inference_steps not in (4, 6):
                raise SchemaError(
                    f"num_inference_steps {num_inference_steps} with scm_steps_mask_policy "
                    f"{policy!r}: 4, 6, 8 or more"
                )
            mask = _package().steps_mask(mask_policy=policy, total_steps=num_inference_steps)
            self._changes["steps_computation_mask"] = mask
            self._changes["steps_computation_policy"] = self._settings.scm_steps_policy
        self._counted = 0
        self._begin()

    def layers(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """A `LayersHook`; a step that does not rise begins another generation, with the same steps.

        What cache-dit calls blocks are the first, the middle and the last layers: ranks that divide
        a pass exchange rows once for each.
        """
        first, last = self._settings.Fn_compute_blocks, self._settings.Bn_compute_blocks
        if branch not in self._networks:
            network = _BranchLayers(3 if last else 2)
            package, parts = _package(), {"Fn_compute_blocks": 1, "Bn_compute_blocks": min(1, last)}
            adapter = package.BlockAdapter(
                transformer=network,
                blocks=network.blocks,
                forward_pattern=package.ForwardPattern.Pattern_3,
            )
            fields = {**parts, **self._changes, "enable_separate_cfg": False}
            self._wrap(branch, network, adapter, **fields)
        if step <= self._steps.get(branch, -1):
            self._counted = self.cached_steps(None)
            self._begin()
        network, self._steps[branch] = self._networks[branch], step
        stops = [0, first, count - last, count]
        for block, start, stop in zip(network.blocks, stops, stops[1:], strict=False):
            block.call = run, start, stop
        out: Tensor = network(rows)
        return out

    def cached_steps(self, pipeline: Any) -> int:
        """Passes that reused layers in this batch, those of all branches and prompts."""
        # `summary` of the package has nothing of a generation in which it expected more passes.
        contexts = [
            network._context_manager.get_context(name)
            for network in self._networks.values()
            for name in network._context_names
        ]
        return self._counted + sum(
            len(context.cached_steps) + len(context.cfg_cached_steps) for context in contexts
        )

    def _wrap(self, name: str, network: Any, adapted: Any, **fields: Any) -> None:
        """Let cache-dit run a network's blocks; `adapted` is what it knows them by."""
        package, settings = _package(), dataclasses.asdict(self._settings)
        seer, order = None, settings.pop("taylorseer_order")
        if settings.pop("enable_taylorseer"):
            seer = package.TaylorSeerCalibratorConfig(taylorseer_order=order)
        named = {key: value for key, value in settings.items() if not key.startswith("scm_")}
        config = package.DBCacheConfig(**{**named, **fields})
        package.enable_cache(adapted, cache_config=config, calibrator_config=seer)
        self._networks[name] = network

    def _begin(self) -> None:
        """Let all networks begin a generation."""
        self._steps.clear()
        for network in self._networks.values():
            changes = _package().DBCacheConfig().reset(**self._changes)
            _package().refresh_context(network, cache_config=changes)


class _Run(nn.Module):
    """A run of layers, as a block; `call` is a `RunLayers` with its start and stop."""

    call: tuple[RunLayers, int, int]

    def forward(self, hidden_states: Tensor) -> Tensor:
        run, start, stop = self.call
        return run(hidden_states, start, stop)


class _BranchLayers(nn.Module):
    """The layers of a guidance branch, in `count` runs, as what cache-dit calls a transformer."""

    def __init__(self, count: int):
        super().__init__()
        self.blocks = nn.ModuleList(_Run() for _ in range(count))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


def _package() -> Any:
    try:
        return importlib.import_module("cache_dit")
    except ImportError as error:
        text = f"cache_backend 'cache_dit' needs a package ({error})"
        raise UnavailableError(f"{text}: pip install 'omni-kvlink[cache-dit]'") from error
