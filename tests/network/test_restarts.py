"""Transfers while readers or the producer are killed and restarted: the logs agree."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING, Any

import pytest
from campaign import PRODUCER, READERS, ROUNDS, Campaign, Forker, address
from evidence import contradictions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("ucxx") is None, reason="pip install 'omni-kvlink[ucx]'"
    ),
)


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture(params=["shm", "zmq+ipc", "zmq+tcp", UCX])
def campaign(
    request: pytest.FixtureRequest, forker: Forker, socket_dir: str, tmp_path: Path
) -> Iterator[Campaign]:
    options: dict[str, Any] = {"quota": 32 << 20}
    if request.param == "shm":
        options["directory"] = socket_dir
    keys = 200 if request.node.get_closest_marker("slow") else 80
    campaign = Campaign(forker, tmp_path, address(request.param, socket_dir), options, keys)
    yield campaign
    campaign.close()


def judge(campaign: Campaign, seed: str, to_kill: list[str], times: int) -> None:
    rng = random.Random(seed)
    kills = [("kill", rng.choice(to_kill)) for _ in range(times)]
    records = campaign.run(rng, kills)
    assert list(contradictions(campaign.orders, records)) == [], f"seed {seed!r}, killed {kills}"
    assert sum(record.killed for record in records) == times
    had = {(record.peer, key) for record in records for key, _ in record.reads}
    assert len(had) > 0.9 * sum(map(len, campaign.orders.values())), "most of it arrives"


@pytest.mark.parametrize("to_kill", [READERS, [PRODUCER]], ids=["readers", "producer"])
def test_killed_and_restarted(campaign: Campaign, to_kill: list[str]) -> None:
    judge(campaign, f"{to_kill}", to_kill, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_all_are_killed_and_restarted(campaign: Campaign, seed: int) -> None:
    judge(campaign, str(seed), [PRODUCER, *READERS], 6)
