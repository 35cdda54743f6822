"""The worker's half alone: real links and threads, pools of this test instead of an engine's."""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from omni_kvlink import KVCacheBundle, KVLink, SchemaError, UnavailableError
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.integrations.vllm import OmniKVLinkConnector, declining
from omni_kvlink.integrations.vllm.groups import CacheGroup, CacheGroups
from omni_kvlink.integrations.vllm.loading import Loader
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.pools import (
    BlockFormat,
    GroupFormat,
    Pools,
    byte_pools,
    layer_places,
)
from omni_kvlink.integrations.vllm.saving import Saver
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.stats import COUNTS, KVLinkStats, Meter
from omni_kvlink.integrations.vllm.step import CancelledLoad, Load, PromptCache, StepMetadata
from omni_kvlink.testing.rig import until, until_requested
from support.vllm.halves import declined_reads, link_of, pools_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

# Reaches into _loading: a layer of one load is waited for, or all of it, before vLLM's next step
# asks.

BLOCKS, BLOCK, HEADS, ROW = 12, 4, 2, 6
LAYERS = ["a", "b", "c"]
TOKENS = 2 * BLOCK + 1


def engine_pools(*, filled: bool) -> dict[str, torch.Tensor]:
    """Pools of vLLM's CPU backend: `[blocks, heads, tokens, K and V]`, one after the other."""
    shape = (BLOCKS, HEADS, BLOCK, ROW)
    make = torch.randn if filled else torch.zeros
    return {name: make(shape, dtype=torch.float32) for name in LAYERS}


