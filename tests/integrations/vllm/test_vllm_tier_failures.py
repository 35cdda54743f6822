"""Chunks that a tier cannot keep, find or load: they are computed, and counted; no request waits.

As in test_vllm_tier.py, an engine whose layers have read a wrong byte fails when it is closed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
pytest.importorskip("vllm.v1.kv_offload.tiering.async_lookup", reason="these are tiers of 0.32")

from omni_kvlink.integrations.vllm.tier import manager, transfers
from omni_kvlink.link import open_kept
from support.kept.kept_bytes import flip_kept
from support.vllm.engine_process import prompt
from support.vllm.steps import BLOCK, SteppedEngine
from support.vllm.tiers import CHUNK_BYTES, LENGTH, WHOLE, client_of, compute, counted, evict

if TYPE_CHECKING:
    from collections.abc import Iterable

# Reaches into _kept, _link: no word of the client names what it keeps.

Open = Callable[..., SteppedEngine]
TOKENS = prompt(LENGTH)
CHUNKS = WHOLE // BLOCK


@pytest.fixture
def offloaded(tier_engine: Open) -> SteppedEngine:
    """An engine that has offloaded `TOKENS`, and of whose blocks only the tier has them."""
    engine = tier_engine("shm://a")
    compute(engine, TOKENS)
    evict(engine)
    engine.reported.clear()
    return engine


def test_evicted_between_look_up_and_load(
    offloaded: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(offloaded.scheduler)
    get_many = client.get_many

    def late(keys: list[str]) -> Any:
        assert client.withdraw(keys[2])
        monkeypatch.setattr(client, "get_many", get_many)
        return get_many(keys)

    monkeypatch.setattr(client, "get_many", late)
    assert compute(offloaded, TOKENS) == 2 * BLOCK
    assert counted(offloaded) == {"loaded": CHUNKS - 1, "missed": 1, "stored": 1}


def flip_all(engine: SteppedEngine) -> None:
    """Flip a bit in each chunk that its tier keeps."""
    client = client_of(engine.scheduler)
    for name in client._kept.live():
        received = open_kept(client._link, name)
        assert received is not None
        [chunk] = received.data.tensors()
        assert isinstance(chunk, torch.Tensor)
        content = chunk.flatten().view(torch.uint8).numpy().tobytes()
        del chunk
        received.release()
        assert flip_kept(content) == 1


def test_a_flipped_bit(tier_engine: Open) -> None:
    engine = tier_engine("shm://a?inline=0")  # each chunk lies in the link's memory
    compute(engine, TOKENS)
    evict(engine)
    flip_all(engine)
    assert compute(engine, TOKENS) == 0
    assert counted(engine)["missed"] == CHUNKS
    evict(engine)
    compute(engine, TOKENS)  # and keep what is right in its place
    evict(engine)
    assert compute(engine, TOKENS) == WHOLE


def test_a_budget_smaller_than_a_chunk(tier_engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    engine = tier_engine("shm://a", budget=CHUNK_BYTES // 2)
    compute(engine, TOKENS)
    evict(engine)
    assert compute(engine, TOKENS) == 0
    assert counted(engine) == {"store_failed": 6 * CHUNKS}
    records = [each for each in caplog.records if each.name.endswith("tier.transfers")]
    [text] = [each.getMessage() for each in records]
    assert text.startswith("a chunk was not stored: ")
    assert "quota" in text


def test_the_least_recently_used_ones_are_evicted(tier_engine: Open) -> None:
    engine = tier_engine("shm://a", budget=64 * CHUNK_BYTES)
    for seed in range(20):
        compute(engine, prompt(LENGTH, seed=seed))
    assert compute(engine, prompt(LENGTH, seed=0)) == 0
    assert compute(engine, prompt(LENGTH, seed=18)) == WHOLE


def test_an_error_that_nobody_expects(
    offloaded: SteppedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise ZeroDivisionError("of the test")

    client = client_of(offloaded.scheduler)
    monkeypatch.setattr(client, "get_many", fail)
    monkeypatch.setattr(client, "put", fail)
    assert compute(offloaded, TOKENS) == 0
    assert counted(offloaded) == {"missed": CHUNKS, "store_failed": CHUNKS}
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert errors == [f"a job of {CHUNKS} chunks failed: ZeroDivisionError('of the test')"] * 2


def test_a_long_prompt_is_got_in_parts(
    offloaded: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "BATCH", 3 * CHUNK_BYTES)
    client, sizes = client_of(offloaded.scheduler), []
    get_many = client.get_many

    def counted_get(keys: Iterable[str]) -> Any:
        names = list(keys)
        sizes.append(len(names))
        return get_many(names)

    monkeypatch.setattr(client, "get_many", counted_get)
    assert compute(offloaded, TOKENS) == WHOLE
    assert sizes == [3, 1]


def test_the_primary_tier_is_emptied_amid_jobs(
    tier_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset waits for the jobs, since it frees the chunks that they read."""
    engine, is_waited_for = tier_engine("shm://a"), threading.Event()
    client = client_of(engine.scheduler)
    put = client.put

    def late(*given: Any, **options: Any) -> bool:
        is_waited_for.wait()
        return bool(put(*given, **options))

    def counted_wait(futures: Any) -> Any:
        is_waited_for.set()
        return wait(futures)

    monkeypatch.setattr(client, "put", late)
    monkeypatch.setattr(manager, "wait", counted_wait)
    engine.add("r", TOKENS, None)
    engine.run("r")
    for _ in range(3):  # what was computed last is offloaded then
        engine.step()
    try:
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    finally:
        is_waited_for.set()
    assert compute(engine, TOKENS) == WHOLE
    assert counted(engine)["loaded"] == CHUNKS


def test_closed_amid_jobs(tier_engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    """VLLM can unmap the primary tier then: nothing has a view of it."""
    engine = tier_engine("shm://a")
    engine.add("r", TOKENS, None)
    engine.run("r")
    engine.step()
    engine.scheduler.shutdown()
    assert [text for text in caplog.messages if "mmap" in text and "Failed" in text] == []
