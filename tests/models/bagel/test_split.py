"""The language model on several tensor ranks, here threads: each holds a share, and all agree."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import Tensor

from omni_kvlink.models.bagel import BagelPipeline
from omni_kvlink.models.bagel.shards import Split, cuts_of
from omni_kvlink.models.bagel.tiny import make_tiny_checkpoint, tiny_config

from .conftest import stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IDS = [1, 70, 80, 90, 2]


class Sums:
    """The sum of what all threads give, in the order of the ranks."""

    def __init__(self, ranks: int):
        self._given: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=300)

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def total(share: Tensor) -> Tensor:
            self._given[rank] = share
            self._barrier.wait()
            found = torch.stack(self._given).sum(0)
            self._barrier.wait()
            return found

        return total


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("split"))


def load(directory: Path, split: Split) -> BagelPipeline:
    return BagelPipeline.from_pretrained(directory, dtype=torch.float32, split=split)


def run(pipeline: BagelPipeline) -> tuple[list[Tensor], Tensor]:
    """K and V of a prompt by layer, and a flow."""
    context = pipeline.append_text(pipeline.empty_context(), IDS)
    rows = torch.linspace(-1, 1, 6 * 64).reshape(6, 64)
    layers = [stored(context, i) for i in range(pipeline.num_layers)]
    kept = [tensor for part in zip(*layers, strict=True) for tensor in part]
    with torch.no_grad():
        return kept, pipeline.model.velocity(context, rows)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_model_computes_the_same(directory: Path, ranks: int) -> None:
    """Four ranks for two KV heads: neighbours hold the same one."""
    kept, flow = run(load(directory, Split()))
    sums = Sums(ranks)
    shares = [load(directory, Split(rank, ranks, sums.of(rank))) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(run, shares))
    for rank, (mine, own) in enumerate(found):
        assert torch.equal(own, found[0][1])
        assert float((own - flow).abs().max() / flow.abs().max()) < 1e-5
        head = rank * 2 // ranks
        assert list(shares[rank].model.kv_heads) == [head]
        for share, right in zip(mine, kept, strict=True):
            assert share.shape[1] == 1
            assert torch.allclose(share, right[:, head : head + 1], atol=1e-5)


def test_only_what_is_cut_is_cut(directory: Path) -> None:
    assert cuts_of(load(directory, Split()).model) == {}
    cuts = cuts_of(load(directory, Split(1, 2)).model)
    assert all(name.startswith("language_model.model.layers.") for name in cuts)
    assert len(cuts) == 3 * 2 * (3 * 2 + 1 + 3)  # layers, experts; q, k, v and biases, o, MLP


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [({}, 3), ({"num_key_value_heads": 4}, 8), ({"intermediate_size": 129}, 2)],
)
def test_what_does_not_divide_is_refused(
    tmp_path: Path, fields: dict[str, int], ranks: int
) -> None:
    config = tiny_config()
    config = msgspec.structs.replace(config, llm=msgspec.structs.replace(config.llm, **fields))
    root = make_tiny_checkpoint(tmp_path, config=config)
    with pytest.raises(ValueError, match="choose a tensor_parallel_size"):
        load(root, Split(0, ranks))
