"""A request that is wrong or ends early harms no other request, no block and no engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from omni_kvlink import KVLink
from omni_kvlink.integrations.vllm.loading import CacheLoad
from support.vllm.engine_process import prompt
from support.vllm.halves import declined_reads, link_of, loader_of, saver_of
from support.vllm.steps import BLOCK, SAMPLED, SteppedEngine

TOKENS = prompt(3 * BLOCK + 7, seed=3)
USED = 4
"""Blocks of `TOKENS`."""

Open = Callable[..., SteppedEngine]


def fetch(key: str, **params: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": key, **params}


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The connector's errors and warnings that name a request."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    texts = [record.getMessage() for record in records if "omni_kvlink" in record.name]
    return [text for text in texts if repr(name) in text]


@pytest.mark.parametrize(
    ("load", "steps"),
    [("async", 0), ("sync", 0), ("async", 1)],  # a forward pass waits for its synchronous loads
    ids=["unscheduled", "unscheduled, sync", "loading"],
)
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("is_put", [True, False])
def test_the_producer_of_an_aborted_request_is_told(
    engine: Open, sockets: str, load: str, readers: int, steps: int, is_put: bool
) -> None:
    """Before its first step, just after its load began, before the put: no block waits for it."""
    producer, consumer = engine("producer"), engine("consumer", load=load)
    load_another(producer, consumer, "before")
    if is_put:
        producer.prefill("k", TOKENS, readers=readers)
        assert producer.used_blocks == USED
    consumer.add("r", TOKENS, fetch("k", readers=readers))
    for _ in range(steps):
        consumer.step()
    consumer.abort("r")
    consumer.settle()
    assert consumer.used_blocks == 0
    if not is_put:
        load_another(producer, consumer, "after")  # what was sent before has arrived by then
        producer.prefill("k", TOKENS, readers=readers)
    if readers == 2:  # the other one
        producer.step()
        assert producer.used_blocks == USED
        with KVLink.connect("shm://p", timeout=60, directory=sockets) as other:
            other.get("k", timeout=60).release()
    producer.settle()
    assert producer.used_blocks == 0


def load_another(producer: SteppedEngine, consumer: SteppedEngine, name: str) -> None:
    """Another prompt, from its prefill to its end."""
    tokens = prompt(2 * BLOCK, seed=len(name))
    consumer.add(name, tokens, producer.prefill(name, tokens))
    assert consumer.run(name) == ["length"]
    consumer.settle()
    producer.settle()


def test_a_load_that_came_too_late(engine: Open) -> None:
    """The request ended at the load's deadline; a put after that is told so."""
    producer, consumer = engine("producer"), engine("consumer", timeout=0.2)
    consumer.add("r", TOKENS, fetch("k"))
    assert consumer.run("r") == ["error"]
    producer.prefill("k", TOKENS)
    producer.settle()
    assert producer.used_blocks == 0


def test_a_key_that_was_aborted_is_requested_again(engine: Open) -> None:
    """The same engine needs the cache after all: it is loaded, not aborted."""
    producer, consumer = engine("producer"), engine("consumer")
    consumer.add("r", TOKENS, fetch("k"))
    consumer.abort("r")
    consumer.settle()
    consumer.add("again", TOKENS, fetch("k"))
    consumer.step()
    producer.prefill("k", TOKENS)
    assert consumer.run("again") == ["length"]
    assert consumer.counts["received"] == 1
    producer.settle()
    assert producer.used_blocks == 0


def test_a_request_that_the_front_end_rejects(engine: Open) -> None:
    """The scheduler gets it with one token, and has to abort it at once."""
    producer, consumer = engine("producer"), engine("consumer")
    params = producer.prefill("k", TOKENS)
    consumer.add("r", [0], params)
    consumer.abort("r")
    consumer.settle()
    producer.settle()
    assert producer.used_blocks == 0


LONE = "\ud800"
BAD_KEYS = [LONE, "", 0, 7, 1.5, True, [], ["k"], {"k": 1}, "k" * 1025, "k" * (1 << 20)]
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]
BAD_READERS = [0, -1, True, 1.5, float("nan"), "1", [], {}, 1 << 63, DEEP]
BAD_URLS = [7, True, [], ["shm://p"], {}, LONE, "shm://elsewhere", "u" * (1 << 20)]
BAD_FLAGS = [1, "yes", "false", [1], {"a": 1}, 1.5]
BAD_PARAMS = [[], [1], "do_remote_prefill", 7, True]

