"""The rows of an image, and the layers, on several ranks, here threads: one process's flow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from omni_kvlink.models.bagel import BagelContext, BagelPipeline, NaiveCache
from omni_kvlink.models.bagel.layers import IntermediateTensors, LayerSplit
from omni_kvlink.models.bagel.sequence import SequenceSplit
from omni_kvlink.models.bagel.shards import Split
from omni_kvlink.models.bagel.tiny import make_tiny_checkpoint

from .conftest import stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

IDS = [1, 70, 80, 90, 2]
ROUNDING = 1e-5
"""Of a flow's largest value, in float32."""


class Collectives:
    """The collectives of one rank: every rank posts, all wait, each takes."""

    def __init__(self, ranks: Ranks, rank: int):
        self._ranks, self._rank = ranks, rank
        self._ulysses, self._ring = rank % ranks.ulysses, rank // ranks.ulysses

    def all_to_all(self, pieces: Sequence[Tensor], shapes: Sequence[Any]) -> list[Tensor]:
        posted = self._ranks.post(self._rank, list(pieces))
        first = self._ring * self._ranks.ulysses
        found = [posted[first + i][self._ulysses] for i in range(self._ranks.ulysses)]
        assert [tuple(one.shape) for one in found] == [tuple(shape) for shape in shapes]
        return found

    def shift(self, block: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        before = (self._ring - 1) % self._ranks.ring * self._ranks.ulysses + self._ulysses

        def wait() -> Tensor:
            found: Tensor = self._ranks.post(self._rank, block)[before]
            assert tuple(found.shape) == tuple(shape)
            return found

        return wait

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        found = self._ranks.post(self._rank, rows)
        assert [len(one) for one in found] == list(counts)
        return torch.cat(found)


class Ranks:
    """The ranks of a `SequenceSplit`, which meet in `post`."""

    def __init__(self, ulysses: int, ring: int):
        self.ulysses, self.ring = ulysses, ring
        self.count = ulysses * ring
        self._posted: list[Any] = [None] * self.count
        self.barrier = threading.Barrier(self.count, timeout=300)

    def post(self, rank: int, value: Any) -> list[Any]:
        self._posted[rank] = value
        self.barrier.wait()
        found = list(self._posted)
        self.barrier.wait()
        return found

    def split(self, rank: int) -> Split:
        where = rank % self.ulysses, self.ulysses, rank // self.ulysses, self.ring
        return Split(sequence=SequenceSplit(*where, Collectives(self, rank)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("rows"))


def load(directory: Path, split: Split, stage: Any = "dit") -> BagelPipeline:
    return BagelPipeline.from_pretrained(directory, dtype=torch.float32, stage=stage, split=split)


@pytest.fixture(scope="module")
def whole(directory: Path) -> BagelPipeline:
    return load(directory, Split(), "all")


@pytest.fixture(scope="module")
def contexts(whole: BagelPipeline) -> list[BagelContext]:
    """One with a prompt, one without, one with a longer prompt."""
    empty = whole.empty_context()
    prompt = whole.append_text(empty, IDS)
    return [prompt, empty, whole.append_text(prompt, IDS)]


def part_of(context: BagelContext, model: Any) -> BagelContext:
    """What a rank receives of a context: its heads of its layers."""
    heads, cache = slice(model.kv_heads.start, model.kv_heads.stop), NaiveCache(0)
    for own, layer in enumerate(model.kv_layers):
        key = context.past_key_values.key_cache[layer]
        if key is None:
            cache.key_cache[own] = cache.value_cache[own] = None
            continue
        key, value = stored(context, layer)
        cache.key_cache[own], cache.value_cache[own] = key[:, heads], value[:, heads]
    return BagelContext(context.kv_lens, context.ropes, cache)


def flow_of(pipeline: BagelPipeline, contexts: Sequence[BagelContext], latent: int) -> Tensor:
    """The flow of so many latent rows, in a batch if there are several contexts."""
    shape = (latent + 2, 64) if len(contexts) == 1 else (latent + 2, len(contexts), 64)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(latent))
    own = [part_of(one, pipeline.model) for one in contexts]
    for one in own:
        pipeline.model.check_context("context", one)
    with torch.no_grad():
        return pipeline.model.velocity(own if len(own) > 1 else own[0], rows)


def on_all(
    barrier: threading.Barrier, models: Sequence[BagelPipeline], batch: Any, latent: int
) -> list[Tensor]:
    """The flow on each rank; if one fails, the others stop waiting for it."""

    def run(one: BagelPipeline) -> Tensor:
        try:
            return flow_of(one, batch, latent)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(run, models))


