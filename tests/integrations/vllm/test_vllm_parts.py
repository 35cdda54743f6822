"""Engines of several ranks, without a model: each rank's part, and requests that end on all."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from omni_kvlink import SchemaError, UnavailableError
from omni_kvlink.integrations.vllm.heads import HeadPools
from omni_kvlink.integrations.vllm.ranks import EngineRank, RankPart, engine_url, rank_url
from omni_kvlink.integrations.vllm.siblings import SiblingWatch
from omni_kvlink.testing.rig import until
from support.vllm.cache_layers import full, latent, sliding, state
from support.vllm.engine_process import BLOCK, prompt
from support.vllm.halves import declined_reads, link_of, loader_of, pools_of, saver_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 60
FOREVER = 3600
"""Seconds; who waits for a dead rank until its timeout does not end in these tests."""

SIZES = [(1, 1), (2, 2), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]
"""Tensor-parallel ranks of the two sides; the model has two KV heads, four ranks one each."""

TOKENS = prompt(3 * BLOCK + 7, seed=3)


def pair(
    engine: Callable[..., Any], senders: int, receivers: int, steps: Any = None, **extra: Any
) -> tuple[Any, Any]:
    steps = steps or {}
    policy = extra.pop("policy", "fail")
    given = {"peer_tp": receivers, "steps": {**steps, "tensor": senders}}
    producer = engine("producer", **given)
    given = {"peer_tp": senders, "steps": {**steps, "tensor": receivers}}
    return producer, engine("consumer", policy, **given, **{"timeout": FOREVER, **extra})


def transfer(producer: Any, consumer: Any, tokens: list[int], name: str = "r") -> None:
    """Send a prompt's cache; the consumer's layers check each number of it."""
    consumer.add(name, tokens, producer.prefill(name, tokens), tokens=2)
    assert consumer.run(name) == ["length"]
    assert consumer.cached[name] >= (len(tokens) - 1) // BLOCK * BLOCK
    for each in (producer, consumer):
        each.settle()
        assert each.used_blocks == 0


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(("senders", "receivers"), SIZES)
def test_each_rank_gets_its_heads(
    engine: Any, senders: int, receivers: int, load: str, layout: str
) -> None:
    producer, consumer = pair(engine, senders, receivers, {"layout": layout}, load=load)
    for length in (5, BLOCK, 3 * BLOCK + 7):
        transfer(producer, consumer, prompt(length, seed=length), f"of {length}")
    received = sum(length > (BLOCK if load == "sync" else 0) for length in (5, BLOCK, 103))
    assert consumer.counts["received"] == receivers * received
    assert producer.counts["sent"] >= received


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_each_stage_gets_its_layers(engine: Any, tensor: int, load: str) -> None:
    steps = {"pipeline": 2, "groups": [full(*"abcd")]}
    transfer(*pair(engine, tensor, tensor, steps, load=load), TOKENS)


@pytest.mark.parametrize(("senders", "receivers"), [(2, 2), (1, 2), (2, 1)])
def test_groups_of_layers(engine: Any, senders: int, receivers: int) -> None:
    """A window is divided like the rest; only what a rank needs of it is sent."""
    steps = {"groups": [full("a", "b"), sliding(40, "c", "d")]}
    transfer(*pair(engine, senders, receivers, steps), TOKENS)


@pytest.mark.parametrize(("senders", "receivers"), [(2, 2), (1, 2), (2, 1)])
def test_latents_are_whole_on_each_rank(engine: Any, senders: int, receivers: int) -> None:
    """A rank reads them from one rank; a rank that nobody reads from holds no blocks."""
    transfer(*pair(engine, senders, receivers, {"groups": [latent("a", "b")]}), TOKENS)


def test_a_long_key(engine: Any) -> None:
    """The names of its parts do not fit behind it."""
    producer, consumer = pair(engine, 1, 2)
    for name in ("a" * 1024, "a" * 1023 + "b"):
        consumer.add(name, TOKENS, producer.prefill(name, TOKENS, transfer_id=name))
        assert consumer.run(name) == ["length"]
        consumer.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize(("senders", "receivers"), [(2, 2), (1, 2), (2, 1), (1, 4)])
def test_a_cache_that_is_not_needed(
    engine: Any, senders: int, receivers: int, readers: int, moment: str
) -> None:
    """Its request is aborted before its cache is put, or after: each rank tells its producers."""
    producer, consumer = pair(engine, senders, receivers)
    params = {"do_remote_prefill": True, "transfer_id": "key", "readers": readers}
    if moment == "after":
        producer.prefill("p", TOKENS, transfer_id="key", readers=readers)
    for number in range(readers):
        consumer.add(f"c{number}", TOKENS, params)
        if moment == "before":
            consumer.step()
        consumer.abort(f"c{number}")
    consumer.settle()
    if moment == "before":
        producer.prefill("p", TOKENS, transfer_id="key", readers=readers)
    until(stepped(consumer, producer, lambda: not producer.scheduler.has_requests()), "it ended")
    assert producer.used_blocks == consumer.used_blocks == 0


@pytest.mark.parametrize("end", ["fail", "close"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("senders", "receivers"), [(2, 2), (2, 1)])
def test_a_rank_of_the_producer_fails(
    engine: Any, senders: int, receivers: int, policy: str, end: str
) -> None:
    """The loads of the other ranks' parts end with it, long before their deadline."""
    producer, consumer = pair(engine, senders, receivers, policy=policy)
    consumer.add("r", TOKENS, {"do_remote_prefill": True, "transfer_id": "key"})
    links = [link_of(saver_of(rank.connector)) for rank in producer.ranks]
    until(stepped(consumer, None, lambda: all(map(is_waited_for, links))), "all ranks wait")
    if end == "close":
        links[1].close()
    else:
        parts = pools_of(saver_of(producer.ranks[1].connector))
        links[1].fail(parts[0].part.key("key"), "the rank could not compute it")
    assert consumer.run("r") == ["error" if policy == "fail" else "length"]
    consumer.settle()
    assert consumer.used_blocks == 0
    assert consumer.counts["load_failed"] == 1, "the others were cancelled"
    # What a loader keeps of requests that have ended costs memory, and shows nowhere.
    assert not any(loader_of(rank.connector)._ended for rank in consumer.ranks)


