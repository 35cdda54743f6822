"""A cache that grows in place: the same bytes, no row moved, no other rows written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import BagelContext, BagelPipeline, InPlaceCache, NaiveCache

from .conftest import SHAPE
from .test_contexts import raw, tensors

# Reaches into _memory: contexts are views of it; that nothing behind them is written is seen in the
# memory itself.

Seeded = Callable[[int], torch.Generator]
CAPACITY = 400


def capacity(pipeline: BagelPipeline, capacity: int = CAPACITY) -> InPlaceCache:
    """Its memory is full of NaNs: a row read before it was written would be seen."""
    shape = (capacity, pipeline.config.llm.num_key_value_heads, pipeline.config.llm.head_dim)
    keys, values = (
        [torch.full(shape, torch.nan, dtype=pipeline.dtype) for _ in range(pipeline.num_layers)]
        for _ in "KV"
    )
    return InPlaceCache(keys, values)


def start(cache: NaiveCache) -> BagelContext:
    return BagelContext([0], [0], cache)


def lies_in(context: BagelContext, cache: InPlaceCache) -> bool:
    """Whether every K and V is a view of the cache's memory from its first row on."""
    layers = [pair for part in zip(*cache._memory.layers, strict=True) for pair in part]
    return len(tensors(context)) == len(layers) and all(
        mine.data_ptr() == theirs.data_ptr()
        for mine, theirs in zip(tensors(context), layers, strict=True)
    )


@pytest.mark.parametrize("kind", ["text", "texts", "think", "edit", "interleaved"])
def test_a_prefill_in_place_has_the_same_bytes(
    pipeline: BagelPipeline, photo: Tensor, seeded: Seeded, kind: str
) -> None:
    inputs: dict[str, Any] = {
        "text": "a fox",
        "texts": ["a fox", "in the snow"],
        "think": "a fox",
        "edit": [photo, "make it night"],
        "interleaved": ["like this:", photo, "but blue", "or green"],
    }
    how: dict[str, Any] = {"think": True, "max_think_tokens": 6} if kind == "think" else {}
    expected = pipeline.prefill(inputs[kind], image_shape=SHAPE, generator=seeded(1), **how)
    gen, cfg_img = capacity(pipeline), capacity(pipeline)
    got = pipeline.prefill(
        inputs[kind],
        image_shape=SHAPE,
        generator=seeded(1),
        caches={"gen": gen, "cfg_img": cfg_img},
        **how,
    )
    for name in ("gen", "cfg_text", "cfg_img"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine.kv_lens, mine.ropes) == (theirs.kv_lens, theirs.ropes)
        assert raw(mine) == raw(theirs)
    assert lies_in(got.gen, gen)
    assert lies_in(got.cfg_img, cfg_img if kind in ("edit", "interleaved") else gen)
    assert got.cfg_text.kv_lens == [0] or lies_in(got.cfg_text, gen)
    assert got.text == expected.text


def test_only_new_rows_are_written(exact: BagelPipeline) -> None:
    cache = capacity(exact)
    one = exact.append_text(start(cache), [1, 2, 3])
    for keys, values in cache._memory.layers:
        keys[3:], values[3:] = 7, 7
    before = raw(one)
    two = exact.append_text(one, [4, 5])
    assert raw(one) == before
    assert lies_in(two, cache)
    assert tensors(two)[0].shape[0] == 5
    for keys, values in cache._memory.layers:
        assert bool((keys[5:] == 7).all())
        assert bool((values[5:] == 7).all())


def test_a_second_continuation_gets_new_memory(exact: BagelPipeline) -> None:
    """Two texts after the same context, and a third after an older one."""
    cache, plain = capacity(exact), exact.empty_context()
    trunk = exact.append_text(start(cache), [1, 2, 3])
    first = exact.append_text(trunk, [4, 5])
    before = raw(first)
    second, third = exact.append_text(trunk, [6, 7, 8]), exact.append_text(start(cache), [9])
    assert raw(first) == before
    assert lies_in(first, cache)
    assert not lies_in(second, cache)
    trunk = exact.append_text(plain, [1, 2, 3])
    assert raw(second) == raw(exact.append_text(trunk, [6, 7, 8]))
    assert raw(third) == raw(exact.append_text(plain, [9]))
    last = exact.append_text(first, [6])
    assert lies_in(last, cache)
    assert raw(last) == raw(exact.append_text(exact.append_text(trunk, [4, 5]), [6]))


