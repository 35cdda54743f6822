"""Prompts of an AR stage: several in one pass, long ones in chunks, equal beginnings once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_kvlink.engine import AREngine, ModelUtility, OmniARConfig, RequestAborted
from omni_kvlink.engine.models.bagel import BagelUtility
from support.engine.ar_stage import (
    TOLERANCE,
    Passes,
    SentKV,
    ar_engine,
    difference,
    kv_of,
    prompt,
    read_alone,
)
from support.engine.fixtures import WAIT, checkpoint, pipeline

IMAGE = torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8)
LONG = "the sea and the other thing in the rain " * 4
PROMPTS: tuple[Any, ...] = ("a fox", LONG, ["two owls", "in the snow"], [IMAGE, "make it night"])


def run(engine: AREngine, texts: Any, round_: str = "", **fields: Any) -> list[str]:
    """Submit prompts together, wait for them, and return their ids."""
    names = [f"{round_}{i}" for i in range(len(texts))]
    batch = [prompt(name, text, **fields) for name, text in zip(names, texts, strict=True)]
    for output in engine.generate(batch, timeout=WAIT):
        assert output.error is None, output.error
        engine.fail_kv(output.request_id, "not needed")
    return names


def test_several_prompts_are_read_in_one_pass(sockets: str) -> None:
    """K and V of each are those of the prompt alone, but for rounding."""
    with ar_engine(sockets, think=False) as engine:
        sent, passes = SentKV(engine), Passes(engine)
        names = run(engine, PROMPTS, seed=5)
        assert max(passes.sizes) >= 3
        for name, text in zip(names, PROMPTS, strict=True):
            assert difference(sent.of[name], kv_of(read_alone(text, seed=5))) < TOLERANCE


@pytest.mark.parametrize("budget", [4, 13, 64])
def test_a_prompt_in_chunks_is_the_whole_prompt(sockets: str, budget: int) -> None:
    """Texts are divided, images are not."""
    with ar_engine(sockets, think=False, max_num_batched_tokens=budget) as engine:
        sent, passes = SentKV(engine), Passes(engine)
        names = run(engine, PROMPTS, seed=5)
        assert max(map(sum, passes.tokens)) == budget
        for name, text in zip(names, PROMPTS, strict=True):
            assert difference(sent.of[name], kv_of(read_alone(text, seed=5))) < TOLERANCE


def test_a_long_prompt_does_not_hold_up_a_text(sockets: str) -> None:
    """Between two chunks of it, each text that is written gets a token."""
    with ar_engine(sockets, max_num_batched_tokens=8) as engine:
        later = list[Any]()

        def submit(number: int) -> None:
            if not later and passes.tokens[-1] == [1]:  # the first text is being written
                later.append(engine.submit(prompt("long", LONG, max_tokens=1)))

        passes = Passes(engine, submit)
        writer = engine.submit(prompt("writer", max_tokens=60))
        assert writer.result(WAIT).error is None
        assert later[0].result(WAIT).error is None
        for name in ("writer", "long"):
            engine.fail_kv(name, "not needed")
    start = passes.tokens.index([1, 7])
    assert passes.tokens[start : start + 12] == [[1, 7]] * 12


def test_without_chunks_a_long_text_is_read_at_once(sockets: str) -> None:
    how: dict[str, Any] = {
        "max_num_batched_tokens": 8,
        "enable_chunked_prefill": False,
        "think": False,
    }
    with ar_engine(sockets, **how) as engine:
        sent, passes = SentKV(engine), Passes(engine)
        (name,) = run(engine, [LONG])
        expected = kv_of(read_alone(LONG))
        assert passes.tokens == [[len(expected["gen"][0])]]
        assert difference(sent.of[name], expected) == 0


def test_an_abort_between_two_chunks(sockets: str) -> None:
    with ar_engine(sockets, think=False, max_num_batched_tokens=8) as engine:

        def abort(number: int) -> None:
            if number == 3:
                engine.abort("long")

        passes = Passes(engine, abort)
        assert isinstance(engine.submit(prompt("long", LONG)).result(WAIT).error, RequestAborted)
        assert len(passes.tokens) == 3
        assert engine.stats()["free_blocks"] == 4096


def test_a_failed_pass_is_the_error_of_those_in_it(sockets: str) -> None:
    """A prompt that had no tokens in it goes on."""
    with ar_engine(sockets, think=False, max_num_batched_tokens=8) as engine:

        def fail(number: int) -> None:
            if number == 2:
                raise MemoryError("no memory")

        Passes(engine, fail)
        batch = [prompt("long", LONG), prompt("late", "a fox")]
        first, second = engine.generate(batch, timeout=WAIT)
        assert "no memory" in str(first.error)
        assert second.error is None
        engine.fail_kv("late", "not needed")


def test_a_budget_has_a_token_for_each_request() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 3 for max_num_seqs 4"):
        OmniARConfig("nowhere", max_num_seqs=4, max_num_batched_tokens=3)


# ---- prefix cache


def cached(engine: AREngine) -> dict[str, int]:
    found: dict[str, int] = engine.stats()["prefix_cache"]
    return found


@pytest.mark.parametrize("think", [False, True])
def test_a_cached_beginning_is_not_computed_again(sockets: str, think: bool) -> None:
    how = {"max_think_tokens": 4} if think else {}
    with ar_engine(sockets, think=think, enable_prefix_caching=True, block_size=4) as engine:
        sent, passes, found = SentKV(engine), Passes(engine), list[tuple[int, int]]()
        for round_ in "ab":
            for i, text in enumerate(PROMPTS):
                (name,) = run(engine, [text], f"{round_}{i}", seed=i)
                expected = kv_of(read_alone(text, think=think, seed=i, **how))
                assert difference(sent.of[name], expected) < TOLERANCE
            found.append((sum(map(sum, passes.tokens)), cached(engine)["hits"]))
        (computed, hits), (all_computed, all_hits) = found
        assert hits == (84 + 84 + 80 if think else 0)  # of 84 tokens, but for a last one
        assert all_hits - hits > hits + 100
        assert all_computed + all_hits == 2 * (computed + hits)
        assert cached(engine)["requests"] == 8
        assert engine.stats()["free_blocks"] == 4096


def test_an_image_ends_the_prefix(sockets: str) -> None:
    """Another seed gives another latent: only the text before the image is shared."""
    texts: Any = [["a photo of the thing", IMAGE, "make it night"]] * 2
    with ar_engine(sockets, think=False, enable_prefix_caching=True, block_size=4) as engine:
        sent = SentKV(engine)
        for seed, text in enumerate(texts):
            (name,) = run(engine, [text], str(seed), seed=seed)
            assert difference(sent.of[name], kv_of(read_alone(text, seed=seed))) < TOLERANCE
        queries, hits = cached(engine)["queries"], cached(engine)["hits"]
        tokens = len(pipeline().encode_prompt(texts[0][0]))
        assert (queries, hits) == (2 * tokens, (tokens - 1) // 4 * 4)


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_what_a_running_request_has_computed_is_shared(sockets: str, backend: str) -> None:
    """The others come while the first one writes."""
    with ar_engine(sockets, backend, enable_prefix_caching=True) as engine:
        first = engine.submit(prompt("a", "a boat on a lake", max_tokens=2000))  # a long text
        run(engine, ["two owls"], "b")  # by then "a" has read its prompt
        hits = cached(engine)["hits"]
        run(engine, ["the sea"], "c")
        assert not first.done()
        assert cached(engine)["hits"] == hits + 80  # of the 84 tokens of think mode's prompt
        engine.abort("a")
        assert isinstance(first.result(WAIT).error, RequestAborted)
        assert engine.stats()["free_blocks"] == 4096


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_empties_the_cache(sockets: str, level: int) -> None:
    """The pools are uninitialized after it, and the weights may be others."""
    with ar_engine(sockets, think=False, enable_prefix_caching=True) as engine:
        sent = SentKV(engine)
        run(engine, [LONG], "a")
        assert cached(engine)["blocks"] > 4
        assert engine.sleep(level, timeout=WAIT)
        assert engine.executor.sleeping_tags == {"weights", "kv_cache"}
        assert engine.wake_up(["weights"], timeout=WAIT)
        assert engine.executor.sleeping_tags == {"kv_cache"}
        engine.wake_up(timeout=WAIT)
        assert not engine.executor.is_sleeping
        assert cached(engine)["blocks"] == 0
        (name,) = run(engine, [LONG], "b")
        assert cached(engine)["hits"] == 0
        assert difference(sent.of[name], kv_of(read_alone(LONG))) < TOLERANCE
        engine.reset_prefix_cache(timeout=WAIT)
        assert cached(engine)["blocks"] == 0


def test_an_abort_leaves_blocks_that_another_request_reads(sockets: str) -> None:
    with ar_engine(sockets, enable_prefix_caching=True, max_num_batched_tokens=16) as engine:
        sent = SentKV(engine)
        run(engine, ["the sea"], "warm")

        def abort(number: int) -> None:
            if number == 3:
                engine.abort("gone")

        Passes(engine, abort)
        batch = [prompt("gone", LONG, max_tokens=30), prompt("stays", LONG, max_tokens=4)]
        gone, stays = engine.generate(batch, timeout=WAIT)
        assert isinstance(gone.error, RequestAborted)
        assert stays.error is None
        expected = kv_of(read_alone(LONG, think=True, max_think_tokens=4))
        assert difference(sent.of["stays"], expected) < TOLERANCE
        assert engine.stats()["free_blocks"] == 4096
        engine.fail_kv("stays", "not needed")


def test_blocks_of_other_tokens_are_an_error(sockets: str) -> None:
    """A model whose prefix_tokens are not what it reads must not get another text's KV."""
    with ar_engine(sockets, think=False, enable_prefix_caching=True) as engine:
        utility = engine.executor.worker.runner.utility  # type: ignore[attr-defined]
        utility.prefix_tokens = lambda _: [7] * 40
        run(engine, [LONG], "a")
        second = engine.submit(prompt("b", LONG)).result(WAIT)
        assert "their blocks have K and V of [7, 7" in str(second.error)


