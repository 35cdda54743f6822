"""A decode engine offers a prompt and its answer; the next turn's prefill computes the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from omni_kvlink.integrations.vllm.params import TransferParams
from support.vllm.cache_layers import BLOCK
from support.vllm.engine_process import prompt
from support.vllm.halves import saver_of
from support.vllm.steps import SAMPLED, SteppedEngine

TOKENS, MORE = prompt(3 * BLOCK + 7, seed=3), prompt(BLOCK + 5, seed=4)
DECODED = 40
BOTH = [*TOKENS, *[SAMPLED] * DECODED]
OFFERED = 4 * BLOCK
"""Tokens of the whole blocks of `BOTH`."""

Open = Callable[..., SteppedEngine]


@pytest.fixture(params=["async", "sync"])
def load(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
def engines(engine: Open, load: str) -> tuple[SteppedEngine, SteppedEngine]:
    """A prefill and a decode engine, which read from each other."""
    prefill = engine("both", caching=False, peers=["shm://d"], load=load)
    decode = engine("both", url="shm://d", offer_decoded=True)
    return prefill, decode


def first_turn(prefill: SteppedEngine, decode: SteppedEngine) -> dict[str, Any]:
    """What the decode engine answers to the first turn, in addition to the tokens."""
    decode.add("turn", TOKENS, prefill.prefill("first", TOKENS), tokens=DECODED)
    assert decode.run("turn") == ["length"]
    decode.settle()
    assert decode.used_blocks == 0, "a cache that is offered keeps no block"
    prefill.settle()
    answer: dict[str, Any] = decode.ended["turn"][1]
    return answer


def test_the_next_turn(engines: tuple[SteppedEngine, SteppedEngine], load: str) -> None:
    prefill, decode = engines
    offered = first_turn(prefill, decode)
    assert offered["remote_num_tokens"] == OFFERED
    params = prefill.prefill("next", BOTH + MORE, **offered)
    assert prefill.cached["next"] == OFFERED - (BLOCK if load == "sync" else 0)
    assert prefill.counts["received"] == 1
    decode.add("next", BOTH + MORE, params, tokens=2)
    assert decode.run("next") == ["length"]
    assert decode.counts["received"] == 2
    for each in engines:
        each.settle()
        assert each.used_blocks == 0
    assert decode.counts["sent"] == 1


def test_another_history(engines: tuple[SteppedEngine, SteppedEngine]) -> None:
    """The answer was changed: its cache is refused, and the request fails alone."""
    prefill, decode = engines
    offered = first_turn(prefill, decode)
    prefill.add("next", [*BOTH[:-20], 9, *BOTH[-19:], *MORE], offered)
    assert prefill.run("next") == ["error"]
    prefill.add("plain", TOKENS, None)
    assert prefill.run("plain") == ["length"]
    prefill.settle()
    assert prefill.used_blocks == 0


@pytest.mark.parametrize("ended", ["aborted", "short", "not loaded"])
def test_nothing_is_offered(engine: Open, ended: str) -> None:
    """Of a request that was aborted, of less than a block, and of a prompt that was not loaded."""
    prefill, decode = engine("producer"), engine("both", url="shm://d", offer_decoded=True)
    tokens = prompt(5) if ended == "short" else TOKENS
    params = None if ended == "not loaded" else prefill.prefill("first", tokens)
    decode.add("turn", tokens, params, tokens=8)
    if ended == "aborted":
        decode.step_until(lambda: decode.counts.get("received"))
        decode.step()
        decode.abort("turn")
    else:
        assert decode.run("turn") == ["length"]
        assert decode.ended["turn"][1] is None
    decode.settle()
    assert decode.used_blocks == 0
    # What a saver keeps of caches that were read costs memory, and shows nowhere.
    assert not saver_of(decode.worker)._receipts


WRONG = [
    ({"remote_num_tokens": 1 << 20}, "remote_num_tokens is 1048576, not an integer from 1 to 103"),
    ({"remote_num_tokens": True}, "remote_num_tokens is True"),
    ({"remote_num_tokens": -1}, "remote_num_tokens is -1"),
    ({"remote_request_id": ""}, "remote_request_id is '', not the id"),
    ({"remote_request_id": None}, "remote_request_id is None, not the id"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_a_wrong_turn(engine: Open, wrong: dict[str, Any], text: str) -> None:
    """It ends as the policy says, and nothing else does."""
    prefill = engine("both")
    params = {"do_remote_decode": True, "remote_request_id": "k", "remote_num_tokens": BLOCK}
    prefill.add("bad", TOKENS, {**params, **wrong})
    request = prefill.scheduler.requests["bad"]
    assert text in TransferParams.read(request, produces=True, consumes=True).error
    assert prefill.run("bad") == ["error"]
    prefill.add("plain", TOKENS, None)
    assert prefill.run("plain") == ["length"]


@pytest.mark.timeout(900)
def test_tokens_of_two_turns(start: Any) -> None:
    """With a model: the second turn's tokens are those of an engine that computes all of it."""
    prefill = start("p", "both", extra={"peers": ["shm://d"]})
    decode = start("d", "both", extra={"offer_decoded": True})
    first = decode.generate(TOKENS, prefill.prefill(TOKENS), tokens=DECODED)
    history = [*TOKENS, *first["tokens"], *MORE]
    for engine in (decode, prefill):
        engine.call("settle")
    assert prefill.call("forget")
    second = prefill.generate(history, first["params"], tokens=1)
    assert second["cached"] == OFFERED
    assert prefill.count("received") == 1
    got = decode.generate(history, second["params"])
    decode.call("settle")
    assert decode.call("forget")
    assert got["tokens"] == decode.generate(history)["tokens"]
