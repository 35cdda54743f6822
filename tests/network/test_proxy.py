"""Through a proxy that delays, cuts, stalls, falsifies: right bytes, or a typed error in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gets import Get, insist
from hosts import HAS_UCX
from key_fixtures import Safe
from proxy import ENDING, FALSE, HARMLESS, Proxy
from zmq_fixtures import free_port

from omni_kvlink import KVLink, Receipt, WireError
from omni_kvlink.connectors.control import monitored_socket as zmq_sockets
from omni_kvlink.testing.memory_checks import sized
from omni_kvlink.testing.rig import PATIENCE, Remote, ThreadPeer, until, until_freed

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
SIZES = (200, 20_000, 300_000, 1_500_000)
COUNT = 12
TIMEOUT = 2.0
OVER = 2.0
"""Seconds in which a connection ends whose bytes were falsified."""
LINKS = ["zmq+tcp, open", "zmq+tcp, encrypted"]
if HAS_UCX:
    LINKS.append("ucx, encrypted")


class Bed:
    """A producer, the proxy before it, and a reader that knows nothing of that."""

    def __init__(self, scheme: str, serving: dict[str, Any], reading: dict[str, Any]):
        self.is_encrypted = bool(serving)
        self.mean = 500_000.0 if scheme == "zmq+tcp" else 1_000.0  # the rest goes by UCX
        port = free_port()
        how = {"quota": 64 << 20}
        self.producer = KVLink.serve(f"{scheme}://127.0.0.1:{port}", **how, **serving)
        self.proxy = Proxy(port)
        self._peer = ThreadPeer()
        self.reader = Remote(self._peer, "r")
        url = f"{scheme}://127.0.0.1:{self.proxy.port}"
        self.reader.do("connect", url=url, timeout=PATIENCE, **how, **reading)
        self.receipts: list[Receipt] = []

    def transfer(self, seed: str) -> list[Get]:
        """Put and get payloads of every size, four at a time; all have ended."""
        gets: list[Get] = []
        for number in range(COUNT):
            recipe = sized(f"{seed}/{number}", SIZES[number % 4], seed=number)
            self.receipts.append(self.producer.put(recipe.make()))
            gets.append(Get(self.reader, recipe, TIMEOUT))
            if number % 4 == 3:
                for get in gets[-4:]:
                    get.arrived()
        return gets

    def close(self) -> None:
        self._peer.end()
        self.producer.close()
        self.proxy.close()


@pytest.fixture(params=LINKS)
def bed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bed]:
    monkeypatch.setattr(zmq_sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(zmq_sockets, "GIVEN_UP_MS", 500)
    scheme, how = request.param.split(", ")
    safe = Safe(tmp_path)
    keys = (safe.serving, safe.reading()) if how == "encrypted" else ({}, {})
    bed = Bed(scheme, *keys)
    yield bed
    bed.close()


def suffer(bed: Bed, harm: str, seed: str, mean: float) -> list[Get]:
    """What came of transfers under this harm; then all must be well again."""
    print("seed", seed)
    bed.proxy.misbehave(harm, seed, mean)
    gets = bed.transfer(seed)
    assert bed.proxy.counts[harm] > 0, "no harm was done"
    bed.proxy.behave()
    recipe = sized(f"{seed}/after", 100_000)
    bed.receipts.append(bed.producer.put(recipe.make()))
    insist(bed.reader, recipe)
    return gets


def check_the_end(bed: Bed) -> None:
    """Nothing hangs on a reader that is gone, and nothing false was deciphered."""
    bed.reader.do("close")
    until(lambda: bed.producer.stats()["readers"] == 0, "the producer noticed")
    for receipt in bed.receipts:
        assert receipt.state in ("released", "failed", "committed"), receipt
        if not receipt.done:
            bed.producer.abort(receipt.key)
    until_freed(bed.producer)
    if bed.is_encrypted:
        for connection in bed.proxy.connections:
            if connection.falsified:
                assert connection.ended
                assert connection.ended - connection.falsified < OVER


def check_errors(bed: Bed, gets: list[Get]) -> None:
    """A false byte ends an encrypted connection; it never gets as far as to be a wrong message."""
    errors = [get.future.exception() for get in gets]
    if bed.is_encrypted:
        assert [error for error in errors if isinstance(error, WireError)] == []


@pytest.mark.parametrize("seed", range(2))
def test_slow(bed: Bed, seed: int) -> None:
    """What comes late and in other pieces is what was sent."""
    arrived = [get.arrived() for get in suffer(bed, HARMLESS, str(seed), 1)]
    assert all(arrived)
    check_the_end(bed)


@pytest.mark.parametrize("harm", [*ENDING, *FALSE])
def test_harm(bed: Bed, harm: str) -> None:
    check_errors(bed, suffer(bed, harm, harm, bed.mean))
    check_the_end(bed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("harm", [*ENDING, *FALSE])
def test_harm_for_long(bed: Bed, harm: str, seed: int) -> None:
    for turn in range(4):
        gets = suffer(bed, harm, f"{harm}.{seed}.{turn}", bed.mean / 10**turn)
        check_errors(bed, gets)
    check_the_end(bed)