def is_waited_for(link: Any) -> bool:
    return bool(link.stats()["transfers"]["waiting"])


def stepped(consumer: Any, producer: Any, condition: Callable[[], bool]) -> Callable[[], bool]:
    def step() -> bool:
        for each in (consumer, producer):
            if each is not None:
                each.step()
        return condition()

    return step


def test_a_rank_loads_what_another_one_failed_at(engine: Any) -> None:
    """It had loaded its part before: the request fails, and the part is not read twice."""
    producer, consumer = pair(engine, 2, 2)
    params = producer.prefill("p", TOKENS, transfer_id="key")
    link_of(saver_of(producer.ranks[1].connector)).abort("key", "lost")
    consumer.add("r", TOKENS, params)
    assert consumer.run("r") == ["error"]
    for each in (consumer, producer):
        each.settle()
        assert each.used_blocks == 0
    assert not any(declined_reads(loader_of(rank.connector)) for rank in consumer.ranks)


def test_a_peer_of_another_size(engine: Any) -> None:
    """Its first rank serves what a single one would: it is asked, and refused by name."""
    producer = engine("producer", steps={"tensor": 2})
    consumer = engine("consumer")
    consumer.add("r", TOKENS, producer.prefill("p", TOKENS))
    assert consumer.run("r") == ["error"]
    # The reason that a reader gives is the receipt's, and logged by the other side.
    receipt = next(iter(saver_of(producer.ranks[0].connector)._receipts.values()))
    with pytest.raises(Exception, match="tp_size is 2 there and 1 here; peer_tp is the"):
        receipt.wait(timeout=PATIENCE)
    link_of(saver_of(producer.ranks[1].connector)).abort("p", "not needed")
    producer.settle()


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([state("a", block=BLOCK, mode="none")], "a recurrent state is not divided by KV head"),
        ([full("a"), latent("b")], r"its groups have \[1, 2\] KV heads"),
    ],
)
def test_blocks_that_cannot_be_divided(engine: Any, groups: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=f"for peer_tp 2: {why}; use engines of one"):
        engine("producer", peer_tp=2, steps={"groups": groups})


