"""`vllm serve` twice behind vllm-router: tokens, clients that leave, restarts, a drain."""

from __future__ import annotations

import importlib.util
import random
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if importlib.util.find_spec("vllm_router") is None or importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm or vllm-router is not installed: make test-vllm", allow_module_level=True)

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from fleet_faults import TOKENS, Campaign, Fault, answers, make_prompts

from omni_kvlink.testing.rig import until
from support.vllm.fleet import DECODE, PREFILL, ROUTER, Fleet, complete, stream

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(1800)

RECEIVED, FAILED = "vllm:omni_kvlink_received_total", "vllm:omni_kvlink_load_failed_total"
PROMPTS = make_prompts(random.Random(1), 24)


@pytest.fixture(scope="module")
def expected(model: Path, directory: Path) -> list[list[int]]:
    """What one engine alone answers to `PROMPTS`."""
    return answers(model, directory, PROMPTS)


@pytest.fixture(scope="module")
def fleet(model: Path, directory: Path, expected: object) -> Iterator[Fleet]:
    """Caches that nobody reads stay for 10 s."""
    fleet = Fleet(model, directory, ttl=10.0)
    try:
        fleet.start(PREFILL, DECODE)
        fleet.start(ROUTER)
        yield fleet
    finally:
        fleet.close()


def test_tokens_of_one_engine(fleet: Fleet, expected: list[list[int]]) -> None:
    """Each cache is loaded, and every token is that of an engine alone."""
    router, decode = fleet.servers[ROUTER], fleet.servers[DECODE]
    received = decode.metric(RECEIVED)
    for prompt, answer in zip(PROMPTS[:6], expected[:6], strict=True):
        last = complete(router.port, prompt, TOKENS)
        assert (last.error, last.tokens, last.reason) == ("", answer, "length")
    until(lambda: decode.metric(RECEIVED) == received + 6, "six caches were loaded")
    assert decode.metric(FAILED) == 0
    for server in (fleet.servers[PREFILL], decode):
        server.until_all_blocks_are_free()


def test_a_client_leaves(fleet: Fleet, expected: list[list[int]]) -> None:
    """At once, at its first token, and later: no block stays."""
    router = fleet.servers[ROUTER]
    for number, tokens in ((6, 0), (7, 1), (8, 9)):
        with closing(stream(router.port, PROMPTS[number], 900 - len(PROMPTS[number]))) as states:
            last = next(state for state in states if len(state.tokens) >= tokens)
        assert last.tokens[:TOKENS] == expected[number][: len(last.tokens)]
        assert not last.reason
    for side in (PREFILL, DECODE):
        fleet.servers[side].until_all_blocks_are_free()
    assert complete(router.port, PROMPTS[9], TOKENS).tokens == expected[9]


def test_a_producer_drains(fleet: Fleet, expected: list[list[int]]) -> None:
    """SIGTERM: it takes no new prompt, and ends when the caches that it announced are read."""
    prefill, decode = fleet.servers[PREFILL], fleet.servers[DECODE]
    received = decode.metric(RECEIVED)
    send: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}}
    announced = complete(prefill.port, PROMPTS[10], 1, **send)
    assert announced.params["remote_url"] == "shm://fleet-prefill"
    prefill.process.send_signal(signal.SIGTERM)
    until(lambda: "start mode=drain" in prefill.output(), "it drains", 60)
    assert not complete(prefill.port, PROMPTS[11], 1, **send).params
    last = complete(decode.port, PROMPTS[10], TOKENS, kv_transfer_params=announced.params)
    assert (last.tokens, last.reason) == (expected[10], "length")
    until(lambda: decode.metric(RECEIVED) == received + 1, "the cache was loaded")
    assert prefill.process.wait(120) == 0
    fleet.start(PREFILL)
    router = fleet.servers[ROUTER]
    until(
        lambda: complete(router.port, PROMPTS[11], TOKENS).tokens == expected[11], "it serves", 60
    )


def test_faults(fleet: Fleet, expected: list[list[int]]) -> None:
    """The campaign of `benchmarks/fleet_faults.py`, with two clients that leave and two kills."""
    faults = {
        2: Fault("abort", 5),
        5: Fault(f"kill {PREFILL}", 0),
        11: Fault("abort", 0),
        15: Fault(f"kill {DECODE}", 3),
    }
    campaign = Campaign(fleet, PROMPTS, expected)
    campaign.run(faults)
    assert not campaign.problems
    assert campaign.faults[f"kill {PREFILL}"] == campaign.faults[f"kill {DECODE}"] == 1
    assert sum(campaign.ends.values()) == len(PROMPTS)
    assert campaign.ends["right"] >= len(PROMPTS) - 10
