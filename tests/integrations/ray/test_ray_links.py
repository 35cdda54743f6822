"""The links of Ray's processes, and what their objects may take; none of it needs Ray."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import CapacityError, ConnectorError, PeerLostError, TensorTransferData
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.integrations.ray.actor_links import ActorLinks
from omni_kvlink.integrations.ray.object_quota import OVERHEAD, ObjectQuota
from omni_kvlink.integrations.ray.settings import RaySettings
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "ab" * 28
LOOPBACK = "127.0.0.1"


@pytest.fixture
def reader(sockets: str) -> Iterator[ActorLinks]:
    links = ActorLinks(RaySettings(connect_timeout=0.01, options={"directory": sockets}))
    yield links
    links.close()


def test_links_of_lost_sources_are_closed(reader: ActorLinks, sockets: str) -> None:
    """A reader of actors that come and go keeps the links of those alone that are there."""
    for number in range(3):
        source = ActorLinks(RaySettings(options={"directory": sockets}))
        _, origin = source.producer(LOOPBACK)
        with reader.consumer(origin):
            assert len(reader.stats()["consumers"]) == 1, number
        source.close()
        until(lambda: not reader.stats()["consumers"][0]["connected"], "it is noticed")
        with pytest.raises(PeerLostError, match="nobody serves"), reader.consumer(origin):
            pass
        assert reader.stats()["consumers"] == []


def test_a_link_is_kept(reader: ActorLinks, sockets: str) -> None:
    """A source's second object goes by the link of the first."""
    source = ActorLinks(RaySettings(options={"directory": sockets}))
    producer, origin = source.producer(LOOPBACK)
    producer.put(TensorTransferData(KEY, {"0": torch.ones(3)}), readers=None)
    links = []
    for _ in range(2):
        with reader.consumer(origin) as link, link.get(KEY, timeout=60, wait=False):
            links.append(link)
    assert links[0] is links[1]
    assert source.producer(LOOPBACK)[0] is producer
    source.close()


def test_keys_of_each_node(tmp_path: Path) -> None:
    """A reader finds the key of its source among `peers`, and refuses one that is not there."""
    peers, nodes = tmp_path / "peers", {}
    peers.mkdir()
    for name in ("first", "here", "there", "forger"):
        secret, public = generate(str(tmp_path / name), name)
        options = {"keys": secret, "peers": str(peers)}
        nodes[name] = ActorLinks(RaySettings("zmq+tcp", LOOPBACK, options=options))
        if name != "forger":
            (peers / Path(public).name).write_bytes(Path(public).read_bytes())
    producer, origin = nodes["there"].producer(LOOPBACK)
    producer.put(TensorTransferData(KEY, {"0": torch.ones(5)}), readers=None)
    with nodes["here"].consumer(origin) as link, link.get(KEY, timeout=60, wait=False) as data:
        received: Any = data["0"]
        assert received.sum() == 5
    _, forged = nodes["forger"].producer(LOOPBACK)
    with (
        pytest.raises(ConnectorError, match="put the public keys of all nodes there"),
        nodes["here"].consumer(forged),
    ):
        pass
    for each in nodes.values():
        each.close()


def test_the_quota_is_shared_by_objects() -> None:
    quota = ObjectQuota(2 * OVERHEAD + 100)
    quota.take("first", 60, timeout=0)
    quota.take("first", 60, timeout=0)  # it is counted once
    with pytest.raises(CapacityError, match=r"raise quota= of register\(\)") as caught:
        quota.take("second", 60, timeout=0)
    assert (caught.value.requested, caught.value.free) == (OVERHEAD + 60, OVERHEAD + 40)
    quota.take("second", 40, timeout=0)
    quota.free("unknown")


def test_an_object_waits_for_the_room_of_another() -> None:
    quota = ObjectQuota(OVERHEAD + 100)
    quota.take("first", 100, timeout=0)
    thread = threading.Thread(target=quota.take, args=("second", 100), kwargs={"timeout": 600})
    thread.start()
    quota.free("first")
    thread.join()
    with pytest.raises(CapacityError):
        quota.take("third", 1, timeout=0)
