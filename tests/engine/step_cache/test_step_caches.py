"""TeaCache and the block cache: what they save, whose image they change, what they never touch."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from omni_kvlink.engine import DiffusionEngine, OmniDiffusion
from omni_kvlink.engine.step_cache.block_cache import BlockCache
from omni_kvlink.engine.step_cache.cache_backend import make_cache_backend
from omni_kvlink.engine.step_cache.step_cache import StepCache
from omni_kvlink.engine.step_cache.tea_cache import TeaCache
from omni_kvlink.engine.worker import GPUDiffusionModelRunner
from omni_kvlink.models.bagel import BagelContexts, DenoiseParams
from omni_kvlink.models.bagel.hooks import DenoiseHooks
from support.engine.fixtures import WAIT, alone, bundle, checkpoint, config, link, pipeline, request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline

SHAPE, STEPS = (16, 24), 12
PARAMS = DenoiseParams(num_timesteps=STEPS + 1, cfg_img_scale=1.5, cfg_interval=(0.0, 1.0))
LOOSE = {
    "tea_cache": {"rel_l1_thresh": 0.03},
    "block_cache": {"Bn_compute_blocks": 1, "residual_diff_threshold": 0.02},
}
THRESHOLD = {"tea_cache": "rel_l1_thresh", "block_cache": "residual_diff_threshold"}
NAMES = sorted(LOOSE)


class Watched:
    """A pipeline of its own with a backend, its decoder's layers counted."""

    def __init__(self, name: str, settings: dict[str, Any]):
        self.pipeline: OmniBagelPipeline = copy.copy(pipeline())
        self.pipeline.hooks = DenoiseHooks()
        made = make_cache_backend(name, settings)
        assert isinstance(made, StepCache)
        self.backend = made
        made.enable(self.pipeline)

    def latents(self, jobs: list[tuple[BagelContexts, Tensor]]) -> list[Tensor]:
        contexts, noise = zip(*jobs, strict=True)
        return self.pipeline.denoise_batch(contexts, noise, PARAMS)


@pytest.fixture
def layers() -> Iterator[Counter[int]]:
    """How often each layer of the shared network has run."""
    runs, handles = Counter[int](), []
    for i, layer in enumerate(pipeline().model.language_model.model.layers):

        def count(*_: Any, i: int = i) -> None:
            runs[i] += 1

        handles.append(layer.register_forward_pre_hook(count))
    yield runs
    for handle in handles:
        handle.remove()


def job(prompt: str = "a fox", seed: int = 0) -> tuple[BagelContexts, Tensor]:
    contexts = pipeline().prefill([prompt, "in the snow"], image_shape=SHAPE)
    pipeline().release_caches()
    return contexts, pipeline().initial_noise(SHAPE, torch.Generator().manual_seed(seed))


def plain(jobs: list[tuple[BagelContexts, Tensor]]) -> list[Tensor]:
    contexts, noise = zip(*jobs, strict=True)
    return pipeline().denoise_batch(contexts, noise, PARAMS)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_at_threshold_0_nothing_changes(name: str, count: int, layers: Counter[int]) -> None:
    jobs = [job("a fox " * (i + 1), i) for i in range(count)]
    layers.clear()
    expected = plain(jobs)
    whole = Counter(layers)
    layers.clear()
    watched = Watched(name, {THRESHOLD[name]: 0})
    found = watched.latents(jobs)
    assert layers == whole
    assert all(map(torch.equal, found, expected))
    assert watched.backend.computed == dict.fromkeys(("gen", "cfg_text", "cfg_img"), STEPS)
    assert not watched.backend.reused


@pytest.mark.parametrize("name", NAMES)
def test_passes_are_saved_and_counted(name: str, layers: Counter[int]) -> None:
    jobs = [job()]
    expected = plain(jobs)[0]
    layers.clear()
    watched = Watched(name, LOOSE[name])
    found = watched.latents(jobs)[0]
    computed, reused = watched.backend.computed, watched.backend.reused
    assert {branch: computed[branch] + reused[branch] for branch in computed} == dict.fromkeys(
        ("gen", "cfg_text", "cfg_img"), STEPS
    )
    assert 0 < sum(computed.values()) < 3 * STEPS
    ends = 3 * STEPS if name == "block_cache" else sum(computed.values())
    assert (layers[0], layers[1], layers[2]) == (ends, sum(computed.values()), ends)
    assert torch.isfinite(found).all()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_higher_threshold_saves_more(name: str) -> None:
    saved = []
    for threshold in (0.01, 0.03, 1e9):
        watched = Watched(name, {THRESHOLD[name]: threshold})
        watched.latents([job()])
        saved.append(watched.backend.reused["gen"])
    assert saved[0] < saved[1] < saved[2] == STEPS - 1  # the first step has nothing to reuse


