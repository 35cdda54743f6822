"""What goes wrong with a cache is that request's end or its recomputation, and nobody else's."""

from __future__ import annotations

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support import FOLDER
from support.vllm.engine_process import BLOCK, EngineProcess, prompt

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]

FLIPPING = FOLDER / "vllm" / "flipping.py"
TOKENS = prompt(3 * BLOCK + 7, seed=3)
OTHERS = prompt(2 * BLOCK + 9, seed=4)


@pytest.fixture(scope="module")
def producer(start: Any) -> Any:
    """One whose payloads named `bad…` are flipped on their way."""
    engine = start("p", "producer", extra={"url": "flip://p"}, script=FLIPPING)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["fail", "recompute"])
def policy(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(scope="module", params=["sync", "async"])
def consumer(request: pytest.FixtureRequest, start: Any, producer: Any, policy: str) -> Any:
    engine = start("d", "consumer", policy=policy, extra={"load": request.param, "timeout": 20})
    engine.cold = {name: engine.generate(ids)["tokens"] for name, ids in PROMPTS.items()}
    assert engine.call("forget")
    yield engine
    engine.close()


PROMPTS = {"tokens": TOKENS, "others": OTHERS}


def fetch(key: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": key, "remote_url": "shm://p"}


def check(consumer: Any, policy: str, names: tuple[str, str], over: dict[str, Any]) -> None:
    """The first request ended as the policy says, the second, beside it, as ever."""
    spoilt, healthy = (over[name] for name in names)
    assert (healthy["reason"], healthy["tokens"]) == ("length", consumer.cold["others"])
    if policy == "fail":
        assert (spoilt["reason"], spoilt["tokens"]) == ("error", [])
    else:
        assert (spoilt["reason"], spoilt["tokens"]) == ("length", consumer.cold["tokens"])


def run_both(consumer: Any, first: dict[str, Any]) -> tuple[tuple[str, str], dict[str, Any]]:
    names = (f"one-{time.monotonic_ns()}", f"two-{time.monotonic_ns()}")
    for name, ids, params in zip(names, (TOKENS, OTHERS), (first, None), strict=True):
        consumer.call("add", name=name, prompt=ids, params=params)
    over = consumer.call("run", names=names)
    assert consumer.call("forget")
    return names, over


def test_a_flipped_bit(producer: EngineProcess, consumer: Any, policy: str) -> None:
    """Caught by the digest, which names the layer; the producer hears of it, too."""
    free, corrupt = consumer.call("free_blocks"), consumer.count("load_corrupt")
    key = f"bad-{time.monotonic_ns()}"
    producer.prefill(TOKENS, transfer_id=key)
    names, over = run_both(consumer, fetch(key))
    check(consumer, policy, names, over)
    assert consumer.count("load_corrupt") == corrupt + 1
    output = next(
        line for line in consumer.output().splitlines() if key in line and "not loaded" in line
    )
    assert "tensor 'model.layers.1." in output
    assert "are not those committed" in output
    producer.call("settle")
    assert f"payload '{key}' failed: a reader rejected it" in producer.output()
    assert consumer.call("free_blocks") == free


def test_the_cache_of_another_prompt(producer: EngineProcess, consumer: Any, policy: str) -> None:
    key = f"other-{time.monotonic_ns()}"
    producer.prefill(prompt(len(TOKENS), seed=99), transfer_id=key)
    names, over = run_both(consumer, fetch(key))
    check(consumer, policy, names, over)
    assert f"computed '{key}' from another prompt" in consumer.output()
    producer.call("settle")


def test_a_place_that_is_no_peer(consumer: Any, policy: str) -> None:
    """What a request says does not make the engine connect to anywhere."""
    unknown_url = fetch("any") | {"remote_url": "shm://stranger"}
    names, over = run_both(consumer, unknown_url)
    check(consumer, policy, names, over)
    assert "'shm://stranger' is not one of this engine's peers: shm://p" in consumer.output()


def test_the_producer_gives_up(producer: EngineProcess, consumer: Any, policy: str) -> None:
    """Who waits for a prompt whose request was aborted is told at once."""
    key = f"aborted-{time.monotonic_ns()}"
    producer.call(
        "add", name=key, prompt=TOKENS, params={"do_remote_decode": True, "transfer_id": key}
    )
    producer.call("abort", name=key)
    producer.call("settle")
    began = time.monotonic()
    names, over = run_both(consumer, fetch(key))
    assert time.monotonic() - began < 10, "it waited for its deadline"
    check(consumer, policy, names, over)
    assert "the request that computes it ended: abort" in consumer.output()


def test_the_producer_is_killed(start: Any, consumer: Any, policy: str, producer: Any) -> None:
    """While the request waits: it ends as the policy says. A new producer is found again."""
    key = f"late-{time.monotonic_ns()}"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_both, consumer, fetch(key))
        until_waiting(producer, running)
        moment = time.monotonic()
        producer.kill()
        names, over = running.result(60)
    assert time.monotonic() - moment < 10, "it waited for its deadline"
    check(consumer, policy, names, over)
    producer.close()
    successor = start("p", "producer", extra={"url": "flip://p"}, script=FLIPPING)
    producer.__dict__.update(vars(successor))  # for the tests to come
    got = consumer.generate(TOKENS, fetch(producer.prefill(TOKENS)["transfer_id"]))
    assert (got["reason"], got["tokens"]) == ("length", consumer.cold["tokens"])
    assert got["cached"] >= 3 * BLOCK
    consumer.call("forget")


def until_waiting(killed: EngineProcess, running: Any) -> None:
    """The consumer's want has reached the producer."""
    reached = threading.Event()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and not running.done():
        if killed.call("waiting"):
            return
        reached.wait(0.05)
    raise AssertionError("nobody waits at the producer")
