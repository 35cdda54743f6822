"""Runs every check of the conformance kit on the connectors of one machine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.testing.conformance import Check, run_check
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import Peer, ProcessPeer, ThreadPeer
from omni_kvlink.testing.rig import Rig
from support.link.link_checks import ALL_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("leaves_nothing")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPeer]:
    peer = ProcessPeer()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def threads() -> ThreadPeer:
    return ThreadPeer(LinkCommands())


@pytest.fixture(params=["inproc-pooled", "inproc-inline", "shm-pooled", "shm-sealed", "shm-inline"])
def rig(
    request: pytest.FixtureRequest, threads: ThreadPeer, process: ProcessPeer, sockets: str
) -> Rig:
    scheme, _, mode = request.param.partition("-")
    handle: Peer = process if scheme == "shm" else threads
    options: dict[str, Any] = {"directory": sockets}
    if mode == "inline":  # the small payloads of the checks travel inside their offers
        options["inline"] = INLINE
    else:
        options |= {"mode": mode, "inline": 0}
    return Rig(lambda: f"{scheme}://check-{next(_numbers)}", options, handle)


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__[6:])
def test_connector(check: Check, rig: Rig) -> None:
    run_check(check, rig)


def test_checks_have_names_of_their_own() -> None:
    names = [check.__name__ for check in ALL_CHECKS]
    assert len(set(names)) == len(names) > 40
