"""Transfers by every feature, whose processes are killed and restarted, or leave: logs agree."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING, Any

import pytest

from support.network.campaign import PRODUCER, READERS, ROUNDS, Campaign, address, lookup_addresses
from support.network.evidence import DENIED, contradictions
from support.network.faulty_processes import Forker
from support.network.features import FEATURES, runs_over

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


READER_PATIENCE = 20.0
"""Seconds for which a reader waits for a payload that was lost."""
LEAVES = 0.4
"""How often a reader leaves a payload unread."""


@pytest.fixture(params=["shm", pytest.param("zmq+ipc", marks=pytest.mark.slow), "zmq+tcp", UCX])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(
    forker: Forker,
    transport: str,
    folder: str,
    logs: Path,
    seed: str,
    *,
    keys: int,
    to_kill: list[str],
    times: int,
) -> None:
    """One campaign, in a directory for its sockets; nothing may contradict its receipts."""
    options: dict[str, Any] = {"quota": 32 << 20}
    if transport == "shm":
        options["directory"] = folder
    campaign = Campaign(
        forker,
        logs,
        address(transport, folder),
        options,
        keys,
        features=[feature for feature in FEATURES if runs_over(feature, transport)],
        leaves=LEAVES,
        seed=seed,
        lookups=lookup_addresses(transport, folder),
        patience=READER_PATIENCE,
    )
    rng = random.Random(seed)
    kills = [("kill", rng.choice(to_kill)) for _ in range(times)]
    try:
        records = campaign.run(rng, kills)
    finally:
        campaign.close()
    assert list(contradictions(campaign.orders, records)) == [], f"seed {seed!r}, killed {kills}"
    deaths = [kind for kind, _ in campaign.hits if kind == "death"]
    assert sum(record.killed for record in records) == times + len(deaths)
    had = {(record.peer, key) for record in records for key, _ in record.reads}
    # On a busy machine much expires: its reader comes too late.
    denied = {one.key for record in records for one in record.entries if one.event in DENIED}
    orders = [(peer, key) for key, peers in campaign.orders.items() for peer in peers]
    orders = [(peer, key) for peer, key in orders if key not in denied]
    assert len(had.intersection(orders)) > 0.7 * len(orders) > 0, "most of it arrives"


@pytest.mark.parametrize("to_kill", [READERS, [PRODUCER]], ids=["readers", "producer"])
def test_killed_and_restarted(
    forker: Forker, transport: str, socket_dir: str, tmp_path: Path, to_kill: list[str]
) -> None:
    run(
        forker,
        transport,
        socket_dir,
        tmp_path,
        f"{to_kill}",
        keys=40,
        to_kill=list(to_kill),
        times=3,
    )


def test_readers_that_leave(
    forker: Forker, transport: str, socket_dir: str, tmp_path: Path
) -> None:
    """By an exception, a timeout, or their death in the middle; nobody else ends them."""
    run(forker, transport, socket_dir, tmp_path, "leave", keys=30, to_kill=[], times=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_all_are_killed_and_restarted(
    forker: Forker, transport: str, socket_dir: str, tmp_path: Path, seed: int
) -> None:
    everybody = [PRODUCER, *READERS]
    run(forker, transport, socket_dir, tmp_path, str(seed), keys=200, to_kill=everybody, times=12)
