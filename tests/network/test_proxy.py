"""Links through a harmful proxy: the right bytes, or a typed error in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink, Receipt, WireError
from omni_kvlink.connectors.control import monitored_socket as zmq_sockets
from omni_kvlink.connectors.runtime import consumer as runtime_consumer
from omni_kvlink.testing.caches import sized
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink, ThreadPeer
from omni_kvlink.testing.rig import until, until_freed
from support.connectors.key_files import KeyFiles
from support.connectors.zmq_addresses import free_port
from support.network.campaign import ROUNDS
from support.network.gets import Get, insist
from support.network.hosts import HAS_UCX
from support.network.proxy import ENDING, FALSE, HARMLESS, Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
SIZES = (200, 20_000, 300_000, 1_500_000)
COUNT = 12
TIMEOUT = 1.0
"""Of gets whose bytes are harmed; they may time out."""
LINKS = ["zmq+tcp, open", "zmq+tcp, encrypted"]
if HAS_UCX:
    LINKS.append("ucx, encrypted")


class ProxyFixture:
    """A producer, and a reader that connects through a proxy."""

    def __init__(
        self, scheme: str, producer_options: dict[str, Any], consumer_options: dict[str, Any]
    ):
        self.is_encrypted = "keys" in producer_options
        self.mean = 500_000.0 if scheme == "zmq+tcp" else 1_000.0  # the rest goes by UCX
        port = free_port()
        how: dict[str, Any] = {"quota": 64 << 20, "trusted_network": scheme == "ucx"}
        how["lanes"] = 0  # they would go round the proxy; tests of lanes have a relay of their own
        self.producer = KVLink.serve(f"{scheme}://127.0.0.1:{port}", **how, **producer_options)
        self.proxy = Proxy(port)
        self._peer = ThreadPeer(LinkCommands())
        self.reader = RemoteLink(self._peer, "r")
        url = f"{scheme}://127.0.0.1:{self.proxy.port}"
        self.reader.call("connect", url=url, timeout=PATIENCE, **how, **consumer_options)
        self.receipts: list[Receipt] = []

    def transfer(self, seed: str, timeout: float) -> list[Get]:
        """Put and get payloads of every size, four at a time; return the ended gets."""
        gets: list[Get] = []
        for number in range(COUNT):
            recipe = sized(f"{seed}/{number}", SIZES[number % 4], seed=number)
            self.receipts.append(self.producer.put(recipe.make()))
            gets.append(Get(self.reader, recipe, timeout))
            if number % 4 == 3:
                for get in gets[-4:]:
                    get.arrived()
        return gets

    def close(self) -> None:
        self._peer.close()
        self.producer.close()
        self.proxy.close()


@pytest.fixture(params=LINKS)
def fixture(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ProxyFixture]:
    if request.function is test_slow:  # no connection ends, however busy the machine is
        monkeypatch.setattr(zmq_sockets, "HEARTBEAT_TIMEOUT_MS", 3_600_000)
        monkeypatch.setattr(zmq_sockets, "HANDSHAKE_MS", 3_600_000)
    else:
        monkeypatch.setattr(zmq_sockets, "HEARTBEAT_MS", 100)
        monkeypatch.setattr(zmq_sockets, "HEARTBEAT_TIMEOUT_MS", 1500)
    # No setting: a busy machine may take longer to connect again than it allows.
    monkeypatch.setattr(runtime_consumer, "_RECONNECT_SECONDS", 60.0)
    scheme, how = request.param.split(", ")
    key_files = KeyFiles(tmp_path)
    keys = (
        (key_files.producer_options, key_files.consumer_options())
        if how == "encrypted"
        else ({"insecure": True}, {"insecure": True})
    )
    fixture = ProxyFixture(scheme, *keys)
    yield fixture
    fixture.close()


def transfer_under(fixture: ProxyFixture, harm: str, seed: str, mean: float) -> list[Get]:
    """Return the gets during this harm, and check that the link works afterwards."""
    print("seed", seed)
    fixture.proxy.start_harm(harm, seed, mean)
    gets = fixture.transfer(seed, PATIENCE if harm == HARMLESS else TIMEOUT)
    assert fixture.proxy.counts[harm] > 0, "no harm was done"
    fixture.proxy.stop_harm()
    recipe = sized(f"{seed}/after", 100_000)
    fixture.receipts.append(fixture.producer.put(recipe.make()))
    insist(fixture.reader, recipe)
    return gets


def check_the_end(fixture: ProxyFixture) -> None:
    """Check that nothing waits for a closed reader, and that falsified connections ended."""
    if fixture.is_encrypted:
        for connection in fixture.proxy.connections:
            if connection.falsified:
                until(connection.has_ended, "a falsified connection ended")
    fixture.reader.call("close")
    until(lambda: fixture.producer.stats()["readers"] == 0, "the producer noticed")
    for receipt in fixture.receipts:
        assert receipt.state in ("released", "failed", "committed"), receipt
        if not receipt.done:
            fixture.producer.abort(receipt.key)
    until_freed(fixture.producer)


def check_errors(fixture: ProxyFixture, gets: list[Get]) -> None:
    """Check that falsified bytes of an encrypted link are never parsed as a message."""
    errors = [get.future.exception() for get in gets]
    if fixture.is_encrypted:
        assert [error for error in errors if isinstance(error, WireError)] == []


def test_slow(fixture: ProxyFixture) -> None:
    """Late bytes in other pieces are the bytes that were sent."""
    arrived = [get.arrived() for get in transfer_under(fixture, HARMLESS, HARMLESS, 1)]
    assert all(arrived)
    check_the_end(fixture)


@pytest.mark.parametrize("harm", [*ENDING, *FALSE])
def test_harm(fixture: ProxyFixture, harm: str) -> None:
    check_errors(fixture, transfer_under(fixture, harm, harm, fixture.mean))
    check_the_end(fixture)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("harm", [*ENDING, *FALSE])
def test_harm_for_long(fixture: ProxyFixture, harm: str, seed: int) -> None:
    for turn in range(4):
        gets = transfer_under(fixture, harm, f"{harm}.{seed}.{turn}", fixture.mean / 10**turn)
        check_errors(fixture, gets)
    check_the_end(fixture)
