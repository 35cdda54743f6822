"""Several groups of caches: each sends what its kind needs, and fails with the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

from omni_kvlink import KVCacheBundle, KVLink, SchemaError
from omni_kvlink.integrations.vllm.groups import CacheGroup, CacheGroups
from omni_kvlink.integrations.vllm.pools import byte_pools, layer_places
from omni_kvlink.integrations.vllm.versions import supports_invalid_blocks_of_groups
from support.vllm.cache_layers import (
    BLOCK,
    SIZES,
    chunked,
    full,
    latent,
    sliding,
    sliding_latent,
    state,
    uniform,
)
from support.vllm.engine_process import prompt
from support.vllm.halves import link_of, pools_of, saver_of
from support.vllm.steps import SteppedEngine

Open = Callable[..., SteppedEngine]
Caches = list[KVCacheGroupSpec]

LENGTHS = [1, 2, 5, 31, 32, 33, 42, 64, 65, 79, 80, 81, 96, 97, 128, 144, 169, 191]
"""Shorter than a window and than a block; ends of blocks, of chunks and of windows."""

KINDS: dict[str, Caches] = {
    "window shorter than a block": [sliding(10, "b", "c"), full("a", "d")],
    "window of one": [full("a"), sliding(1, "b")],
    "window of a block": [full("a"), sliding(BLOCK, "b")],
    "window": [full("a", "d"), sliding(48, "b", "c")],
    "window longer than the prompts": [full("a"), sliding(200, "b")],
    "two windows": [sliding(33, "a"), sliding(65, "c"), full("b")],
    "only a window": [sliding(48, "a", "b")],
    "smaller blocks": [full("a"), sliding(20, "b", block=8)],
    "larger blocks": [full("a"), sliding(40, "b", block=64)],
    "chunks": [full("a"), chunked(64, "b")],
    "chunks that are no blocks": [chunked(48, "a", "c"), full("b")],
    "latents": [latent("a", "b")],
    "latents and a window": [latent("a"), sliding_latent(48, "b")],
    "latents of two sizes": [uniform("a", "b")],
}
STATES: dict[str, Caches] = {
    "states": [full("a"), state("b", "c", block=512, mode="none")],
    "only states": [state("a", "b", block=512, mode="none")],
    "states of blocks": [state("a", block=BLOCK, mode="align"), full("b")],
    "states of all blocks": [full("a"), state("b", block=BLOCK, mode="all")],
}
HYBRID = KINDS["window"]


def caches(groups: Caches) -> dict[str, Any]:
    """Options of an engine with these groups; a state in one block excludes prefix caching."""
    modes = [getattr(each.kv_cache_spec, "mamba_cache_mode", "") for each in groups]
    return {"caching": "none" not in modes, "steps": {"groups": groups}}


def loads(groups: Caches) -> list[str]:
    """The kinds of loads that this version of vLLM can take for these groups."""
    has_sync = supports_invalid_blocks_of_groups() or len(groups) == 1
    return ["async", "sync"] if has_sync else ["async"]


def kinds_and_loads(*kinds: str) -> list[tuple[str, str]]:
    return [(kind, load) for kind in kinds for load in loads(KINDS[kind])]


def outputs(length: int) -> int:
    """Tokens to compute after a prompt; more than a block and a window for one length."""
    return 50 if length == 65 else 3


def check_settled(*engines: SteppedEngine) -> None:
    for engine in engines:
        engine.settle()
    assert [engine.used_blocks for engine in engines] == [0] * len(engines)


@pytest.mark.parametrize(("kind", "load"), kinds_and_loads(*KINDS))
def test_each_kind(engine: Open, kind: str, load: str) -> None:
    """Of each length: what the consumer's tokens see is there, and no block is left over."""
    options = caches(KINDS[kind])
    producer, consumer = engine("producer", **options), engine("consumer", load=load, **options)
    expected = 0
    for length in LENGTHS:
        name, tokens = f"r{length}", prompt(length, seed=length)
        consumer.add(name, tokens, producer.prefill(name, tokens), tokens=outputs(length))
        assert consumer.run(name) == ["length"]
        groups = CacheGroups.of(consumer.scheduler.kv_cache_config)
        loaded = groups.position(length, is_async=load == "async")
        assert consumer.cached[name] == min(loaded, length - 1)
        expected += loaded > 0
        check_settled(producer, consumer)
    assert consumer.counts["received"] == expected > 1


