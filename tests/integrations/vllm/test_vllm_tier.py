"""Tiered offloading, without a model: what left the primary tier comes back, or is computed again.

The layers of `SteppedEngine` compare what they find in the blocks with what the tokens before have
written there; an engine that has loaded a wrong byte fails when it is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
pytest.importorskip("vllm.v1.kv_offload.tiering.async_lookup", reason="these are tiers of 0.32")

from omni_kvlink.kept import StoreClient
from support.vllm.cache_layers import chunked, full, latent, sliding, uniform
from support.vllm.engine_process import prompt
from support.vllm.steps import BLOCK, SteppedEngine
from support.vllm.tiers import LENGTH, WHOLE, compute, counted, evict

Open = Callable[..., SteppedEngine]


GROUPS = {
    "full": [full("layer 0", "layer 1")],
    "window": [full("layer 0"), sliding(40, "layer 1")],
    "chunks": [full("layer 0"), chunked(64, "layer 1")],
    "latent": [latent("layer 0", "layer 1")],
    "latents of two sizes": [uniform("layer 0", "layer 1")],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_evicted_and_loaded_again(tier_engine: Open, groups: Any, layout: str) -> None:
    engine = tier_engine("shm://a", chunks=12, steps={"groups": groups, "layout": layout})
    tokens = prompt(LENGTH)
    assert compute(engine, tokens) == 0
    evict(engine)
    assert compute(engine, tokens) == WHOLE
    assert counted(engine)["loaded"] >= WHOLE // BLOCK


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_of_several_ranks(tier_engine: Open, tensor: int, pipeline: int) -> None:
    engine = tier_engine("shm://a", steps={"tensor": tensor, "pipeline": pipeline})
    compute(engine, prompt(LENGTH))
    evict(engine)
    assert compute(engine, prompt(LENGTH)) == WHOLE


def test_chunks_of_several_blocks(tier_engine: Open) -> None:
    """Two of five blocks have no chunk: they are computed."""
    engine = tier_engine("shm://a", extra={"blocks_per_chunk": 3})
    compute(engine, prompt(5 * BLOCK))
    evict(engine)
    assert compute(engine, prompt(5 * BLOCK)) == 3 * BLOCK


@pytest.mark.parametrize("scheme", ["shm://", "zmq+ipc://{sockets}/", "auto://"])
def test_of_another_engine(tier_engine: Open, sockets: str, scheme: str) -> None:
    """And one list of URLs is for both."""
    peers = [scheme.format(sockets=sockets) + name for name in ("a", "b")]
    one = tier_engine(peers[0], peers=peers, timeout=1)
    other = tier_engine(peers[1], peers=peers, timeout=60)
    compute(one, prompt(LENGTH))
    assert compute(other, prompt(LENGTH)) == WHOLE
    assert counted(other)["loaded"] == WHOLE // BLOCK
    assert compute(one, prompt(LENGTH, seed=1)) == 0


@pytest.mark.parametrize(
    "change",
    [{"model": "another"}, {"adapter": "sql-v3"}, {"salt": "tenant 2"}],
    ids=lambda change: next(iter(change)),
)
def test_of_another_identity(tier_engine: Open, change: dict[str, str]) -> None:
    one = tier_engine("shm://a")
    other = tier_engine("shm://b", peers=["shm://a"], timeout=60, **change)
    compute(one, prompt(LENGTH))
    assert compute(other, prompt(LENGTH)) == 0


def test_of_another_layout(tier_engine: Open) -> None:
    """The bytes of one chunk are as many in both."""
    one = tier_engine("shm://a", steps={"layout": "LBHNC"})
    other = tier_engine("shm://b", peers=["shm://a"], timeout=60, steps={"layout": "LBNHC"})
    compute(one, prompt(LENGTH))
    assert compute(other, prompt(LENGTH)) == 0


def test_the_start_waits_for_stores_and_peers(
    tier_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first request needs is found then."""
    wait, connected = StoreClient.wait_connected, list[bool]()

    def counted_wait(client: StoreClient, *, timeout: float) -> bool:
        connected.append(wait(client, timeout=timeout))
        return connected[-1]

    tier_engine("shm://a")
    monkeypatch.setattr(StoreClient, "wait_connected", counted_wait)
    tier_engine("shm://b", peers=["shm://a"], timeout=60)
    assert connected == [True]