def test_pools_of_another_shape(engine: Any) -> None:
    consumer = engine("consumer")
    (pools,) = loader_of(consumer.worker).pools
    caches = {each.name: pools.tensors[0] for each in pools.layers}
    heads = HeadPools(pools, caches, EngineRank(), peer_tp=2, model_heads=2)
    with pytest.raises(SchemaError, match=r"is not \[num_blocks, 2 heads, 32 tokens, content\]"):
        heads.parts(sends=False)


@pytest.mark.parametrize(
    ("role", "extra", "why"),
    [
        ("producer", {"url": "zmq+tcp://127.0.0.1:7000"}, r"write \{rank\} in it"),
        ("consumer", {"peers": ["zmq+tcp://127.0.0.1:7000"]}, r"write \{rank\} in it"),
        ("both", {"load": "sync", "peer_tp": 1}, 'set "load": "async"'),
        ("producer", {"peer_tp": 3}, "2 KV heads on 3 ranks"),
    ],
)
def test_settings_for_several_ranks(engine: Any, role: str, extra: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        engine(role, steps={"tensor": 2}, **extra)


def test_context_parallel_engines_are_refused() -> None:
    sizes = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 2}
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**sizes))
    with pytest.raises(UnavailableError, match="--decode-context-parallel-size 1"):
        EngineRank.of(config)


@pytest.mark.parametrize(
    ("url", "of_rank_1"),
    [
        ("shm://prefill", "shm://prefill.rank1"),
        ("zmq+ipc:///run/kv/p?mode=sealed", "zmq+ipc:///run/kv/p.rank1?mode=sealed"),
        ("zmq+tcp://10.0.0.5:700{rank}", "zmq+tcp://10.0.0.5:7001"),
    ],
)
def test_the_url_of_a_rank(url: str, of_rank_1: str) -> None:
    assert rank_url(url, 1) == of_rank_1
    assert rank_url(url, 0) == url.replace("{rank}", "0"), "one rank serves the URL as it is"


def test_the_url_of_a_data_parallel_engine() -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=3))
    assert engine_url("shm://p-{dp}", config) == "shm://p-3"
    assert engine_url("shm://p", config) == "shm://p"


def test_what_is_sent_of_a_rank() -> None:
    """The consumer compares it: a rank of another stage, or of another size, does not fit."""
    part = RankPart(EngineRank(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2), (2, 4))
    fields = {"tp_rank": 1, "tp_size": 4, "pp_rank": 1, "pp_size": 2, "heads": [2, 4]}
    assert part.describe() == fields
    assert part.sender.index == 5


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_the_end_of_another_ranks_process(process: subprocess.Popen[bytes]) -> None:
    lost = threading.Event()
    watch = SiblingWatch([process.pid], lost.set)
    process.send_signal(signal.SIGKILL)
    assert lost.wait(PATIENCE)
    watch.close()


def test_a_process_that_has_ended_before(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    lost = threading.Event()
    watch = SiblingWatch([process.pid], lost.set)
    assert lost.wait(PATIENCE)
    watch.close()


def test_a_watch_that_is_closed(process: subprocess.Popen[bytes]) -> None:
    """An engine that shuts down ends its ranks; none of them is lost."""
    lost = threading.Event()
    watch = SiblingWatch([process.pid], lost.set)
    watch.close()
    watch.close()
    process.kill()
    # Its thread has ended, and did not see the process end.
    assert not watch._thread.is_alive()
    assert not lost.is_set()