@pytest.mark.parametrize("name", NAMES)
def test_each_request_of_a_batch_decides_for_itself(name: str) -> None:
    jobs = [job("a fox " * (i + 1), i) for i in range(3)]
    jobs = [(contexts, noise * 8**i) for i, (contexts, noise) in enumerate(jobs)]
    alone, apart = [], []
    for one in jobs:
        watched = Watched(name, LOOSE[name])
        alone.extend(watched.latents([one]))
        apart.append(sum(watched.backend.computed.values()))
    watched = Watched(name, LOOSE[name])
    for own, latent in zip(alone, watched.latents(jobs), strict=True):
        assert (own - latent).abs().max() < 1e-4 * own.abs().max()
    assert sum(watched.backend.computed.values()) > max(apart)  # they disagree


def hook(threshold: float = 1.0, **settings: Any) -> tuple[TeaCache, Callable[..., float]]:
    """A TeaCache, and one call of it: the input's size at a step, and the pass's result."""
    backend = TeaCache({"rel_l1_thresh": threshold, **settings})

    def run_step(step: int, size: float, flow: float, branch: str = "gen") -> float:
        rows = torch.full((4, 8), size)
        return float(
            backend.layers(branch, step, rows, lambda *_: torch.full((4, 8), flow), 3)[0, 0]
        )

    return backend, run_step


def test_tea_cache_sums_changes_up() -> None:
    _, run_step = hook(1.0)
    assert run_step(0, 1.0, 10) == 10
    assert run_step(1, 1.5, 11) == 10  # 0.5
    assert run_step(2, 2.1, 12) == 10  # and 0.4 from there
    assert run_step(3, 2.73, 13) == 13  # and 0.3: 1.2 in all
    assert run_step(4, 4.0, 14) == 13  # from 0 again


def test_tea_cache_sums_a_polynomial_up() -> None:
    """2·x² - 3·x + 0.5, and its size where it is below 0."""
    import numpy as np

    polynomial = np.poly1d([2.0, -3.0, 0.5])
    changes = [0.5, 0.4, 0.3]
    assert [round(float(polynomial(each)), 4) for each in changes] == [-0.5, -0.38, -0.22]
    _, run_step = hook(1.0, coefficients=[2.0, -3.0, 0.5])
    assert run_step(0, 1.0, 10) == 10
    assert run_step(1, 1.5, 11) == 10  # 0.5
    assert run_step(2, 2.1, 12) == 10  # and 0.38
    assert run_step(3, 2.73, 13) == 13  # and 0.22: 1.1 in all
    assert run_step(4, 2.73 * 1.3, 14) == 13  # from 0 again
    _, other = hook(1.0, coefficients=[0.5, -3.0, 2.0])  # the other way round
    assert [other(0, 1.0, 10), other(1, 1.5, 11), other(2, 2.1, 12)] == [10, 10, 12]


def test_coefficients_decide_what_is_saved() -> None:
    """The polynomial x is no polynomial at all, and twice as much saves less."""
    saved = []
    for coefficients in (None, [1.0, 0.0], [2.0, 0.0]):
        watched = Watched("tea_cache", {**LOOSE["tea_cache"], "coefficients": coefficients})
        watched.latents([job("a fox"), job("a fox " * 2, 1)])
        saved.append(dict(watched.backend.computed))
    assert saved[0] == saved[1]
    assert sum(saved[2].values()) > sum(saved[0].values())


