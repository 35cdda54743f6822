"""Two hosts on a cable: a producer's process on one, a reader's on the other."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.testing import faults
from omni_kvlink.testing.caches import sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from support.faults.peer_commands import start_peer
from support.network.cable import Cable
from support.network.gets import Get, insist

if TYPE_CHECKING:
    from omni_kvlink.testing.caches import Recipe
    from omni_kvlink.testing.peer_harness import ProcessPeer
    from support.connectors.key_files import KeyFiles

_ports = itertools.count(7000)
HAS_UCX = importlib.util.find_spec("ucxx") is not None
SCHEMES = [
    "zmq+tcp",
    pytest.param(
        "ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="pip install 'omni-kvlink[ucx]'")
    ),
]


class Hosts:
    """A cable, a process at each of its ends, and keys for both."""

    def __init__(self, key_files: KeyFiles):
        self.cable, self.key_files = Cable(), key_files
        self._peers: list[ProcessPeer] = []
        self._targets: dict[str, ProcessPeer] = {}
        self.producer, self.reader = self.process(self.cable.left), self.process(self.cable.right)

    def process(self, host: str, armed: dict[str, str] | None = None) -> ProcessPeer:
        env = faults.armed(armed) if armed else dict(os.environ)
        if HAS_UCX:  # it looks for devices in /sys, which `ip netns exec` mounts again
            peer = start_peer(env, ("ip", "netns", "exec", host))
        else:
            peer = start_peer(env, module="support.network.netns_peer", arguments=(host,))
        self._peers.append(peer)
        return self._peers[-1]

    def target(self, host: str) -> ProcessPeer:
        """Return another process there, to be stopped or killed; one that is alive is reused."""
        target = self._targets.get(host)
        if target is None or target.process.poll() is not None:
            target = self._targets[host] = self.process(host)
        return target

    def join(self, scheme: str, *, encrypted: bool = True, **peers: ProcessPeer) -> Pair:
        return Pair(self, scheme, encrypted, **peers)

    def close(self) -> None:
        for peer in self._peers:
            if peer.process.poll() is None:
                os.kill(peer.process.pid, signal.SIGKILL)
            peer.close()
        self.cable.close()


class Pair:
    """A link across the cable, with both of its ends."""

    def __init__(
        self,
        hosts: Hosts,
        scheme: str,
        encrypted: bool,
        producer: ProcessPeer | None = None,
        reader: ProcessPeer | None = None,
    ):
        address = f"{hosts.cable.address[hosts.cable.left]}:{next(_ports)}"
        self.url = f"{scheme}://{address}"
        self.producer = RemoteLink(producer or hosts.producer, self.url)
        how: dict[str, Any] = {"quota": 256 << 20}
        if scheme == "ucx":
            how |= {"ucx_devices": "eth0", "trusted_network": True}
        producer_options = hosts.key_files.producer_options if encrypted else {"insecure": True}
        consumer_options = hosts.key_files.consumer_options() if encrypted else {"insecure": True}
        self._consumer_options = {**how, **consumer_options}
        self.producer.call("serve", url=self.url, **how, **producer_options)
        self.reader = self.connect(reader or hosts.reader)

    def connect(self, peer: ProcessPeer) -> RemoteLink:
        """Connect another reader."""
        reader = RemoteLink(peer, self.url)
        reader.call("connect", url=self.url, timeout=PATIENCE, **self._consumer_options)
        return reader

    def put(self, recipe: Recipe) -> None:
        self.producer.call("put", recipe=recipe.to_dict())

    def get(self, recipe: Recipe, timeout: float = PATIENCE) -> Get:
        return Get(self.reader, recipe, timeout)

    def works(self, key: str) -> None:
        """Check that a payload that is put now arrives."""
        recipe = sized(key, 1 << 20)
        self.put(recipe)
        insist(self.reader, recipe)

    def close(self) -> None:
        self.reader.call("remove")
        self.producer.call("remove")
