"""Two hosts on a cable: a producer's process on one, a reader's on the other."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from typing import Any

import pytest
from cable import Cable
from gets import Get, insist
from key_fixtures import Safe

from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.memory_checks import sized
from omni_kvlink.testing.rig import PATIENCE, ProcessPeer, Remote

_ports = itertools.count(7000)
HAS_UCX = importlib.util.find_spec("ucxx") is not None
SCHEMES = [
    "zmq+tcp",
    pytest.param(
        "ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="pip install 'omni-kvlink[ucx]'")
    ),
]


class Hosts:
    """The cable, a process at each end of it, and keys for both."""

    def __init__(self, safe: Safe):
        self.cable, self.safe = Cable(), safe
        self._peers: list[ProcessPeer] = []
        self._victims: dict[str, ProcessPeer] = {}
        self.producer, self.reader = self.process(self.cable.left), self.process(self.cable.right)

    def process(self, host: str) -> ProcessPeer:
        self._peers.append(ProcessPeer(prefix=self.cable.inside(host)))
        return self._peers[-1]

    def victim(self, host: str) -> ProcessPeer:
        """Another process there, for tests to freeze and kill; one that lives is used again."""
        victim = self._victims.get(host)
        if victim is None or victim.process.poll() is not None:
            victim = self._victims[host] = self.process(host)
        return victim

    def join(self, scheme: str, *, encrypted: bool = True, **peers: ProcessPeer) -> Pair:
        return Pair(self, scheme, encrypted, **peers)

    def close(self) -> None:
        for peer in self._peers:
            if peer.process.poll() is None:
                os.kill(peer.process.pid, signal.SIGKILL)
            peer.end()
        self.cable.cut_up()


class Pair:
    """A link across the cable; `close` ends it on both hosts."""

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
        self.producer = Remote(producer or hosts.producer, self.url)
        how: dict[str, Any] = {"quota": 256 << 20}
        if scheme == "ucx":
            how["ucx_devices"] = "eth0"
        serving = hosts.safe.serving if encrypted else {"insecure": True}
        reading = hosts.safe.reading() if encrypted else {"insecure": True}
        self._reading = {**how, **reading}
        self.producer.do("serve", url=self.url, **how, **serving)
        self.reader = self.connect(reader or hosts.reader)

    def connect(self, peer: ProcessPeer) -> Remote:
        """A reader of this link."""
        reader = Remote(peer, self.url)
        reader.do("connect", url=self.url, timeout=PATIENCE, **self._reading)
        return reader

    def put(self, recipe: Recipe) -> None:
        self.producer.do("put", recipe=recipe.to_dict())

    def get(self, recipe: Recipe, timeout: float = PATIENCE) -> Get:
        return Get(self.reader, recipe, timeout)

    def works(self, key: str) -> None:
        """Something put now arrives."""
        recipe = sized(key, 1 << 20)
        self.put(recipe)
        insist(self.reader, recipe)

    def close(self) -> None:
        self.reader.do("forget")
        self.producer.do("forget")