def test_the_block_cache_compares_with_what_was_computed() -> None:
    backend, layers_run = BlockCache({"residual_diff_threshold": 0.5}), []

    def run_step(step: int, added: float, middle: float) -> float:
        def run(rows: Tensor, start: int, stop: int) -> Tensor:
            layers_run.append((start, stop))
            return rows + (0 if start == stop else middle if start else added)

        return float(backend.layers("gen", step, torch.zeros(4, 8), run, 3)[0, 0])

    assert run_step(0, 1.0, 10) == 11
    assert run_step(1, 1.4, 20) == pytest.approx(11.4)
    assert run_step(2, 1.6, 30) == pytest.approx(
        31.6
    )  # 0.6 from the first, though 0.14 from the second
    assert layers_run == [(0, 1), (1, 3), (3, 3), (0, 1), (3, 3), (0, 1), (1, 3), (3, 3)]


def test_at_threshold_0_an_input_that_stands_still_is_computed() -> None:
    _, run_step = hook(0.0)
    assert [run_step(0, 1, 10), run_step(1, 1, 11)] == [10, 11]


def test_branches_keep_their_own() -> None:
    _, run_step = hook()
    assert [run_step(0, 1, 10), run_step(0, 1, 20, "cfg_text")] == [10, 20]
    assert [run_step(1, 1, 11), run_step(1, 1, 21, "cfg_text")] == [10, 20]


def test_a_number_that_is_none_is_never_reused() -> None:
    _, run_step = hook()
    assert [run_step(0, float("nan"), 10), run_step(1, float("nan"), 11), run_step(2, 1.0, 12)] == [
        10,
        11,
        12,
    ]


def test_refresh_forgets_all() -> None:
    backend, run_step = hook()
    assert [run_step(0, 1, 10), run_step(1, 1, 11)] == [10, 10]
    backend.refresh(None, STEPS)
    assert not backend.computed
    assert not backend.reused
    assert run_step(2, 1, 12) == 12


def test_a_generation_that_begins_unannounced_begins_anew() -> None:
    """As images of another size do, in the same batch of an engine."""
    _, run_step = hook()
    assert [run_step(0, 1, 10), run_step(0, 1, 20, "cfg_text"), run_step(1, 1, 11)] == [10, 20, 10]
    assert run_step(0, 1, 30) == 30
    assert run_step(1, 1, 40, "cfg_text") == 40  # not the last generation's, though its step was 0


