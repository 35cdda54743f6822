"""Every behaviour of the conformance kit, its bytes moved by UCX."""

from __future__ import annotations

import importlib.util
import inspect
from typing import TYPE_CHECKING

import pytest
from zmq_fixtures import free_port

from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.control import listener as control_listener
from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
from omni_kvlink.connectors.ucx import consumer as ucx_consumer
from omni_kvlink.testing import CONNECTOR_CHECKS, delivery_checks, stream_checks
from omni_kvlink.testing.conformance import Check, run_check
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import ProcessPeer, ThreadPeer
from omni_kvlink.testing.rig import Rig

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


def fresh_url() -> str:
    return f"ucx://127.0.0.1:{free_port()}?trusted_network=1"


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPeer]:
    peer = ProcessPeer()
    yield peer
    peer.close()


@pytest.fixture
def rig(process: ProcessPeer) -> Rig:
    return Rig(fresh_url, {}, process)


@pytest.fixture
def rig_of_bits(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Also small payloads go by UCX, and in many pieces."""
    monkeypatch.setattr(control_listener, "EAGER", 0)
    monkeypatch.setattr(ucx_consumer.UcxSession, "fetch_limits", FetchLimits(1000, 8000))
    return Rig(fresh_url, {}, ThreadPeer(LinkCommands()))


@pytest.mark.parametrize("check", CONNECTOR_CHECKS, ids=lambda check: check.__name__[6:])
def test_connector(check: Check, rig: Rig) -> None:
    run_check(check, rig)


IN_BITS = [
    check
    for check in CONNECTOR_CHECKS
    if inspect.getmodule(check) in (delivery_checks, stream_checks)
    and check is not stream_checks.check_readers_wait_for_a_large_put  # a hundred thousand bits
]


@pytest.mark.parametrize("check", IN_BITS, ids=lambda check: check.__name__[6:])
def test_in_bits(check: Check, rig_of_bits: Rig) -> None:
    run_check(check, rig_of_bits)
