"""200 transfers while readers or the producer are killed and restarted: what is on disk agrees."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import PRODUCER, READERS, Campaign, Zygote
from evidence import complaints
from zmq_fixtures import free_port

UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("ucxx") is None, reason="pip install 'omni-kvlink[ucx]'"
    ),
)
KILLS = 6


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


def address(transport: str, directory: str) -> str:
    if transport == "shm":
        return "shm://campaign"
    if transport == "zmq+ipc":
        return f"zmq+ipc://{directory}/campaign.sock"
    return f"{transport}://127.0.0.1:{free_port()}"


@pytest.fixture(params=["shm", "zmq+ipc", "zmq+tcp", UCX])
def campaign(
    request: pytest.FixtureRequest, zygote: Zygote, battlefield: str, tmp_path: Path
) -> Iterator[Campaign]:
    options = {"directory": battlefield} if request.param == "shm" else {}
    options["quota"] = 32 << 20
    campaign = Campaign(zygote, tmp_path, address(request.param, battlefield), options)
    yield campaign
    campaign.close()


def judge(campaign: Campaign, seed: str, victims: list[str]) -> None:
    rng = random.Random(seed)
    kills = [rng.choice(victims) for _ in range(KILLS)]
    witnesses = campaign.run(rng, kills)
    assert list(complaints(campaign.orders, witnesses)) == [], f"seed {seed!r}, killed {kills}"
    assert sum(witness.killed for witness in witnesses) == KILLS
    had = {(witness.who, key) for witness in witnesses for key, _ in witness.reads}
    assert len(had) > 0.9 * sum(map(len, campaign.orders.values())), "most of it arrives"


@pytest.mark.parametrize("victims", [READERS, [PRODUCER]], ids=["readers", "producer"])
def test_killed_and_restarted(campaign: Campaign, victims: list[str]) -> None:
    judge(campaign, f"{victims}", victims)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_everybody_is_killed_and_restarted(campaign: Campaign, seed: int) -> None:
    judge(campaign, str(seed), [PRODUCER, *READERS])
