"""An AR stage for tests: its engine, prompts for it, and records of what it computes and sends."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import KVCacheBundle
from omni_kvlink.engine import AREngine, OmniARConfig, OmniDiffusionRequest
from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig
from support.engine.fixtures import SHAPE, checkpoint, params, pipeline, url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.engine.kv.kv_stream import KVStream
    from omni_kvlink.engine.tokens.outputs import KVSent
    from omni_kvlink.engine.worker import GPUARModelRunner
    from omni_kvlink.models.bagel import BagelContexts
    from omni_kvlink.models.bagel.prefill_steps import TextPass

BRANCHES = ("gen", "cfg_text", "cfg_img")
TOLERANCE = 1e-5
"""Of the largest value: products of larger matrices may be summed in another order."""


@contextmanager
def ar_engine(sockets: str, backend: str = "uni", **fields: Any) -> Iterator[AREngine]:
    ranks = fields.pop("ranks", 1)
    sinks = tuple(url() for _ in range(ranks))
    kv = KVConfig(sinks=sinks, sink_options={"directory": sockets})
    fields["parallel_config"] = DiffusionParallelConfig(tensor_parallel_size=ranks)
    how = {"dtype": "float32", "max_num_seqs": 4, "num_blocks": 4096, "think": True, **fields}
    config = OmniARConfig(checkpoint(), kv=kv, distributed_executor_backend=backend, **how)
    engine = AREngine(config)
    with engine:
        yield engine


def prompt(name: str, text: str = "a fox", **fields: Any) -> OmniDiffusionRequest:
    own = {"max_tokens": 4, "temperature": 0.0, **fields}
    return OmniDiffusionRequest(text, params(**own), name, need_kv_transfer=True)


class Passes:
    """Records the tokens of each request in each pass; `on_pass` is called before it."""

    def __init__(self, engine: AREngine, on_pass: Callable[[int], None] = lambda number: None):
        self.tokens = list[list[int]]()
        utility = engine.executor.worker.runner.utility  # type: ignore[attr-defined]
        advance = utility.advance

        def recorded(texts: list[TextPass]) -> Any:
            self.tokens.append([one.num_tokens for one in texts])
            on_pass(len(self.tokens))
            return advance(texts)

        utility.advance = recorded

    @property
    def sizes(self) -> list[int]:
        """How many requests each pass has."""
        return [len(tokens) for tokens in self.tokens]


class SentKV:
    """Keeps a copy of K and V of each request that an engine in this process sends."""

    def __init__(self, engine: AREngine):
        self.of = dict[str, dict[str, list[torch.Tensor]]]()
        on_finish(runner_of(engine), self._keep)

    def _keep(self, stream: KVStream, finish: Callable[[], KVSent]) -> KVSent:
        # What is sent, before the link has it: whoever receives it takes it away from the test.
        bundle = stream._payload
        assert isinstance(bundle, KVCacheBundle)
        self.of[bundle.request_id] = {
            name: [one.dense() if hasattr(one, "dense") else one.clone() for one in tensors]
            for name, tensors in ((name, bundle[name].tensors()) for name in bundle)
        }
        return finish()


def runner_of(engine: AREngine) -> GPUARModelRunner:
    """The runner of an engine in this process."""
    runner: GPUARModelRunner = engine.executor.worker.runner  # type: ignore[attr-defined]
    return runner


def on_finish(
    runner: GPUARModelRunner, call: Callable[[KVStream, Callable[[], KVSent]], KVSent]
) -> None:
    """Have this called instead of each stream's `finish`, with that."""
    sink = runner.kv_sink
    assert sink is not None
    open_stream = sink.open

    def opened() -> KVStream:
        stream: KVStream = open_stream()
        stream.finish = partial(call, stream, stream.finish)  # type: ignore[method-assign]
        return stream

    sink.open = opened  # type: ignore[method-assign]


def read_alone(text: Any, *, think: bool = False, seed: int = 0, **fields: Any) -> BagelContexts:
    """What a prompt becomes that is read by itself, without an engine."""
    generator, model = torch.Generator().manual_seed(seed), pipeline()
    contexts = model.prefill(text, think=think, image_shape=SHAPE, generator=generator, **fields)
    model.release_caches()
    return contexts


def kv_of(contexts: BagelContexts) -> dict[str, list[torch.Tensor]]:
    """K and V of each layer, by branch, as `SentKV` keeps them."""
    found = dict[str, list[torch.Tensor]]()
    for name in BRANCHES:
        cache = getattr(contexts, name).past_key_values
        pairs = [(cache.key_cache[i], cache.value_cache[i]) for i in range(len(cache.key_cache))]
        found[name] = [tensor for pair in pairs for tensor in pair if tensor is not None]
    return found


def difference(ours: dict[str, list[torch.Tensor]], theirs: dict[str, list[torch.Tensor]]) -> float:
    """The largest difference of two caches, relative to the largest value of each tensor."""
    largest = 0.0
    assert list(ours) == list(theirs)
    for name in theirs:
        for one, other in zip(ours[name], theirs[name], strict=True):
            assert one.shape == other.shape, name
            if other.numel():
                gap = (one - other).abs().max() / other.abs().max()
                largest = max(largest, float(gap))
    return largest