CONSUMED = [
    *({"do_remote_prefill": True, "transfer_id": value} for value in BAD_KEYS),
    *(fetch("k", readers=value) for value in BAD_READERS),
    *(fetch("k", remote_url=value) for value in BAD_URLS),
    *({"do_remote_prefill": value, "transfer_id": "k"} for value in BAD_FLAGS),
    *BAD_PARAMS,
]
SEND = {"do_remote_decode": True}
PRODUCED = [
    *({**SEND, "transfer_id": value} for value in BAD_KEYS),
    *({**SEND, "readers": value} for value in BAD_READERS),
    *({"do_remote_decode": value, "transfer_id": "k"} for value in BAD_FLAGS),
    *BAD_PARAMS,
]


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_what_a_consumers_request_carries_is_its_own_error(
    engine: Open, caplog: pytest.LogCaptureFixture, policy: str, load: str
) -> None:
    """Each field, each wrong value, beside a sound request; aborted before its first step, too."""
    producer, consumer = engine("producer"), engine("consumer", policy, load=load)
    ending = "error" if policy == "fail" else "length"
    for number, params in enumerate(CONSUMED):
        caplog.clear()
        name, sound, dropped = f"bad {number}", f"sound {number}", f"dropped {number}"
        tokens = prompt(3 * BLOCK + 7, seed=number)
        consumer.add(name, tokens, params)
        consumer.add(sound, TOKENS, producer.prefill(sound, TOKENS))
        consumer.add(dropped, tokens, params)
        consumer.abort(dropped)
        assert consumer.run(name, sound) == [ending, "length"], params
        (line,) = lines(caplog, name)
        assert len(line) < 1000
        consumer.scheduler.reset_prefix_cache()
    consumer.settle()
    producer.settle()
    assert (consumer.used_blocks, producer.used_blocks) == (0, 0)
    assert consumer.counts["received"] == len(CONSUMED)


