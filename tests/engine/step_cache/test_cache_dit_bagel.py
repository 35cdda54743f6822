"""cache-dit on BAGEL computes what it computes by hand, with a block for each layer."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("cache_dit", reason="needs `pip install 'omni-kvlink[cache-dit]'`")

import cache_dit

from omni_kvlink import SchemaError
from omni_kvlink.engine import DiffusionEngine, OmniDiffusion
from omni_kvlink.engine.step_cache.cache_backend import make_cache_backend
from omni_kvlink.models.bagel import BagelContexts, DenoiseParams
from omni_kvlink.models.bagel.hooks import DenoiseHooks
from support.engine.fixtures import WAIT, alone, checkpoint, config, pipeline, request

if TYPE_CHECKING:
    from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
    from omni_kvlink.models.bagel.hooks import RunLayers

SHAPE, STEPS = (16, 24), 12
PARAMS = DenoiseParams(num_timesteps=STEPS + 1, cfg_img_scale=1.5, cfg_interval=(0.0, 1.0))
LOOSE = {"max_warmup_steps": 2, "residual_diff_threshold": 0.05}
Job = tuple[BagelContexts, Tensor]


def job(prompt: str = "a fox", seed: int = 0, shape: tuple[int, int] = SHAPE) -> Job:
    contexts = pipeline().prefill([prompt, "in the snow"], image_shape=shape)
    pipeline().release_caches()
    return contexts, pipeline().initial_noise(shape, torch.Generator().manual_seed(seed))


def latents(model: OmniBagelPipeline, jobs: list[Job], params: DenoiseParams) -> list[Tensor]:
    contexts, noise = zip(*jobs, strict=True)
    return model.denoise_batch(contexts, noise, params)


class Cached:
    """A pipeline of its own with the backend."""

    def __init__(self, settings: dict[str, Any]):
        self.pipeline = copy.copy(pipeline())
        self.pipeline.hooks = DenoiseHooks()
        made = make_cache_backend("cache_dit", settings)
        assert made is not None
        self.backend = made
        made.enable(self.pipeline)

    def latents(self, jobs: list[Job], params: DenoiseParams = PARAMS) -> list[Tensor]:
        self.backend.refresh(self.pipeline, params.num_timesteps)
        return latents(self.pipeline, jobs, params)

    @property
    def count(self) -> int | None:
        return self.backend.cached_steps(self.pipeline)


class Layer(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.index = index
        self.run: Any = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.run(hidden_states, self.index, self.index + 1)
        return out


class ByHand(nn.Module):
    """A guidance branch's layers, cached by calls of cache-dit alone."""

    def __init__(self, settings: dict[str, Any], order: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(i) for i in range(pipeline().num_layers))
        seer = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        fields = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_continuous_cached_steps": 3}
        steps = {"num_inference_steps": STEPS + 1, "enable_separate_cfg": False}
        cache_dit.enable_cache(
            cache_dit.BlockAdapter(
                transformer=self,
                blocks=self.blocks,
                forward_pattern=cache_dit.ForwardPattern.Pattern_3,
            ),
            cache_config=cache_dit.DBCacheConfig(**{**fields, **steps, **settings}),
            calibrator_config=seer,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states

    @property
    def count(self) -> int:
        (name,) = self._context_names  # type: ignore[misc]
        manager: Any = self._context_manager
        return len(manager.get_context(name).cached_steps)


def by_hand(jobs: list[Job], settings: dict[str, Any], order: int = 0) -> tuple[list[Tensor], int]:
    model, networks = copy.copy(pipeline()), dict[str, ByHand]()
    model.hooks = DenoiseHooks()

    def layers(branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        network = networks.setdefault(branch, ByHand(settings, order)) if step == 0 else None
        network = network or networks[branch]
        for block in network.blocks:
            block.run = run  # type: ignore[assignment]
        out: Tensor = network(rows)
        return out

    model.hooks.layers = layers
    found = latents(model, jobs, PARAMS)
    return found, sum(network.count for network in networks.values())


@pytest.mark.parametrize("count", [1, 3])
def test_at_threshold_0_nothing_changes(count: int) -> None:
    jobs = [job("a fox " * (i + 1), i) for i in range(count)]
    cached = Cached({"residual_diff_threshold": 0})
    assert all(map(torch.equal, cached.latents(jobs), latents(pipeline(), jobs, PARAMS)))
    assert cached.count == 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, 0),
        ({"Bn_compute_blocks": 1}, 0),
        ({"max_warmup_steps": 6}, 0),
        ({"max_cached_steps": 2}, 0),
        ({"max_continuous_cached_steps": 1}, 0),
        ({"residual_diff_threshold": 0.5}, 0),
        ({"enable_taylorseer": True, "taylorseer_order": 2}, 2),
    ],
)
def test_each_setting_is_cache_dits(settings: dict[str, Any], order: int, count: int) -> None:
    jobs = [job("a fox " * (i + 1), i) for i in range(count)]
    cached = Cached({**LOOSE, **settings})
    found = cached.latents(jobs)
    expected, counted = by_hand(jobs, {**LOOSE, **({} if order else settings)}, order)
    assert all(map(torch.equal, found, expected))
    assert cached.count == counted > 0
    plain, least = by_hand(jobs, LOOSE)
    assert not settings or (counted, torch.equal(found[0], plain[0])) != (least, True)
    assert not torch.equal(found[0], latents(pipeline(), jobs, PARAMS)[0])


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_a_mask_of_steps(policy: str) -> None:
    jobs, how = [job()], {"scm_steps_mask_policy": "fast", "scm_steps_policy": policy}
    cached = Cached({**LOOSE, **how})
    mask = cache_dit.steps_mask(mask_policy="fast", total_steps=STEPS + 1)
    scm = {"steps_computation_mask": mask, "steps_computation_policy": policy}
    expected, counted = by_hand(jobs, {**LOOSE, **scm})
    assert torch.equal(cached.latents(jobs)[0], expected[0])
    assert cached.count == counted > 0
    if policy == "static":  # as the mask says, whatever has changed
        assert counted == 3 * mask[:STEPS].count(0)


