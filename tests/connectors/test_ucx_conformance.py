"""Every behaviour of the conformance kit, its bytes moved by UCX."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from zmq_places import free_port

from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.fetch import Pace
from omni_kvlink.connectors.ucx import consumer as ucx_consumer
from omni_kvlink.connectors.zmq import producer as zmq_producer
from omni_kvlink.testing import CONNECTOR_CHECKS
from omni_kvlink.testing.conformance import Check, run_check
from omni_kvlink.testing.rig import Handle, ProcessPeer, Rig, ThreadPeer

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPeer]:
    peer = ProcessPeer()
    yield peer
    peer.end()


@pytest.fixture(params=["processes", "bits"])
def rig(
    request: pytest.FixtureRequest, process: ProcessPeer, monkeypatch: pytest.MonkeyPatch
) -> Rig:
    handle: Handle = process
    if request.param == "bits":  # so that also small payloads go by UCX, and in many pieces
        handle = ThreadPeer()
        monkeypatch.setattr(zmq_producer, "EAGER", 0)
        monkeypatch.setattr(ucx_consumer, "PACE", Pace(1000, 8000))
    return Rig(lambda: f"ucx://127.0.0.1:{free_port()}", {}, handle)


@pytest.mark.parametrize("check", CONNECTOR_CHECKS, ids=lambda check: check.__name__[6:])
def test_connector(check: Check, rig: Rig) -> None:
    run_check(check, rig)