@pytest.mark.parametrize("name", NAMES)
def test_k_and_v_stay_as_they_are(name: str) -> None:
    one = job()
    before = copy.deepcopy(one[0])
    Watched(name, LOOSE[name]).latents([one])
    for branch in ("gen", "cfg_text", "cfg_img"):
        found, kept = getattr(one[0], branch), getattr(before, branch)
        assert (found.kv_lens, found.ropes) == (kept.kv_lens, kept.ropes)
        for kind in ("key_cache", "value_cache"):
            pairs = zip(
                getattr(found.past_key_values, kind).values(),
                getattr(kept.past_key_values, kind).values(),
                strict=True,
            )
            assert all(torch.equal(new, old) for new, old in pairs)


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        (
            "tea_cache",
            {"rel_l1_tresh": 0.1},
            "rel_l1_tresh: no such setting; did you mean rel_l1_thresh",
        ),
        ("tea_cache", {"rel_l1_thresh": -0.1}, "rel_l1_thresh=-0.1: wanted a number from 0 on"),
        ("tea_cache", {"rel_l1_thresh": float("nan")}, "rel_l1_thresh=nan"),
        ("tea_cache", {"rel_l1_thresh": "0.1"}, "rel_l1_thresh='0.1': wanted a number"),
        ("tea_cache", {"coefficients": []}, r"coefficients=\[\]: wanted a list of numbers"),
        ("tea_cache", {"coefficients": [1.0, float("nan")]}, r"coefficients\[1\]=nan"),
        ("tea_cache", {"coefficients": "1"}, "coefficients='1': wanted a list"),
        ("tea_cache", {"max_warmup_steps": 4}, "max_warmup_steps: no such setting"),
        ("block_cache", {"max_warmup_steps": 4}, "max_warmup_steps: no such setting"),
        ("block_cache", {"enable_taylorseer": True}, "enable_taylorseer: no such setting"),
        (
            "block_cache",
            {"scm_steps_mask_policy": "fast"},
            "scm_steps_mask_policy: no such setting",
        ),
        ("cache_dit", {"enable_separate_cfg": True}, "OmniBagelPipeline separates all branches"),
        (
            "block_cache",
            {"Fn_compute_blocks": 0},
            "Fn_compute_blocks=0: wanted a whole number from 1 on",
        ),
        ("block_cache", {"Bn_compute_blocks": 0.5}, "Bn_compute_blocks=0.5: wanted a whole number"),
        (
            "block_cache",
            {"residual_diff_threshold": True},
            "residual_diff_threshold=True: wanted a number",
        ),
        ("block_cache", {"Fn_compute_blocks": 2, "Bn_compute_blocks": 1}, "none of the 3 layers"),
    ],
)
def test_wrong_settings_are_refused(name: str, settings: dict[str, Any], word: str) -> None:
    given: dict[str, Any] = {"cache_backend": name, "cache_config": settings}
    with pytest.raises(ValueError, match=word):
        GPUDiffusionModelRunner(config(None, stage="all", **given), torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_without_a_free_hook_is_refused(name: str) -> None:
    watched = Watched(name, {})
    second = make_cache_backend(name, {})
    assert second is not None
    with pytest.raises(ValueError, match="is taken"):
        second.enable(watched.pipeline)
    with pytest.raises(ValueError, match="object does not offer"):
        second.enable(object())
    assert (watched.backend.is_enabled(), second.is_enabled()) == (True, False)


# ---- in an engine


@pytest.mark.parametrize("name", NAMES)
def test_an_engines_second_image_is_a_fresh_engines(name: str, sockets: str) -> None:
    """And what the engine kept of the first is none of the link's memory."""
    images, options = {}, {"num_inference_steps": STEPS + 1}
    for order in (("first", "second"), ("second",)):
        with link(sockets) as producer:
            how = {"cache_backend": name, "cache_config": LOOSE[name]}
            with closing(DiffusionEngine(config(producer, sockets, **how))) as engine:
                for key in order:
                    producer.put(bundle(key, seed=len(key)))
                    done = engine.submit(request(key, seed=len(key), **options)).result(WAIT)
                    images[len(order), key] = done.result()[0]
                executor: Any = engine.executor
                backend = executor.worker.model_runner.cache_backend
                assert backend.reused["gen"] > 0
                assert done.cached_steps == backend.reused.total()
                assert executor.kv_manager.stats()["charged"] == 0
    assert torch.equal(images[2, "second"], images[1, "second"])
    assert not torch.equal(images[2, "second"], alone(seed=len("second"), **options))


@pytest.mark.parametrize("name", ["none", *NAMES])
def test_a_deployment_names_its_backend(name: str) -> None:
    stage = {"stage_id": 0, "cache_backend": name, "cache_config": LOOSE.get(name, {})}
    how = {"pipeline": "bagel_single_stage", "stages": [stage]}
    options = {"height": 16, "width": 24, "num_inference_steps": 9, "seed": 1}
    with OmniDiffusion(checkpoint(), how, dtype="float32") as omni:
        images = omni.generate(["a fox"], options, timeout=WAIT, output_type="pt")
    expected = alone(seed=1, num_inference_steps=9)
    assert torch.equal(images[0][0], expected) == (name == "none")


def test_the_benchmark_counts_and_compares(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "cache_backends.py"
    how = ["--steps", "8", "--layers", "3", "--rounds", "1", "--json", str(tmp_path / "found")]
    done = subprocess.run(
        [sys.executable, str(script), *how], capture_output=True, text=True, timeout=2 * WAIT
    )
    assert done.returncode == 0, done.stderr
    assert "says nothing about the quality" in done.stdout
    for row in json.loads((tmp_path / "found").read_text())["results"]["rows"]:
        threshold = row["settings"].get(THRESHOLD.get(row["backend"], ""), 0)
        assert row["steps_computed"] + row["steps_skipped"] == 8
        exact = row["latent_max_abs_error"] == 0 and row["image_psnr_db"] is None
        assert exact == (row["steps_skipped"] == 0)
        assert not (threshold == 0 and row["steps_skipped"])
        assert not (threshold >= 0.1 and row["steps_skipped"] == 0)