class Nameless(BagelUtility):
    """A model that does not say what its prompts begin with."""

    prefix_tokens = ModelUtility.prefix_tokens


def test_a_model_without_prefix_tokens_is_refused() -> None:
    name = f"{__name__}:Nameless"
    config = OmniARConfig(checkpoint(), name, dtype="float32", enable_prefix_caching=True)
    with pytest.raises(ValueError, match=r"Nameless has no prefix_tokens; leave it off"):
        AREngine(config)


def test_the_cache_is_off_by_default(sockets: str) -> None:
    with ar_engine(sockets, think=False) as engine:
        run(engine, [LONG, LONG], "a")
        assert "prefix_cache" not in engine.stats()
        assert engine.scheduler.blocks.num_cached == 0  # type: ignore[attr-defined]


def test_ranks_share_the_same_blocks(sockets: str) -> None:
    """With two tensor ranks the scheduler decides for both; each has K and V of its heads."""
    with ar_engine(sockets, "mp", ranks=2, enable_prefix_caching=True, num_threads=1) as engine:
        for name in "ab":
            output = engine.submit(prompt(name, LONG, max_tokens=20)).result(WAIT)
            assert output.error is None
            assert output.text == read_alone(LONG, think=True, max_think_tokens=20).text
            engine.fail_kv(name, "not needed")
        found = cached(engine)
        assert found["hits"] == (found["queries"] // 2 - 1) // 16 * 16
