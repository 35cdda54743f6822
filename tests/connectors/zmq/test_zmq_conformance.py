"""Every behaviour of the conformance kit, over TCP, over Unix sockets, and in small chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.connectors.control import listener as control_listener
from omni_kvlink.testing import (
    delivery_checks,
    ending_checks,
    memory_checks,
    stream_checks,
    zero_copy_checks,
)
from omni_kvlink.testing.conformance import Check, run_check
from omni_kvlink.testing.peer_harness import ProcessPeer
from omni_kvlink.testing.rig import Rig
from support.connectors.zmq_addresses import fresh_url
from support.faults.peer_commands import start_peer
from support.link.link_checks import ALL_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPeer]:
    peer = ProcessPeer()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def lane_process() -> Iterator[ProcessPeer]:
    """A reader that has all bytes come by lanes."""
    peer = start_peer(module="support.connectors.lane_peer")
    yield peer
    peer.close()


LARGE = {
    module.__name__ for module in (delivery_checks, stream_checks, memory_checks, zero_copy_checks)
}
QUICK = {
    "tcp": {check.__module__ for check in ALL_CHECKS},
    "ipc": {delivery_checks.__name__, ending_checks.__name__},
    "tcp-small": LARGE,
    "tcp-lanes": LARGE,
    "tcp-lanes+keys": {delivery_checks.__name__, stream_checks.__name__},
}
"""Modules whose checks are run with every change, by transport; the others are marked `slow`."""
THOUSANDS_OF_CHUNKS = (
    stream_checks.check_readers_wait_for_a_large_put,
    zero_copy_checks.check_direct_put_copies_nothing,
)


def parameters() -> Iterator[Any]:
    for transport, modules in QUICK.items():
        for check in ALL_CHECKS:
            quick = check.__module__ in modules
            if transport == "tcp-small" and check in THOUSANDS_OF_CHUNKS:
                quick = False
            name = f"{transport}-{check.__name__[6:]}"
            if quick:
                yield pytest.param(transport, check, id=name)
            else:
                yield pytest.param(transport, check, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("transport", "check"), list(parameters()))
def test_connector(
    transport: str,
    check: Check,
    process: ProcessPeer,
    lane_process: ProcessPeer,
    sockets: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, _, kind = transport.partition("-")
    options: dict[str, Any] = {}
    if kind:  # also fetch the small payloads of the checks
        options["inline"] = 0
        monkeypatch.setattr(control_listener, "EAGER", 0)
    if kind == "small":
        monkeypatch.setattr(control_listener, "CHUNK", 1000)
    elif kind == "lanes":
        options |= {"insecure": True, "lanes": 2}
    elif kind:
        pytest.importorskip("cryptography", reason="lanes of links with keys need it")
    peer = lane_process if kind.startswith("lanes") else process
    run_check(check, Rig(lambda: fresh_url(transport, sockets), options, peer))
