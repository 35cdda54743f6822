"""Which blocks of equal leading tokens requests share, and when these are free."""

from __future__ import annotations

import pytest

from omni_kvlink.engine import (
    ModelRunnerOutput,
    OmniARConfig,
    OmniARScheduler,
    OmniDiffusionRequest,
)
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.block_manager import BlockManager
from omni_kvlink.engine.outputs import ARSchedulerOutput, DiffusionOutput
from omni_kvlink.engine.sched.prefix_cache import Prefix
from support.engine.fixtures import params

SIZE = 4


class Stage:
    """A scheduler of prompts of letters, each a token, and what it is told of its requests."""

    def __init__(self, blocks: int = 16, seqs: int = 4):
        self.computed: dict[str, int] = {}
        self.calls = 0

        def count_computed() -> dict[str, int]:
            self.calls += 1
            return self.computed

        config = OmniARConfig(
            "nowhere",
            num_blocks=blocks,
            block_size=SIZE,
            max_num_seqs=seqs,
            enable_prefix_caching=True,
        )
        self.scheduler = OmniARScheduler(
            config,
            lambda one: {"gen": len(str(one.prompt)), "cfg_img": 1},
            prefix_tokens=lambda one: [ord(each) for each in str(one.prompt).rstrip("?")],
            count_computed=count_computed,
        )
        self.free = self.scheduler.blocks

    def add(self, name: str, prompt: str) -> None:
        self.scheduler.add_request(OmniDiffusionRequest(prompt, params(), name))

    def begin(self, *prompts: str) -> ARSchedulerOutput:
        """Schedule requests that are named by their prompts."""
        for prompt in prompts:
            self.add(prompt, prompt)
        output = self.scheduler.schedule()
        assert isinstance(output, ARSchedulerOutput)
        return output

    def end(self, *names: str, error: Exception | None = None) -> None:
        results = {name: DiffusionOutput(name, error=error) for name in names}
        output = ModelRunnerOutput(list(names), [None] * len(names), results)
        self.scheduler.update_from_output(self.scheduler.schedule(start=False), output)

    @property
    def stats(self) -> dict[str, int]:
        found: dict[str, int] = self.scheduler.stats()["prefix_cache"]
        return found


def test_whole_blocks_of_equal_leading_tokens_are_shared() -> None:
    stage = Stage()
    first = stage.begin("abcdefghij").block_ids["abcdefghij"]
    stage.end("abcdefghij")
    second = stage.begin("abcdefghxyz")
    table = second.block_ids["abcdefghxyz"]
    assert table["gen"][:2] == first["gen"][:2]
    assert not set(table["gen"][2:] + table["cfg_img"]) & set(first["gen"][:2])
    assert second.num_computed_tokens == {"abcdefghxyz": 8}
    assert stage.begin("Xbcdefghij").num_computed_tokens == {}  # every block depends on the first
    found = stage.stats
    assert (found["requests"], found["queries"], found["hits"]) == (3, 31, 8)


def test_the_last_token_is_always_computed() -> None:
    stage = Stage()
    stage.begin("abcdefgh")
    stage.end("abcdefgh")
    stage.add("again", "abcdefgh")
    assert stage.begin().num_computed_tokens == {"again": 4}
    assert stage.begin("abcdefghi").num_computed_tokens == {"abcdefghi": 8}


def test_what_depends_on_more_than_the_prefix_is_not_shared() -> None:
    stage = Stage()
    stage.begin("abcdef??????")
    stage.end("abcdef??????")
    assert stage.stats["blocks"] == 1
    stage.add("again", "abcdef??????")
    assert stage.begin().num_computed_tokens == {"again": 4}


def test_blocks_that_are_not_computed_yet_are_not_shared() -> None:
    """A request that runs shares what it has computed, and no more."""
    stage = Stage()
    first = stage.begin("abcdefghijkl").block_ids["abcdefghijkl"]["gen"]
    assert stage.begin("abcdefghi").num_computed_tokens == {}
    stage.computed = {"abcdefghijkl": 7, "unknown": 99}
    table = stage.begin("abcdefghx")
    assert table.num_computed_tokens == {"abcdefghx": 4}
    assert table.block_ids["abcdefghx"]["gen"][0] == first[0]
    calls = stage.calls
    assert stage.begin("zzzzzzzzz").num_computed_tokens == {}
    assert stage.calls == calls == 2  # only if a block is being computed


def test_an_executor_that_does_not_answer_is_the_requests_error() -> None:
    stage = Stage()
    stage.begin("abcdefghi")

    def gone() -> dict[str, int]:
        raise EngineError("no answer")

    # The executor stops answering between two requests; the scheduler has it from the start.
    stage.scheduler._prefixes._count_computed = gone  # type: ignore[union-attr]
    assert stage.begin("abcdefghx").request_ids == ["abcdefghi"]
    (ended,) = stage.scheduler.take_ended()
    assert (ended.request_id, str(ended.error)) == ("abcdefghx", "no answer")
    stage.end("abcdefghi")
    assert stage.free.num_free == 16


