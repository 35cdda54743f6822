"""Every behaviour of the conformance kit, over TCP and over Unix sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from zmq_fixtures import fresh_url

from omni_kvlink.connectors.control import listener as control_listener
from omni_kvlink.connectors.zmq import transport as zmq_transport
from omni_kvlink.testing import CONNECTOR_CHECKS
from omni_kvlink.testing.conformance import Check, run_check
from omni_kvlink.testing.peer_harness import ProcessPeer
from omni_kvlink.testing.rig import Rig

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPeer]:
    peer = ProcessPeer()
    yield peer
    peer.close()


@pytest.fixture(params=["tcp", "ipc", "tcp-small"])
def rig(
    request: pytest.FixtureRequest,
    process: ProcessPeer,
    sockets: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Rig:
    transport, _, small_chunks = request.param.partition("-")
    if small_chunks:  # also split the small payloads of the checks
        monkeypatch.setattr(control_listener, "EAGER", 0)
        monkeypatch.setattr(zmq_transport, "CHUNK", 1000)
    return Rig(lambda: fresh_url(transport, sockets), {}, process)


@pytest.mark.parametrize("check", CONNECTOR_CHECKS, ids=lambda check: check.__name__[6:])
def test_connector(check: Check, rig: Rig) -> None:
    run_check(check, rig)