def test_each_generation_begins_anew() -> None:
    """Also one that nobody has announced, as of an image of another size in the same batch."""
    cached, jobs = Cached(LOOSE), [job()]
    first, count = cached.latents(jobs)[0], cached.count
    assert torch.equal(cached.latents(jobs)[0], first)
    assert cached.count == count
    other = latents(cached.pipeline, [job(shape=(24, 16))], PARAMS)[0]
    assert torch.equal(other, Cached(LOOSE).latents([job(shape=(24, 16))])[0])
    assert cached.count is not None
    assert count is not None
    assert cached.count > count  # of both images


def test_layers_must_be_left() -> None:
    with pytest.raises(ValueError, match="none of the 3 layers"):
        Cached({"Fn_compute_blocks": 2, "Bn_compute_blocks": 1})
    cached = Cached({})
    second = make_cache_backend("cache_dit", {})
    assert second is not None
    with pytest.raises(ValueError, match="is taken"):
        second.enable(cached.pipeline)


def test_an_engine_without_a_mask_for_so_few_steps_goes_on() -> None:
    settings = {**LOOSE, "scm_steps_mask_policy": "fast"}
    how: dict[str, Any] = {"cache_backend": "cache_dit", "cache_config": settings, "stage": "all"}
    with closing(DiffusionEngine(config(None, **how))) as engine:
        few = engine.submit(request("few", num_inference_steps=3, need_kv_receive=False)).result(
            WAIT
        )
        with pytest.raises(SchemaError, match="3 with scm_steps_mask_policy 'fast': 4, 6, 8"):
            few.result()
        options = {"num_inference_steps": STEPS + 1}
        done = engine.submit(request("many", need_kv_receive=False, **options)).result(WAIT)
        assert done.result()[0].shape == (*SHAPE, 3)
        assert done.cached_steps


def test_a_deployment_names_it() -> None:
    stage = {"stage_id": 0, "cache_backend": "cache_dit", "cache_config": LOOSE}
    how = {"pipeline": "bagel_single_stage", "stages": [stage]}
    options = {"height": 16, "width": 24, "num_inference_steps": STEPS + 1, "seed": 1}
    with OmniDiffusion(checkpoint(), how, dtype="float32") as omni:
        images = omni.generate(["a fox"], options, timeout=WAIT, output_type="pt")
    assert not torch.equal(images[0][0], alone(seed=1, num_inference_steps=STEPS + 1))