def test_an_error_frees_no_block_that_another_uses() -> None:
    stage = Stage()
    stage.begin("abcdefghi")
    stage.end("abcdefghi")
    shared = stage.begin("abcdefghx").block_ids["abcdefghx"]["gen"][:2]
    stage.begin("abcdefghy")
    stage.end("abcdefghx", error=EngineError("it failed"))
    used = set(shared)
    assert stage.free.num_free == 16 - 4  # "abcdefghy" has 2 shared ones, 1 and 1
    taken = set(stage.free.allocate(12))
    assert not taken & used
    stage.free.free(sorted(taken))
    stage.end("abcdefghy")
    assert stage.free.num_free == 16


def test_an_abort_of_the_request_that_computed_them_leaves_the_blocks() -> None:
    stage = Stage()
    first = stage.begin("abcdefghijkl").block_ids["abcdefghijkl"]["gen"]
    stage.computed = {"abcdefghijkl": 8}
    stage.begin("abcdefghx")
    assert stage.scheduler.abort_request("abcdefghijkl")
    stage.end("abcdefghijkl", error=EngineError("aborted"))
    assert not set(first[:2]) & set(stage.free.allocate(stage.free.num_free))


def test_what_a_failed_request_did_not_compute_is_not_found() -> None:
    stage = Stage()
    stage.begin("abcdefghi")
    stage.end("abcdefghi", error=EngineError("it failed"))
    stage.add("again", "abcdefghi")
    assert stage.begin().num_computed_tokens == {}
    assert stage.calls == 0


def test_the_least_recently_used_blocks_are_evicted() -> None:
    stage = Stage(blocks=8)
    for prompt in ("abcdefgh", "ijklmnop", "abcdefgh!"):  # 3, 3, and 2 + 1 + 1 blocks
        stage.begin(prompt)
        stage.end(prompt)
    assert stage.stats["evicted"] == 0
    stage.begin("x" * 15)  # 4 + 1 blocks: 4 free ones have no hash
    stage.end("x" * 15)
    assert stage.stats["evicted"] == 1
    assert stage.begin("abcdefghz").num_computed_tokens == {"abcdefghz": 8}
    stage.end("abcdefghz", error=EngineError("it failed"))
    assert stage.begin("ijklmnopq").num_computed_tokens == {"ijklmnopq": 4}  # not its end


def test_a_prefix_takes_no_block_twice_while_it_waits() -> None:
    """What is found is free again if the rest does not fit, and its request comes next."""
    stage = Stage(blocks=8)
    stage.begin("abcdefgh")
    stage.end("abcdefgh")
    stage.begin("x" * 16)  # 4 + 1 of 8
    assert stage.begin("abcdefghijklmno").request_ids == ["x" * 16]
    assert stage.free.num_free == 3
    stage.end("x" * 16)
    assert stage.begin().num_computed_tokens == {"abcdefghijklmno": 8}


def test_reset_forgets_all_and_only_while_nothing_runs() -> None:
    stage = Stage()
    stage.begin("abcdefghi")
    with pytest.raises(EngineError, match="abcdefghi run: reset the prefix cache later"):
        stage.scheduler.reset_prefix_cache()
    stage.end("abcdefghi")
    assert stage.stats["blocks"] == 2
    stage.scheduler.reset_prefix_cache()
    assert (stage.stats["blocks"], stage.free.num_free) == (0, 16)
    stage.add("again", "abcdefghi")
    assert stage.begin().num_computed_tokens == {}


def test_a_scheduler_needs_the_tokens_of_prefixes() -> None:
    config = OmniARConfig("nowhere", enable_prefix_caching=True)
    with pytest.raises(ValueError, match="needs prefix_tokens"):
        OmniARScheduler(config, lambda _: {"gen": 1})


def test_hashes_are_of_whole_blocks_and_all_before() -> None:
    one, other = Prefix.of([1, 2, 3, 4, 5], 2), Prefix.of([9, 2, 3, 4, 5], 2)
    assert (one.num_tokens, len(one.hashes)) == (5, 2)
    assert not set(one.hashes) & set(other.hashes)
    assert Prefix.of([1, 2, 3], 2).hashes == one.hashes[:1]
    assert Prefix.of([-1, 2**40], 2).hashes  # any integer of 64 bits


def test_block_hashes_of_a_manager() -> None:
    manager = BlockManager(3, SIZE)
    with pytest.raises(ValueError, match="block 0 is free"):
        manager.cache(0, b"0")
    first, second, _ = manager.allocate(3)
    manager.cache(first, b"a")
    manager.cache(second, b"a")  # the same tokens twice: the first block is found
    assert manager.find([b"a", b"?", b"a"]) == [first]
    manager.share([first])
    manager.free([first, second])
    assert (manager.num_free, manager.num_cached) == (1, 1)
    manager.free([first])
    with pytest.raises(ValueError, match="free already"):
        manager.free([first])
    assert manager.allocate(1) == [second]  # blocks without a hash are used first
    assert manager.find([b"a"]) == [first]
    assert manager.allocate(1) == [first]
    assert (manager.find([b"a"]), manager.num_evicted) == ([], 1)