@pytest.mark.parametrize("kind", STATES)
def test_states(engine: Open, kind: str) -> None:
    """The consumer computes the last token from the state before it, which is what is sent."""
    options = caches(STATES[kind])
    producer, consumer = engine("producer", **options), engine("consumer", **options)
    for length in LENGTHS:
        name, tokens = f"r{length}", prompt(length, seed=length)
        params = producer.prefill(name, [*tokens])
        assert producer.wrong == set()
        consumer.add(name, tokens, params, tokens=outputs(length))
        assert consumer.run(name) == ["length"]
        assert consumer.cached[name] == length - 1
        check_settled(producer, consumer)
    assert consumer.counts["received"] == len(LENGTHS)


@pytest.mark.parametrize("load", loads(HYBRID))
@pytest.mark.parametrize("batch", [50, 45, 33])
def test_a_prefill_in_chunks(engine: Open, load: str, batch: int) -> None:
    """Its last pass may begin behind the block in which a synchronous consumer begins."""
    options = {"steps": {"groups": HYBRID}}
    chunks = {"steps": {"groups": HYBRID, "batch": batch}}
    producer, consumer = engine("producer", **chunks), engine("consumer", load=load, **options)
    for length in LENGTHS:
        name, tokens = f"r{length}", prompt(length, seed=length)
        consumer.add(name, tokens, producer.prefill(name, tokens))
        assert consumer.run(name) == ["length"]
        check_settled(producer, consumer)
    assert consumer.counts["load_failed"] == 0


def test_states_of_a_prefill_in_chunks(engine: Open) -> None:
    options = caches(STATES["states of blocks"])
    chunks = {"steps": {**options["steps"], "batch": 50}}
    producer, consumer = engine("producer", **chunks), engine("consumer", **options)
    for length in LENGTHS:
        name, tokens = f"r{length}", prompt(length, seed=length)
        consumer.add(name, tokens, producer.prefill(name, tokens))
        assert consumer.run(name) == ["length"]
        check_settled(producer, consumer)


@pytest.mark.parametrize(
    ("kind", "load"),
    kinds_and_loads("window", "only a window", "two windows", "chunks", "latents and a window"),
)
def test_a_part_of_the_prompt_is_local(engine: Open, kind: str, load: str) -> None:
    """Only missing blocks are written; a window's first ones are nobody's."""
    options = caches(KINDS[kind])
    producer, consumer = engine("producer", **options), engine("consumer", load=load, **options)
    tokens = prompt(5 * BLOCK + 9, seed=9)
    for number, length in enumerate((BLOCK + 1, 2 * BLOCK + 5, 3 * BLOCK, 4 * BLOCK + 1)):
        consumer.add(f"local {number}", tokens[:length], None)
        consumer.run(f"local {number}")
        name = f"r{number}"
        consumer.add(name, tokens, producer.prefill(name, tokens), tokens=3)
        assert consumer.run(name) == ["length"]
        check_settled(producer, consumer)
        consumer.scheduler.reset_prefix_cache()
    assert consumer.counts["received"] == 4


def test_only_the_window_is_sent(engine: Open, sockets: str) -> None:
    """Both kinds of consumers find what they need, and no more is on the way."""
    producer = engine("producer", steps={"groups": [full("a"), sliding(48, "b")]})
    producer.prefill("k", prompt(5 * BLOCK + 9))
    with KVLink.connect("shm://p", timeout=60, directory=sockets) as link:
        received = link.get("k", timeout=60)
        assert isinstance(received.data, KVCacheBundle)
        blocks = {name: data.metadata["blocks"] for name, data in received.data.tensor_data.items()}
        received.release()
    assert blocks == {"head-0": [0, 5], "last-0": [5, 6], "head-1": [3, 5], "last-1": [5, 6]}


def test_layers_are_sent_as_the_model_computes_them(engine: Open) -> None:
    """Not group by group, as vLLM lists their pools."""
    producer = engine("producer", steps={"groups": [full("b", "d"), sliding(48, "a", "c")]})
    assert [layer.name for layer in pools_of(saver_of(producer.worker))[0].layers] == [*"abcd"]