def test_what_a_producers_request_carries_is_its_own_error(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt is computed, its cache is not sent, and a consumer that waits is told."""
    producer = engine("producer")
    for number, params in enumerate(PRODUCED):
        caplog.clear()
        name, sound = f"bad {number}", f"sound {number}"
        producer.add(name, prompt(3 * BLOCK + 7, seed=number), params)
        producer.add(sound, TOKENS, {**SEND, "transfer_id": f"sent {number}"})
        assert producer.run(name, sound) == ["length", "length"], params
        assert producer.ended[name][1] is None
        assert producer.ended[sound][1] is not None
        (line,) = lines(caplog, name)
        assert len(line) < 1000
        link_of(saver_of(producer.worker)).abort(f"sent {number}")
    producer.settle()
    assert producer.used_blocks == 0


@pytest.mark.parametrize("readers", [0, 1])
def test_a_cache_of_the_same_key_stays(engine: Open, readers: int) -> None:
    """Another client's request that names it, is wrong or is aborted, does not end it."""
    producer, consumer = engine("producer"), engine("consumer")
    params = producer.prefill("k", TOKENS)
    producer.add("other", TOKENS, {**SEND, "transfer_id": "k", "readers": readers})
    producer.abort("other")
    producer.step()
    consumer.add("r", TOKENS, params)
    assert consumer.run("r") == ["length"]
    producer.settle()
    assert producer.used_blocks == 0
    assert (producer.counts["sent"], producer.counts["send_failed"]) == (1, 1)


def test_a_consumer_hears_of_wrong_params_at_the_producer(engine: Open) -> None:
    """It waits with the right key; the producer's request has another wrong field."""
    producer, consumer = engine("producer"), engine("consumer")
    consumer.add("r", TOKENS, fetch("k"))
    consumer.step()
    producer.add("k", TOKENS, {**SEND, "readers": 0})
    producer.run("k")
    producer.settle()
    assert consumer.run("r") == ["error"]


def test_a_request_id_that_is_no_key(engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The default key is the request id, which a client may choose, too."""
    producer, consumer = engine("producer"), engine("consumer")
    for name in (LONE, "n" * 2000):
        producer.add(name, TOKENS, SEND)
        consumer.add(name, TOKENS, {"do_remote_prefill": True})
        assert producer.run(name) == ["length"]
        assert consumer.run(name) == ["error"]
        assert producer.ended[name][1] is None
    producer.settle()
    assert producer.used_blocks == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_two_requests_with_one_prompt(engine: Open, load: str) -> None:
    """Each has a cache of its own: both are loaded or found, and both are released."""
    producer, consumer = engine("producer"), engine("consumer", load=load)
    for name in ("one", "two"):
        consumer.add(name, TOKENS, producer.prefill(name, TOKENS))
    assert consumer.run("one", "two") == ["length", "length"]
    check_served(producer, consumer, "one", "two")


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("is_put", [True, False])
def test_requests_that_name_one_cache(engine: Open, load: str, readers: int, is_put: bool) -> None:
    """Two of one engine; who has no read of its own finds what the other one loaded."""
    producer, consumer = engine("producer"), engine("consumer", load=load)
    if is_put or load == "sync":
        producer.prefill("k", TOKENS, readers=min(readers, 2))
    for name in ("one", "two"):
        consumer.add(name, TOKENS, fetch("k", readers=min(readers, 2)))
    if readers == 3:
        consumer.add("three", TOKENS, fetch("k", readers=2))
    consumer.step()
    if not is_put and load == "async":
        producer.prefill("k", TOKENS, readers=min(readers, 2))
    names = ["one", "two", "three"][: max(2, readers)]
    assert set(consumer.run(*names)) == {"length"}
    check_served(producer, consumer, *names)


def check_served(producer: SteppedEngine, consumer: SteppedEngine, *names: str) -> None:
    """At most the last block was computed again; nothing failed, no block or get is left."""
    assert all(consumer.cached[name] >= 3 * BLOCK for name in names), consumer.cached
    assert consumer.counts.get("load_failed", 0) == 0
    consumer.settle()
    producer.settle()
    assert (consumer.used_blocks, producer.used_blocks) == (0, 0)
    consumer.step_until(lambda: not declined_reads(loader_of(consumer.worker)))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_one_cache_and_no_prefix_cache(
    engine: Open, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """The second request cannot have it: that is known at once, and named."""
    producer, consumer = engine("producer"), engine("consumer", policy, caching=False)
    producer.prefill("k", TOKENS)
    for name in ("one", "two"):
        consumer.add(name, TOKENS, fetch("k"))
    second = "error" if policy == "fail" else "length"
    assert consumer.run("one", "two") == ["length", second]
    (line,) = lines(caplog, "two")
    assert "readers=1" in line
    assert "'one'" in line
    producer.settle()
    assert (consumer.used_blocks, producer.used_blocks) == (0, 0)


@pytest.mark.parametrize("is_put", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_first_of_two_that_name_one_cache_is_aborted(
    engine: Open, monkeypatch: pytest.MonkeyPatch, is_put: bool, steps: int
) -> None:
    """While its cache is not in its blocks, its read is the other one's then."""
    # The copy is held up after its payload has come: no event of vLLM is in between.
    has_come, may_copy, copy = threading.Event(), threading.Event(), CacheLoad._run

    def copy_later(load: CacheLoad, delivery: Any) -> None:
        has_come.set()
        assert may_copy.wait(60)
        copy(load, delivery)

    # As above.
    monkeypatch.setattr(CacheLoad, "_run", copy_later)
    producer, consumer = engine("producer"), engine("consumer")
    if is_put:
        producer.prefill("k", TOKENS)
    for name in ("one", "two"):
        consumer.add(name, TOKENS, fetch("k"))
    for _ in range(steps):
        consumer.step()
    if is_put and steps:
        assert has_come.wait(60)
    consumer.abort("one")
    consumer.step()
    may_copy.set()
    if not is_put:
        producer.prefill("k", TOKENS)
    assert consumer.run("two") == ["length"]
    check_served(producer, consumer, "two")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_first_is_aborted_with_the_cache_in_its_blocks(
    engine: Open, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """The engine has not heard of it, so it is in no prefix cache: the other one cannot have it."""
    producer, consumer = engine("producer"), engine("consumer", policy)
    producer.prefill("k", TOKENS)
    for name in ("one", "two"):
        consumer.add(name, TOKENS, fetch("k"))
    consumer.step()
    # vLLM asks in its next step; until then the load alone says that it has ended.
    (load,) = loader_of(consumer.worker)._loading.values()
    assert load.parts[0].done.wait(60)
    consumer.abort("one")
    assert consumer.run("two") == ["error" if policy == "fail" else "length"]
    (line,) = lines(caplog, "two")
    assert "a request that was aborted" in line
    consumer.settle()
    producer.settle()
    assert (consumer.used_blocks, producer.used_blocks) == (0, 0)


def test_both_requests_that_name_one_cache_are_aborted(engine: Open) -> None:
    producer, consumer = engine("producer"), engine("consumer")
    producer.prefill("k", TOKENS)
    for name in ("one", "two"):
        consumer.add(name, TOKENS, fetch("k"))
    for name in ("two", "one"):
        consumer.abort(name)
    consumer.settle()
    producer.settle()
    assert producer.used_blocks == 0


def test_the_sampled_token(engine: Open) -> None:
    """The fixture's own engine samples: what these tests stand on."""
    producer = engine("producer")
    producer.add("plain", TOKENS, None)
    assert producer.run("plain") == ["length"]
    assert SAMPLED


def test_the_worker_learns_who_is_preempted(engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the pass that may overwrite the blocks of its cache."""
    producer = engine("producer")
    producer.add("r", TOKENS, {"do_remote_decode": True}, tokens=4)
    producer.add("s", TOKENS[:-1], None, tokens=4)
    producer.step()
    named: list[set[str]] = []
    monkeypatch.setattr(
        producer.worker, "handle_preemptions", lambda step: named.append(step.preempted)
    )
    producer.step()
    producer.scheduler.reset_prefix_cache(reset_running_requests=True)
    producer.step()
    assert named == [set(), {"r"}]
    assert producer.run("r", "s") == ["length", "length"]
