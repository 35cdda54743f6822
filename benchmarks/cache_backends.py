"""What the engine's cache backends save on the reference BAGEL, and what they change.

    python benchmarks/cache_backends.py [--steps 24] [--layers 12] [--rounds 3] [--json FILE]

Tiny random weights: the passes and the times are real, but a random network's image has no quality
to lose, so the errors say nothing about a trained one. Every round runs every row once.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from omni_kvlink.bench import machine, report
from omni_kvlink.cli import terminal
from omni_kvlink.engine.step_cache.cache_backend import make_cache_backend
from omni_kvlink.engine.step_cache.step_cache import StepCache
from omni_kvlink.models.bagel import BagelPipeline, DenoiseParams, make_tiny_checkpoint
from omni_kvlink.models.bagel.hooks import DenoiseHooks
from omni_kvlink.models.bagel.tiny import tiny_config

SHAPE = (64, 64)
TEA, BLOCK = "rel_l1_thresh", "residual_diff_threshold"
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    *(("tea_cache", {TEA: threshold}) for threshold in (0.0, 0.02, 0.05, 0.1)),
    *(("block_cache", {BLOCK: threshold}) for threshold in (0.0, 0.02, 0.05, 0.1)),
]
Result = dict[str, Any]


class Row:
    """A backend on the pipeline, its best time and its last latent."""

    def __init__(self, name: str, settings: dict[str, Any]):
        self.name, self.settings = name, settings
        self.hooks = DenoiseHooks()
        self.backend = make_cache_backend(name, settings)
        self.seconds = math.inf
        self.latent = torch.empty(0)

    def run(self, pipeline: BagelPipeline, contexts: Any, noise: Tensor, steps: int) -> None:
        pipeline.hooks = self.hooks
        if self.backend is not None and not self.backend.is_enabled():
            self.backend.enable(pipeline)
        if self.backend is not None:
            self.backend.refresh(pipeline, steps + 1)
        started = time.perf_counter()
        self.latent = pipeline.denoise(contexts, noise, DenoiseParams(num_timesteps=steps + 1))
        self.seconds = min(self.seconds, time.perf_counter() - started)

    def result(self, pipeline: BagelPipeline, plain: Row, steps: int) -> Result:
        skipped = self.backend.reused["gen"] if isinstance(self.backend, StepCache) else 0
        images = [pipeline.decode(row.latent).double() for row in (self, plain)]
        error = float((images[0] - images[1]).square().mean())
        return {
            "backend": self.name,
            "settings": self.settings,
            "steps_computed": steps - skipped,
            "steps_skipped": skipped,
            "seconds": self.seconds,
            "speed_up": plain.seconds / self.seconds,
            "latent_max_abs_error": float((self.latent - plain.latent).abs().max()),
            "image_psnr_db": 10 * math.log10(255**2 / error) if error else None,
        }


def measure(steps: int, layers: int, rounds: int) -> list[Result]:
    config = tiny_config()
    llm = msgspec.structs.replace(
        config.llm, hidden_size=256, intermediate_size=512, num_hidden_layers=layers
    )
    with tempfile.TemporaryDirectory() as where:
        make_tiny_checkpoint(Path(where), config=msgspec.structs.replace(config, llm=llm))
        pipeline = BagelPipeline.from_pretrained(where, dtype=torch.float32)
        contexts = pipeline.prefill("a fox in the snow", image_shape=SHAPE)
    noise = pipeline.initial_noise(SHAPE, torch.Generator().manual_seed(0))
    rows = [Row(*row) for row in ROWS]
    for _ in range(rounds):
        for row in rows:
            row.run(pipeline, contexts, noise, steps)
    return [row.result(pipeline, rows[0], steps) for row in rows]


def text(results: list[Result]) -> str:
    head = ["threshold", "computed", "skipped", "time", "speed-up", "max abs", "PSNR", "backend"]
    rows = []
    for one in results:
        psnr = one["image_psnr_db"]
        rows.append(
            [
                *([f"{value:g}" for value in one["settings"].values()] or ["0"]),
                str(one["steps_computed"]),
                str(one["steps_skipped"]),
                f"{one['seconds'] * 1e3:.0f} ms",
                f"{one['speed_up']:.2f} ×",
                f"{one['latent_max_abs_error']:.2g}",
                "same" if psnr is None else f"{psnr:.1f} dB",
                one["backend"],
            ]
        )
    return terminal.table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="The engine's cache backends, side by side.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = machine.describe()
    print(machine.one_line(about))
    results = measure(args.steps, args.layers, args.rounds)
    print(text(results))
    print(
        "Steps are those of the branch gen; the best time of all rounds, without the decoder. The\n"
        "weights are random: this says nothing about the quality of a trained model's images."
    )
    if args.json:
        report.write_json(args.json, "cache_backends", about, vars(args), {"rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