@pytest.mark.parametrize(
    ("kind", "load", "policy"),
    [
        (kind, load, policy)
        for kind, load in kinds_and_loads(
            "window", "only a window", "latents of two sizes", "chunks"
        )
        for policy in (["fail", "recompute"] if load == "async" else ["fail"])
    ],
)
def test_a_group_fails(engine: Open, kind: str, policy: str, load: str) -> None:
    """One flipped bit in the last group: the request fails, or is computed from its beginning."""
    options = caches(KINDS[kind])
    producer = engine("producer", **options)
    consumer = engine("consumer", policy, load=load, **options)
    flip_last_group(producer)
    tokens, sound = prompt(5 * BLOCK + 9, seed=5), prompt(4 * BLOCK + 3, seed=6)
    consumer.add("bad", tokens, producer.prefill("bad", tokens), tokens=3)
    consumer.add("sound", sound, producer.prefill("sound", sound), tokens=3)
    ending = "error" if policy == "fail" else "length"
    assert consumer.run("bad", "sound") == [ending, "length"]
    assert (consumer.counts["load_corrupt"], consumer.counts["received"]) == (1, 1)
    check_settled(producer, consumer)
    consumer.add("again", tokens, None)  # what failed is not in the prefix cache
    assert consumer.run("again") == ["length"]
    check_settled(consumer)


def flip_last_group(producer: SteppedEngine) -> None:
    """Flip a byte in the last group of a payload named `bad`, after its digest was taken."""
    link = link_of(saver_of(producer.worker))
    stream_put = link.stream_put

    def open_stream(data: Any, **options: Any) -> Any:
        stream = stream_put(data, **options)
        if data.request_id == "bad":
            commit = stream.commit

            def flip_and_commit() -> Any:
                # A byte changes between its digest and the commit: no call comes in between.
                lease, manifest = stream._open_lease(), stream.manifest
                branch = [each for each in manifest.branches if "head" in each.name][-1]
                start = manifest.header_nbytes + manifest.tensors_of(branch)[-1].start
                lease.region.view()[start] ^= 1
                return commit()

            stream.commit = flip_and_commit
        return stream

    link.stream_put = open_stream


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("is_put", [True, False])
def test_an_aborted_request(engine: Open, steps: int, is_put: bool) -> None:
    options = {"steps": {"groups": HYBRID}}
    producer, consumer = engine("producer", **options), engine("consumer", **options)
    tokens = prompt(5 * BLOCK + 9)
    if is_put:
        producer.prefill("k", tokens)
    consumer.add("r", tokens, {"do_remote_prefill": True, "transfer_id": "k"})
    for _ in range(steps):
        consumer.step()
    consumer.abort("r")
    consumer.settle()
    if not is_put:
        producer.prefill("k", tokens)
    check_settled(producer, consumer)


@pytest.mark.parametrize("passes", range(1, 5))
def test_a_producer_that_is_aborted_between_chunks(engine: Open, passes: int) -> None:
    """The blocks that it kept for a cache that is never sent come back."""
    producer = engine("producer", steps={"groups": HYBRID, "batch": 45})
    producer.add("k", prompt(6 * BLOCK - 1), {"do_remote_decode": True})
    for _ in range(passes):
        producer.step()
    producer.abort("k")
    check_settled(producer)


def test_a_consumer_that_sends_on(engine: Open, sockets: str) -> None:
    """What was loaded for one token to compute is enough for the next asynchronous consumer."""
    options = {"steps": {"groups": HYBRID}}
    producer = engine("producer", **options)
    relay = engine("both", url="shm://relay", **options)
    consumer = engine("consumer", peers=["shm://relay"], **options)
    tokens = prompt(5 * BLOCK + 9)
    both = {**producer.prefill("k", tokens), "do_remote_decode": True}
    relay.add("k", tokens, both)
    assert relay.run("k") == ["length"]
    consumer.add("r", tokens, relay.ended["k"][1], tokens=3)
    assert consumer.run("r") == ["length"]
    assert consumer.counts["received"] == 1
    check_settled(producer, relay, consumer)


