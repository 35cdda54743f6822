"""The AR stage's cache: in blocks, bit for bit what it would be elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_kvlink import CapacityError, SchemaError
from omni_kvlink.engine import EngineAsleepError, OmniARConfig, OmniDiffusionRequest
from omni_kvlink.engine.kv.block_manager import BlockManager, KVPools
from omni_kvlink.engine.kv.sequence_blocks import SequenceBlocks
from omni_kvlink.engine.models.bagel import BagelUtility
from omni_kvlink.engine.models.paged_naive_cache import PagedNaiveCache
from omni_kvlink.models.bagel.prefill_steps import run_steps
from omni_kvlink.payload.views import same_bytes
from support.engine.fixtures import bundle, params, pipeline

CPU = torch.device("cpu")
PROMPTS: dict[str, Any] = {
    "text": "a fox",
    "long": "a fox and the other thing " * 4,
    "two texts": ["a fox", "in the snow"],
    "image": [torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8)],
    "edit": [torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8), "make it night"],
    "between": ["like", torch.arange(32 * 32 * 3).reshape(32, 32, 3).to(torch.uint8), "blue"],
}


def pools(blocks: int = 200, size: int = 4) -> KVPools:
    layers, row = 3, (2, 16)
    return KVPools(
        num_layers=layers,
        num_blocks=blocks,
        block_size=size,
        row=row,
        dtype=torch.float32,
        device=CPU,
    )


@pytest.fixture(scope="module")
def utility() -> BagelUtility:
    from support.engine.fixtures import checkpoint

    return BagelUtility(OmniARConfig(checkpoint(), dtype="float32"), CPU)


@pytest.mark.parametrize("name", PROMPTS)
def test_what_lies_in_blocks_is_what_a_naive_cache_has(utility: BagelUtility, name: str) -> None:
    memory, manager = pools(), BlockManager(200, 4)
    for pool in [*memory.keys, *memory.values]:
        pool.fill_(float("nan"))
    request = OmniDiffusionRequest(PROMPTS[name], params(3), "r", need_kv_transfer=True)
    counted = utility.count_tokens(request)
    manager.allocate(3)  # so that the blocks do not begin at 0
    tables = {k: manager.allocate(manager.blocks_for(n))[::-1] for k, n in counted.items()}
    run_steps(utility.prefill_steps(request, memory, tables), utility.advance)
    sent, expected = utility.extract(request), bundle("r", PROMPTS[name], 3)
    assert list(sent) == list(expected)
    for branch in expected:
        ours, theirs = expected[branch], sent[branch]
        assert theirs.metadata.kv_lens == ours.metadata.kv_lens
        assert theirs.metadata.ropes == ours.metadata.ropes
        pairs = zip(ours.tensors(), theirs.tensors(), strict=True)
        assert all(same_bytes(mine, other) for mine, other in pairs), branch
    assert sent["gen"].metadata.extra == expected["gen"].metadata.extra
    assert sent["gen"].block_ids == tables["gen"]
    assert sent.reused_nbytes == expected.reused_nbytes  # nothing is sent twice


@pytest.mark.parametrize("name", PROMPTS)
def test_the_tokens_are_counted_before(utility: BagelUtility, name: str) -> None:
    contexts = pipeline().prefill(PROMPTS[name], generator=torch.Generator().manual_seed(0))
    request = OmniDiffusionRequest(PROMPTS[name], params(0), "r")
    counted = utility.count_tokens(request)
    assert counted["gen"] == contexts.gen.kv_lens[0]
    if name != "two texts":
        assert counted["cfg_img"] == contexts.cfg_img.kv_lens[0]


def test_too_few_blocks_are_an_error(utility: BagelUtility) -> None:
    request = OmniDiffusionRequest("a fox", params(), "r")
    blocks: dict[str, list[int]] = {"gen": [5], "cfg_img": []}
    with pytest.raises(CapacityError, match="7 tokens for 1 blocks of 4"):
        run_steps(utility.prefill_steps(request, pools(), blocks), utility.advance)


def test_a_snapshot_grows_elsewhere() -> None:
    memory = pools()
    cache = PagedNaiveCache(SequenceBlocks(memory, [3, 1]))
    rows = torch.arange(2 * 2 * 16.0).reshape(2, 2, 16)
    longer = cache.after(2)
    assert isinstance(longer, PagedNaiveCache)
    for layer in range(3):
        longer.merge(layer, None, rows, -rows)
    snapshot = longer.snapshot()
    other = snapshot.after(3)
    assert not isinstance(other, PagedNaiveCache)
    assert longer.table.claimed == 2
    kept = snapshot.key_cache[1]
    assert kept is not None
    assert torch.equal(kept, rows)
    assert torch.equal(memory.keys[0][3, :2], rows)


def test_rows_of_another_form_are_an_error() -> None:
    cache = PagedNaiveCache(SequenceBlocks(pools(), [0])).after(1)
    with pytest.raises(SchemaError, match="new rows are"):
        cache.merge(0, None, torch.zeros(1, 2, 16).bfloat16(), torch.zeros(1, 2, 16).bfloat16())
    with pytest.raises(TypeError):
        cache.key_cache[0] = torch.zeros(1, 2, 16)


def test_pools_sleep() -> None:
    memory = pools()
    memory.sleep()
    with pytest.raises(EngineAsleepError, match="kv_cache"):
        memory.keys  # noqa: B018
    memory.wake_up()
    assert len(memory.keys) == 3


def test_blocks_are_taken_and_freed_once() -> None:
    manager = BlockManager(4, 16)
    taken = manager.allocate(3)
    assert not manager.can_allocate(2)
    with pytest.raises(CapacityError):
        manager.allocate(2)
    manager.free(taken)
    with pytest.raises(ValueError, match="free already"):
        manager.free(taken[:1])
    with pytest.raises(ValueError, match="twice"):
        manager.free(manager.allocate(1) * 2)