def as_pools(caches: dict[str, torch.Tensor]) -> Pools:
    pools = [byte_pools(caches, num_blocks=BLOCKS, block_size=BLOCK)]
    nbytes = HEADS * BLOCK * ROW * 4
    kind = "FullAttentionSpec"
    group = GroupFormat(kind, "float32", BLOCK, HEADS, ROW // 2, nbytes, LAYERS)
    groups = CacheGroups((CacheGroup(kind, 0, BLOCK, tuple(LAYERS)),), 1)
    format = BlockFormat("1", "m", "L", "vec", [group])
    return Pools(format, groups, pools, layer_places(pools, LAYERS))


class Halves:
    """A producer's and a consumer's worker half, and the engines' pools."""

    def __init__(self, directory: str):
        torch.manual_seed(0)
        self.theirs, self.mine = engine_pools(filled=True), engine_pools(filled=False)
        self.sent, self.got = Meter(), Meter()
        link = KVLink.serve("shm://halves", directory=directory)
        self.saver = Saver(link, [as_pools(self.theirs)], VllmSettings(), self.sent)
        self.peers = Peers(["shm://halves"], {"directory": directory})
        self.loader = Loader([as_pools(self.mine)], self.peers, self.got, timeout=5.0)

    def send(self, cache: PromptCache) -> None:
        """A forward pass that computes this cache."""
        self.saver.begin([cache])
        for number in range(len(LAYERS)):
            self.saver.layer(number)
        self.saver.commit()

    def settled(self) -> set[str]:
        """The requests that the loader says have ended, when any has."""
        deadline = time.monotonic() + 10
        while not (ended := self.loader.finished()):
            assert time.monotonic() < deadline
        return ended

    def is_same(self, layer: str, theirs: list[int], mine: list[int]) -> bool:
        return torch.equal(self.theirs[layer][theirs], self.mine[layer][mine])

    def close(self) -> None:
        self.loader.close()
        self.saver.close()


@pytest.fixture
def halves(sockets: str, leaves_nothing: None) -> Iterator[Halves]:
    halves = Halves(sockets)
    yield halves
    halves.close()


INPUTS = {"tokens": "digest"}
CACHE = PromptCache("r", "key", INPUTS, TOKENS, [[5, 2, 7]], 1)


def load(blocks: list[int], **changed: Any) -> Load:
    return Load(**{**vars(CACHE), "blocks": [blocks], **changed})


@pytest.mark.parametrize("is_async", [True, False])
def test_a_layer_is_there_before_the_next_is_computed(halves: Halves, is_async: bool) -> None:
    halves.saver.begin([CACHE])
    halves.loader.start([load([1, 3, 8], is_async=is_async)])
    for number, layer in enumerate(LAYERS):
        halves.saver.layer(number)
        halves.loader._loading["r"].parts[0].wait_for_layer(number)
        assert halves.is_same(layer, [5, 2], [1, 3])
        assert halves.is_same(layer, [7], [8]) == is_async, "the part of a block that is computed"
        assert not any(self.any() for self in list(halves.mine.values())[number + 1 :])
    assert not halves.loader._loading["r"].is_done, "it is not committed"
    halves.saver.commit()
    if is_async:
        assert halves.settled() == {"r"}
    else:
        assert halves.loader.finished() == set()
    assert halves.loader.take_invalid_blocks() == set()
    untouched = [block for block in range(BLOCKS) if block not in (1, 3, 8)]
    assert not any(cache[untouched].any() for cache in halves.mine.values())


BLOCKS_OF_PYTHON = ("with ", "try:", "finally:", "pass", "def ", "@")
"""Beginnings of lines that are traced, too, where Python itself looks for no signal."""


def interrupted(number: int, call: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt at the n-th line that a call runs; False if it runs fewer."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(BLOCKS_OF_PYTHON) and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


def test_a_wait_that_is_interrupted_at_any_line(halves: Halves) -> None:
    """It ends with the interrupt; the load goes on, and can be waited for again."""
    for number in itertools.count():
        name = f"r{number}"
        named: dict[str, Any] = {"request_id": name, "key": name}
        halves.loader.start([load([1, 3, 8], is_async=False, **named)])
        (part,) = halves.loader._loading[name].parts
        cache = dataclasses.replace(CACHE, **named)
        sending = threading.Timer(0.02, halves.send, [cache])
        sending.start()
        was_interrupted = interrupted(number, partial(part.wait_for_layer, 0))
        sending.join()
        halves.loader.wait_for_layer(len(LAYERS) - 1)
        assert halves.loader.wait_for_pass() == set()
        assert halves.is_same(LAYERS[0], [5, 2], [1, 3])
        if not was_interrupted:
            break
    assert number > 10


def test_the_engine_computes_while_a_layer_is_copied(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call of a forward pass waits for a copy: each returns while the first one is held up."""
    may_copy = threading.Event()
    monkeypatch.setattr(fault_points, "point", lambda name: may_copy.wait())
    halves.saver.begin([CACHE])
    for number in range(len(LAYERS)):
        halves.saver.layer(number)
    may_copy.set()
    halves.saver.commit()
    taken = halves.sent.take()
    assert taken is not None
    assert len(taken.data["save_bytes"]) == 1


def test_blocks_that_are_here_are_not_written(halves: Halves) -> None:
    halves.send(CACHE)
    halves.loader.start([load([1, 3, 8], local=BLOCK)])
    assert halves.settled() == {"r"}
    for layer in LAYERS:
        assert halves.is_same(layer, [2, 7], [3, 8])
        assert not halves.mine[layer][1].any()


def test_a_save_that_fails_is_known_at_once(halves: Halves) -> None:
    """A block that the pool does not have: nobody waits, the next cache goes out."""
    halves.loader.start([load([1, 3, 8])])
    halves.saver.begin([PromptCache("q", "key", INPUTS, TOKENS, [[5, 2, BLOCKS]], 1)])
    halves.saver.commit()
    assert halves.settled() == {"r"}
    assert halves.loader.take_invalid_blocks() == {1, 3, 8}
    halves.saver.hold({"q"})
    assert halves.saver.released() == {"q"}
    halves.send(CACHE)
    halves.loader.start([load([1, 3, 8])])
    assert halves.settled() == {"r"}
    assert halves.loader.take_invalid_blocks() == set()


def test_a_taken_key_is_the_first_ones(halves: Halves) -> None:
    """The second cache of one name fails, and does not take the first one with it."""
    for request in ("r", "again"):
        halves.send(PromptCache(request, "key", INPUTS, TOKENS, [[5, 2, 7]], 1))
    halves.loader.start([load([1, 3, 8])])
    assert halves.settled() == {"r"}
    assert halves.loader.take_invalid_blocks() == set()
    taken = halves.sent.take()
    assert taken is not None
    assert (taken.data["send_failed"], len(taken.data["save_bytes"])) == (1, 1)


def test_nobody_sends_it(halves: Halves) -> None:
    """The deadline holds; the blocks not yet there are reported, and not those that were."""
    halves.loader.timeout = 0.4
    began = time.monotonic()
    halves.loader.start(
        [load([1, 3, 8], local=BLOCK), load([4, 6, 9], request_id="s", is_async=False)]
    )
    halves.loader.wait_for_layer(2)
    assert time.monotonic() - began > 0.3
    ended = halves.settled()
    assert ended == {"r"}
    assert halves.loader.take_invalid_blocks() == {3, 8, 4, 6}
    taken = halves.got.take()
    assert taken is not None
    assert taken.data["load_failed"] == 2


def test_a_dropped_load_ends_at_once(halves: Halves) -> None:
    halves.loader.timeout = 1e6
    halves.loader.start([load([1, 3, 8])])
    halves.loader.cancel(cancelled("r", declines=True))
    assert halves.settled() == {"r"}
    assert halves.loader.take_invalid_blocks() == set()


def test_pools_are_the_engines_own_memory() -> None:
    caches = engine_pools(filled=True)
    layers = byte_pools({**caches, "shares": caches["a"]}, num_blocks=BLOCKS, block_size=BLOCK)
    assert list(layers) == LAYERS
    flat = layers["b"].view(torch.float32)
    assert torch.equal(flat.flatten(), caches["b"].flatten())
    layers["b"].zero_()
    assert not caches["b"].any()


def test_pools_that_are_not_known() -> None:
    cache = torch.zeros((BLOCKS, HEADS, BLOCK, ROW))
    sizes = {"num_blocks": BLOCKS, "block_size": BLOCK}
    with pytest.raises(SchemaError, match=r"layer x: a block with strides .* is not contiguous"):
        byte_pools({"x": cache[..., ::2]}, **sizes)
    with pytest.raises(SchemaError, match="of 11 blocks of 4 tokens has an unknown layout"):
        byte_pools({"x": cache}, **{**sizes, "num_blocks": 11})
    with pytest.raises(UnavailableError, match="layer x is on meta"):
        byte_pools({"x": cache.to("meta")}, **sizes)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"urls": []}, r"urls: no such setting; did you mean url\? There are url, peers"),
        ({"peers": "shm://p"}, "peers='shm://p': wanted a list"),
        ({"compatible_with": "0.30.0"}, "compatible_with='0.30.0': wanted a list"),
        (
            {"url": "shm://p", "peers": ["shm://p"], "peer_tp": "2"},
            "peer_tp='2': wanted a whole number",
        ),
        (
            {"url": "shm://p", "peers": ["shm://p"], "peer_tp": -1},
            "peer_tp=-1: wanted a whole number from 0",
        ),
        ({"peers": ["shm://p"]}, "url is missing"),
        ({"url": "shm://p"}, "peers is missing"),
        (
            {"url": "shm://p", "peers": ["shm://p"], "load": "soon"},
            "load='soon': wanted 'async' or",
        ),
        (
            {"url": "shm://p", "peers": ["shm://p"], "ttl": 0},
            "ttl=0: wanted a number of seconds above 0",
        ),
    ],
)
def test_a_wrong_setting(extra: dict[str, Any], word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        VllmSettings.of(extra, produces=True, consumes=True)


def test_stats_add_up() -> None:
    sent, loaded = Meter(), Meter()
    assert sent.take() is None
    sent.count("sent")
    loaded.count("sent")
    loaded.observe(load_seconds=0.5)
    first, second = sent.take(), loaded.take()
    assert first is not None
    assert second is not None
    total = KVLinkStats(first.aggregate(second).to_dict()).reduce()
    assert (total["sent"], total["load ms"]) == (2, 500.0)
    assert set(COUNTS) <= set(total)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_prompt_that_fills_its_last_block(halves: Halves, is_async: bool) -> None:
    """In step with a pass its last block is the engine's to compute, and not written."""
    size = {"tokens": 3 * BLOCK}
    halves.send(PromptCache(**{**vars(CACHE), **size}))
    halves.loader.start([load([1, 3, 8], is_async=is_async, **size)])
    halves.loader.wait_for_layer(len(LAYERS) - 1)
    if is_async:
        assert halves.settled() == {"r"}
    assert halves.loader.finished() == set()
    for layer in LAYERS:
        assert halves.is_same(layer, [5, 2], [1, 3])
        assert halves.mine[layer][8].any() == is_async


@pytest.mark.parametrize("blocks", [None, "ab", [0, 1], [0, True], [2, 0], [1, 3], [0, 1 << 40]])
def test_other_blocks_than_a_payload_names(
    halves: Halves, caplog: pytest.LogCaptureFixture, blocks: object
) -> None:
    """A producer's numbers are checked before anything is written."""
    bundle = pools_of(halves.saver)[0].bundle(CACHE)
    bundle.tensor_data["head-0"].metadata["blocks"] = blocks
    link_of(halves.saver).put(bundle)
    halves.loader.start([load([1, 3, 8])])
    assert halves.settled() == {"r"}
    assert halves.loader.take_invalid_blocks() == {1, 3, 8}
    assert "shm://halves sent " in caplog.text
    assert not any(cache.any() for cache in halves.mine.values())


def test_a_branch_of_an_unknown_group(halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
    bundle = pools_of(halves.saver)[0].bundle(CACHE)
    link_of(halves.saver).put(KVCacheBundle("key", {"head-7": bundle.branches["head-0"]}))
    halves.loader.start([load([1, 3, 8])])
    assert halves.settled() == {"r"}
    assert "as 'head-7'" in caplog.text


def cancelled(request: str, *, declines: bool) -> CancelledLoad:
    return CancelledLoad(request, "key", "", 1, "not needed", declines)


def test_a_returned_read_is_another_requests(halves: Halves) -> None:
    """The first load ends before its first layer, and leaves the cache to the second one."""
    halves.loader.start([load([1, 3, 8])])
    until_requested(link_of(halves.saver), 1)
    halves.loader.cancel(cancelled("r", declines=False))
    assert halves.settled() == {"r"}
    halves.loader.start([load([4, 6, 9], request_id="s")])
    halves.send(CACHE)
    assert halves.settled() == {"s"}
    assert halves.loader.take_invalid_blocks() == set()
    assert halves.is_same("a", [5, 2, 7], [4, 6, 9])


def test_a_copy_that_is_cancelled_returns_its_read(halves: Halves) -> None:
    """Between two layers: the second load begins anew, at the first one."""
    halves.saver.begin([CACHE])
    halves.saver.layer(0)
    halves.loader.start([load([1, 3, 8])])
    halves.loader._loading["r"].parts[0].wait_for_layer(0)
    halves.loader.cancel(cancelled("r", declines=False))
    halves.loader.start([load([4, 6, 9], request_id="s")])
    for number in range(1, len(LAYERS)):
        halves.saver.layer(number)
    halves.saver.commit()
    ended = halves.settled()
    while ended != {"r", "s"}:
        ended |= halves.settled()
    assert halves.loader.take_invalid_blocks() == set()
    for layer in LAYERS:
        assert halves.is_same(layer, [5, 2, 7], [4, 6, 9])
    assert not halves.mine["c"][[1, 3, 8]].any()


def test_a_read_that_was_used_cannot_be_returned(halves: Halves) -> None:
    """The scheduler did not know yet; the request that would take it fails at once."""
    halves.send(CACHE)
    halves.loader.start([load([1, 3, 8])])
    assert halves.loader._loading["r"].parts[0].done.wait(60)
    halves.loader.cancel(cancelled("r", declines=False))
    halves.loader.start([load([4, 6, 9], request_id="s")])
    assert halves.loader._loading["s"].is_done
    assert halves.settled() == {"r", "s"}
    assert halves.loader.take_invalid_blocks() == {4, 6, 9}


def test_declined_reads_are_bounded(halves: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is withdrawn: its cache stays for whoever reads it."""
    monkeypatch.setattr(declining, "MAX_DECLINED", 2)
    names = [f"{number}" for number in range(4)]
    for name in names:
        halves.loader.cancel(CancelledLoad(name, name, "", 1, "not needed", declines=True))
        until(partial(is_requested, halves, name), "it is requested")
    for name in names:
        halves.send(PromptCache(name, name, INPUTS, TOKENS, [[5, 2, 7]], 1))
    halves.saver.hold(set(names))
    released: set[str] = set()

    def have_two_ended() -> bool:
        released.update(halves.saver.released())
        return len(released) >= 2

    until(have_two_ended, "two have ended")
    assert released == {"2", "3"}
    until(lambda: not declined_reads(halves.loader), "they are forgotten")


def is_requested(halves: Halves, name: str) -> bool:
    return bool(declined_reads(halves.loader)[name, name].get.is_requested)


@pytest.mark.parametrize("in_pass", [False, True])
def test_only_a_rank_amid_a_pass_exits_when_another_ends(
    halves: Halves, monkeypatch: pytest.MonkeyPatch, in_pass: bool
) -> None:
    """Its pass waits for the other rank, and cannot end. Either way its reader is told."""
    exits: list[int] = []
    monkeypatch.setattr("os._exit", exits.append)
    rank = OmniKVLinkConnector.__new__(OmniKVLinkConnector)
    # A connector without an engine: what one of a rank has when another rank ends.
    rank._saver, rank._meter, rank._connector_metadata = halves.saver, halves.sent, None
    if in_pass:
        rank.bind_connector_metadata(StepMetadata())
    # The watch of the other ranks' processes calls it.
    rank._on_rank_ended()
    assert exits == ([1] if in_pass else [])
    halves.loader.start([load([4, 6, 9])])
    assert halves.settled() == {"r"}
    assert halves.loader.take_invalid_blocks()