def test_a_window_that_the_producer_lacks(engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    """A synchronous consumer is told so by a producer that loaded only its own window."""
    options = caches(KINDS["only a window"])
    producer = engine("producer", **options)
    relay = engine("both", url="shm://relay", **options)
    consumer = engine("consumer", peers=["shm://relay"], load="sync", **options)
    tokens = prompt(5 * BLOCK + 25)
    both = {**producer.prefill("k", tokens), "do_remote_decode": True}
    relay.add("k", tokens, both)
    assert relay.run("k") == ["length"]
    consumer.add("r", tokens, relay.ended["k"][1])
    assert consumer.run("r") == ["error"]
    assert 'set "load": "async"' in caplog.text
    check_settled(producer, relay, consumer)


def test_a_state_is_not_sent_on(engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    options = caches(STATES["states"])
    relay = engine("both", "recompute", **options)
    both = {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "k"}
    relay.add("k", prompt(50), both)
    assert relay.run("k") == ["length"]
    assert "a request that loads a recurrent state cannot send one" in caplog.text
    check_settled(relay)


@pytest.mark.parametrize(
    "spec",
    [
        CrossAttentionSpec(block_size=BLOCK, **SIZES),
        EncoderOnlyAttentionSpec(block_size=BLOCK, **SIZES),
        SinkFullAttentionSpec(block_size=BLOCK, sink_len=4, **SIZES),
    ],
)
def test_an_unknown_kind(spec: KVCacheSpec) -> None:
    """A subclass of a known one is unknown, too: it may keep other blocks."""
    config = KVCacheConfig(4, [], [full("a"), KVCacheGroupSpec(["b", "c"], spec)])
    with pytest.raises(SchemaError, match=rf"layers b, c .* {type(spec).__name__}; .* MambaSpec"):
        CacheGroups.of(config)


NEEDS_FAIL = 'set kv_load_failure_policy to "fail"'
NEEDS_ONE_GROUP = "--disable-hybrid-kv-cache-manager"


@pytest.mark.parametrize(
    ("groups", "policy", "word"),
    [
        (STATES["states"], "fail", r"MambaSpec.*set \"load\": \"async\""),
        (KINDS["only a window"], "recompute", NEEDS_FAIL),
        *(
            [(HYBRID, "recompute", NEEDS_FAIL)]
            if supports_invalid_blocks_of_groups()
            else [(HYBRID, each, NEEDS_ONE_GROUP) for each in ("fail", "recompute")]
        ),
    ],
)
def test_a_synchronous_load_that_cannot_be_right(
    engine: Open, groups: Caches, policy: str, word: str
) -> None:
    with pytest.raises(SchemaError, match=word):
        engine("consumer", policy, load="sync", **caches(groups))


@pytest.mark.skipif(
    not hasattr(SlidingWindowMLASpec, "bounded_replay"), reason="vLLM 0.30 has no such window"
)
def test_a_window_that_is_computed_again() -> None:
    spec = sliding_latent(48, "b").kv_cache_spec
    replayed = KVCacheGroupSpec(["b"], dataclasses.replace(spec, bounded_replay=True))
    config = KVCacheConfig(4, [], [full("a"), replayed])
    with pytest.raises(SchemaError, match=r"layers b have a window .*bounded replay"):
        CacheGroups.of(config)


def test_other_groups_are_refused(engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The field that differs is named, and its group."""
    producer = engine("producer", steps={"groups": [full("a"), sliding(48, "b")]})
    consumer = engine("consumer", steps={"groups": [full("a"), sliding(50, "b")]})
    tokens = prompt(3 * BLOCK)
    consumer.add("r", tokens, producer.prefill("r", tokens))
    assert consumer.run("r") == ["error"]
    assert "of group 1 window is 48 there and 50 here" in caplog.text
    fewer = engine("consumer", steps={"groups": [full("a", "b")]})
    fewer.add("q", tokens, producer.prefill("q", tokens))
    assert fewer.run("q") == ["error"]
    assert "groups is [" in caplog.text
    check_settled(producer, consumer, fewer)


def test_blocks_of_a_position() -> None:
    """As vLLM's managers count: from the first token that the position sees."""
    window = CacheGroup("SlidingWindowSpec", 0, 4, ("a",), window=6)
    assert [window.blocks(position) for position in (0, 5, 9, 10, 12)] == [
        range(0),
        range(2),
        range(1, 3),
        range(1, 3),
        range(1, 3),
    ]
    chunk = CacheGroup("ChunkedLocalAttentionSpec", 0, 4, ("a",), chunk=6)
    assert [chunk.blocks(position) for position in (5, 6, 7, 12, 13)] == [
        range(2),
        range(0),
        range(1, 2),
        range(0),
        range(3, 4),
    ]
    kept = CacheGroup("MambaSpec", 0, 4, ("a",))
    assert [kept.blocks(position) for position in (1, 4, 5)] == [
        range(1),
        range(1),
        range(1, 2),
    ]


def test_layers_of_two_groups_share_memory() -> None:
    """The groups of vLLM are overlaid, and a block belongs to one of them at a time: both stay."""
    memory = torch.zeros(6, 2, BLOCK, 8)
    pools = [byte_pools({name: memory}, num_blocks=6, block_size=BLOCK) for name in ("b", "a")]
    assert [tuple(each) for each in layer_places(pools, ["a", "b"])] == [("a", 1, 0), ("b", 0, 0)]
