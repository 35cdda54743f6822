"""A diffusion engine with `step_execution`, and a record of its passes through the model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine import DiffusionEngine
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.models.bagel_pipeline import denoise_params, fill_params
from omni_kvlink.engine.models.bagel_text import readable
from support.engine.fixtures import SHAPE, WAIT, bundle, config, link, pipeline, request, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from omni_kvlink import KVProducer
    from omni_kvlink.engine import OmniDiffusionRequest
    from omni_kvlink.engine.outputs import DiffusionOutput

LONG, SHORT = 12, 4
"""Points of a schedule: one more than the steps."""


class StepEngine:
    """An engine with one worker in this process, whose KV this process sends.

    Attributes:
        passes: the ids of the requests in each step's pass over "gen".
        on_pass: called before each, with its number from 1, in the engine's thread.
        latents: what was decoded, by request id.
    """

    def __init__(self, producer: KVProducer, sockets: str, **fields: Any):
        how = {"step_execution": True, "max_num_seqs": 4, **fields}
        self.engine = DiffusionEngine(config(producer, sockets, **how))
        self.producer = producer
        self.passes = list[list[str]]()
        self.latents = dict[str, list[torch.Tensor]]()
        self.on_pass: Callable[[int], Any] = lambda number: None
        self.runner: Any = self.engine.executor.worker.runner  # type: ignore[attr-defined]
        self._record(self.runner.pipeline)

    @property
    def manager(self) -> Any:
        return self.runner.kv_manager

    def submit(self, name: str, steps: int = LONG, **fields: Any) -> Future[DiffusionOutput]:
        """Submit a request whose KV has come when this returns."""
        shape = fields.pop("shape", SHAPE)
        how = {"num_inference_steps": steps, **fields}
        self.producer.put(bundle(name, seed=how.get("seed", 0), shape=shape))
        future = self.engine.submit(request(name, **how))
        # Or it has ended meanwhile: its KV is free again then.
        until(lambda: future.done() or self.manager.state(name) is KVState.READY)
        return future

    def at(self, number: int, call: Callable[[], Any]) -> list[Any]:
        """Run a call before pass `number`; its result is added to the list that this returns."""
        before, results = self.on_pass, list[Any]()

        def on_pass(current: int) -> None:
            before(current)
            if current == number:
                results.append(call())

        self.on_pass = on_pass
        return results

    def _record(self, pipeline: Any) -> None:
        denoise_step, post_decode = pipeline.denoise_step, pipeline.post_decode

        def recorded(states: Any) -> Any:
            self.passes.append([state.request.request_id for state in states])
            self.on_pass(len(self.passes))
            return denoise_step(states)

        def decoded(state: Any) -> Any:
            key = state.request.request_id
            self.latents[key] = [pipeline.latent(image) for image in state.images]
            return post_decode(state)

        pipeline.denoise_step, pipeline.post_decode = recorded, decoded


@contextmanager
def step_engine(sockets: str, **fields: Any) -> Iterator[StepEngine]:
    with link(sockets) as producer:
        made = StepEngine(producer, sockets, **fields)
        try:
            yield made
            assert made.manager.stats()["charged"] == 0
            # What a runner keeps of a request that has ended costs memory, and shows nowhere.
            assert made.runner._running == {}
        finally:
            made.engine.close()


def latent_of(one: OmniDiffusionRequest, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """The first latent of a request that this process runs alone."""
    fill_params(one.sampling_params, one.prompt)
    model, seed = pipeline(), one.sampling_params.seed or 0
    generator = torch.Generator().manual_seed(seed)
    contexts = model.prefill(readable(one.prompt), image_shape=shape, generator=generator)
    noise = model.initial_noise(contexts.image_shape, generator)
    model.release_caches()
    return model.denoise(contexts, noise, denoise_params(one.sampling_params))


def is_close(latent: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within what `denoise_batch` promises of latents that were computed together."""
    return bool((latent - expected).abs().max() < 1e-5 * expected.abs().max())


def result(future: Future[DiffusionOutput]) -> torch.Tensor:
    return future.result(WAIT).result()