def off(found: Tensor, right: Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.parametrize(
    ("ulysses", "ring"), [(2, 1), (1, 2), (1, 3), (4, 1), (2, 2)], ids=lambda degree: str(degree)
)
def test_ranks_that_divide_rows_compute_the_same_flow(
    directory: Path, whole: BagelPipeline, contexts: list[BagelContext], ulysses: int, ring: int
) -> None:
    """Also of a number of rows that is no multiple of the ranks, or below it."""
    ranks = Ranks(ulysses, ring)
    models = [load(directory, ranks.split(rank)) for rank in range(ranks.count)]
    for latent in (1, 6, 11):
        for batch in (contexts[:1], contexts[1:2], contexts):
            right = flow_of(whole, batch, latent)
            found = on_all(ranks.barrier, models, batch, latent)
            assert all(torch.equal(one, found[0]) for one in found)
            assert off(found[0], right) < ROUNDING


def test_a_rank_computes_its_rows_alone(directory: Path, contexts: list[BagelContext]) -> None:
    """Between the layers a rank has its rows; in attention, with Ulysses, a part of the heads."""
    ranks = Ranks(2, 2)
    models = [load(directory, ranks.split(rank)) for rank in range(ranks.count)]
    seen: list[list[int]] = [[] for _ in models]
    for rank, one in enumerate(models):
        layer: Any = one.model.language_model.model.layers[1]
        layer.mlp_moe_gen.register_forward_pre_hook(
            lambda _, args, rank=rank: seen[rank].append(len(args[0]))
        )
    assert [list(one.model.kv_heads) for one in models] == [[0], [1], [0], [1]]
    on_all(ranks.barrier, models, contexts[:1], 11)
    # 13 rows: 3, 3, 3 and 4, of which the first and the last rank have a marker
    assert seen == [[2], [3], [3], [3]]


def test_a_cache_may_have_the_heads_of_all_ulysses_ranks(
    directory: Path, whole: BagelPipeline, contexts: list[BagelContext]
) -> None:
    """A stage that reads prompts itself has all heads in its cache."""
    ranks = Ranks(2, 1)
    models = [load(directory, ranks.split(rank), "all") for rank in range(2)]
    assert [list(one.model.kv_heads) for one in models] == [[0, 1]] * 2
    found = on_all(ranks.barrier, models, contexts, 6)
    assert off(found[0], flow_of(whole, contexts, 6)) < ROUNDING


class Pipe:
    """Sends tensors between pipeline ranks; what is sent is recorded."""

    def __init__(self, ranks: int):
        self._ranks, self.barrier = ranks, threading.Barrier(ranks, timeout=300)
        self.sent = [threading.Semaphore(0) for _ in range(ranks)]
        self.tensors: list[Any] = [None] * ranks
        self.record: list[tuple[int, int, list[str]]] = []

    def of(self, rank: int) -> Any:
        pipe = self

        class Collectives:
            def send_tensors(self, tensors: IntermediateTensors, receiver: int) -> None:
                pipe.record.append((rank, receiver, list(tensors.tensors)))
                pipe.tensors[receiver] = tensors
                pipe.sent[receiver].release()

            def receive_tensors(self, like: IntermediateTensors, sender: int) -> Any:
                assert pipe.sent[rank].acquire(timeout=300)
                assert sender == rank - 1
                return pipe.tensors[rank]

            def broadcast_tensor(self, tensor: Tensor, sender: int) -> Tensor:
                if rank == sender:
                    pipe.tensors[sender] = tensor
                pipe.barrier.wait()
                found: Tensor = pipe.tensors[sender]
                pipe.barrier.wait()
                return found

        return Collectives()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_divide_layers_compute_the_same_bits(
    directory: Path, whole: BagelPipeline, contexts: list[BagelContext], ranks: int
) -> None:
    pipe = Pipe(ranks)
    models = [
        load(directory, Split(pipeline=LayerSplit(rank, ranks, pipe.of(rank))))
        for rank in range(ranks)
    ]
    decoders = [one.model.language_model.model for one in models]
    held = [(one.start_layer, one.end_layer) for one in decoders]
    assert held == ([(0, 1), (1, 3)] if ranks == 2 else [(0, 1), (1, 2), (2, 3)])
    for (start, stop), one in zip(held, decoders, strict=True):
        names = {name.split(".")[1] for name, _ in one.named_parameters() if "layers." in name}
        assert names == {str(layer) for layer in range(start, stop)}
    for batch in (contexts[:1], contexts):
        pipe.record.clear()
        found = on_all(pipe.barrier, models, batch, 6)
        assert all(torch.equal(one, flow_of(whole, batch, 6)) for one in found)
        assert pipe.record == [(at, at + 1, ["hidden_states"]) for at in range(ranks - 1)]


def test_what_cannot_be_divided_is_refused(directory: Path) -> None:
    three = SequenceSplit(0, 3, 0, 1, Collectives(Ranks(3, 1), 0))
    with pytest.raises(ValueError, match="choose a ulysses_degree"):
        load(directory, Split(sequence=three))
    with pytest.raises(ValueError, match="choose a pipeline_parallel_size up to 3"):
        load(directory, Split(pipeline=LayerSplit(0, 4, Pipe(4).of(0))))
    with pytest.raises(ValueError, match='divided in stage "dit"'):
        load(directory, Split(pipeline=LayerSplit(0, 2, Pipe(2).of(0))), "all")
