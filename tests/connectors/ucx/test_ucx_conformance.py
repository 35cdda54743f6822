"""Every behaviour of the conformance kit, its bytes moved by UCX."""

from __future__ import annotations

import importlib.util
import inspect
from typing import TYPE_CHECKING

import pytest

from omni_kvlink._native import host
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.control import listener as control_listener
from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
from omni_kvlink.connectors.ucx import consumer as ucx_consumer
from omni_kvlink.testing import delivery_checks, stream_checks
from omni_kvlink.testing.conformance import Check, run_check
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import ProcessPeer, ThreadPeer
from omni_kvlink.testing.rig import CheckFailed, Rig
from support.connectors.zmq_addresses import free_port
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.link.link_checks import ALL_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.devices.fake_device import FakeDevice

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from support.connectors import ucx_device_peer

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
    return Rig(fresh_url, {"inline": 0}, ThreadPeer(LinkCommands()))


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__[6:])
def test_connector(check: Check, rig: Rig) -> None:
    run_check(check, rig)


IN_BITS = [
    check
    for check in ALL_CHECKS
    if inspect.getmodule(check) in (delivery_checks, stream_checks)
    and check is not stream_checks.check_readers_wait_for_a_large_put  # a hundred thousand bits
]


@pytest.mark.parametrize("check", IN_BITS, ids=lambda check: check.__name__[6:])
def test_in_bits(check: Check, rig_of_bits: Rig) -> None:
    run_check(check, rig_of_bits)


ALLOCATING = {
    "put_of_allocated_memory_copies_nothing",
    "planned_with_blank",
    "less_than_allocated",
    "partly_in_place",
    "misplaced_tensors",
    "more_than_allocated",
    "allocation_is_put_once",
    "allocated_memory_among_many",
    "allocated_memory_is_not_reused_too_soon",
    "abort_of_an_allocation",
    "streamed_in_place",
    "what_cannot_be_sent_directly",
}
"""Checks of `allocate`, which a link whose payloads lie on a device refuses."""


@pytest.fixture(scope="module")
def device_process(directory: Path) -> Iterator[ProcessPeer]:
    peer = ucx_device_peer.start(directory)
    yield peer
    peer.close()


@pytest.mark.skipif(bool(host.missing()), reason=host.missing() or "")
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__[6:])
def test_payloads_on_a_device(
    check: Check, device_process: ProcessPeer, device: FakeDevice
) -> None:
    """Both ends have their payloads on the fake device; the tensors are the host's."""
    device.holds = lambda view: False
    options = {"copier": "pinned", "device": "cuda:0"}
    rig = Rig(lambda: fresh_url() + "&ucx_tls=tcp,cuda_copy", options, device_process)
    if check.__name__[6:] in ALLOCATING:
        with pytest.raises(CheckFailed, match=r"allocate\(\) gives memory of the host"):
            run_check(check, rig)
    else:
        run_check(check, rig)