def test_a_snapshot_is_continued_in_new_memory_and_not_changed(exact: BagelPipeline) -> None:
    cache = capacity(exact)
    context = exact.append_text(start(cache), [1, 2, 3])
    copy, before = context.snapshot(), raw(context)
    branch = exact.append_text(copy, [9, 9])
    assert not lies_in(branch, cache)
    text = exact.generate_text(context, max_length=5)
    assert text == exact.generate_text(branch_of(exact, [1, 2, 3]), max_length=5)
    longer = exact.append_text(context, [4, 5])
    assert lies_in(longer, cache), "what was thrown away has claimed rows"
    assert raw(copy) == raw(context) == before


def branch_of(pipeline: BagelPipeline, ids: list[int]) -> BagelContext:
    return pipeline.append_text(pipeline.empty_context(), ids)


def test_denoising_claims_nothing(exact: BagelPipeline) -> None:
    cache = capacity(exact)
    context = exact.append_text(start(cache), [1, 2, 3])
    before = raw(context)
    with torch.no_grad():
        exact.model.velocity(context, exact.model.embed([1, 2, 3, 4]))
    assert lies_in(exact.append_text(context, [4]), cache)
    assert raw(context) == before


def test_a_layer_that_was_replaced_is_respected(exact: BagelPipeline) -> None:
    """Callers may write to the dicts, as `snapshot` and the adapter do."""
    contexts = [exact.append_text(start(made), [1, 2]) for made in (capacity(exact), NaiveCache(3))]
    for context in contexts:
        values = context.past_key_values.value_cache
        values[1] = -values[1]  # type: ignore[index, operator]
    in_place, plain = (exact.append_text(context, [3]) for context in contexts)
    assert raw(in_place) == raw(plain)


def test_over_capacity_is_refused_before_a_row_is_written(exact: BagelPipeline) -> None:
    cache = capacity(exact, capacity=5)
    context = exact.append_text(start(cache), [1, 2, 3])
    whole = [t.clone() for pair in cache._memory.layers for t in pair]
    with pytest.raises(SchemaError, match="capacity of 5 tokens, wanted 6"):
        exact.append_text(context, [4, 5, 6])
    for now, then in zip((t for pair in cache._memory.layers for t in pair), whole, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))
    full = exact.append_text(context, [4, 5])
    assert lies_in(full, cache)
    assert raw(full) == raw(exact.append_text(branch_of(exact, [1, 2, 3]), [4, 5]))


def test_a_failed_extension_is_repeated_in_new_memory(
    exact: BagelPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = capacity(exact)
    context = exact.append_text(start(cache), [1, 2])
    before = raw(context)
    last = exact.model.language_model.model.layers[2]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            exact.append_text(context, [3])
    assert raw(context) == before
    again = exact.append_text(context, [4])
    assert raw(again) == raw(exact.append_text(branch_of(exact, [1, 2]), [4]))
    assert not lies_in(again, cache)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([], [], "made of"),
        ([torch.empty(4, 32)], [torch.empty(4, 32)], "made of"),
        ([torch.empty(4, 2, 16)], [], "K has 1 layers, V 0"),
        ([torch.empty(4, 2, 16)], [torch.empty(5, 2, 16)], "V of layer 0"),
        ([torch.empty(4, 2, 16)], [torch.empty(2, 4, 16).transpose(0, 1)], "contiguous"),
        ([torch.empty(1, 2, 16).expand(4, 2, 16)], [torch.empty(4, 2, 16)], "contiguous"),
    ],
)
def test_tensors_that_make_no_cache(keys: list[Tensor], values: list[Tensor], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        InPlaceCache(keys, values)


def test_rows_of_another_dtype_are_refused(exact: BagelPipeline, short: BagelPipeline) -> None:
    with pytest.raises(SchemaError, match=r"layer 0: new rows are torch.float32 \[2, 2, 16\]"):
        exact.append_text(start(capacity(short)), [1, 2])


def test_given_caches_must_be_empty_and_known(exact: BagelPipeline) -> None:
    used = exact.append_text(start(capacity(exact)), [1, 2]).past_key_values
    assert isinstance(used, InPlaceCache)
    with pytest.raises(SchemaError, match="gen: K of layer 0 has shape"):
        exact.prefill("a fox", caches={"gen": used})
    with pytest.raises(SchemaError, match="not for cfg_text"):
        exact.prefill("a fox", caches={"cfg_text": capacity(exact)})
