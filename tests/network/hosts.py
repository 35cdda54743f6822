"""Two hosts on a cable: a producer's process on one, a reader's on the other."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import time
from concurrent.futures import Future
from typing import Any

import pytest
from battle import timed
from cable import Cable
from safe import Safe

from omni_kvlink import KVLinkError
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.memory_checks import sized
from omni_kvlink.testing.rig import PATIENCE, SLACK, ProcessPeer, Remote

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
        self.producer, self.reader = self.process(self.cable.left), self.process(self.cable.right)

    def process(self, host: str) -> ProcessPeer:
        self._peers.append(ProcessPeer(prefix=self.cable.inside(host)))
        return self._peers[-1]

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
        deadline = time.monotonic() + PATIENCE
        while True:
            get = self.get(recipe, max(0.0, deadline - time.monotonic()))
            if get.arrived() or time.monotonic() > deadline:
                break
        get.future.result()

    def close(self) -> None:
        self.reader.do("forget")
        self.producer.do("forget")


class Get:
    """A `get` on its way, verified in full; it is right, or a typed error, in time."""

    def __init__(self, reader: Remote, recipe: Recipe, timeout: float):
        self._recipe, self._timeout, self._begun = recipe, timeout, time.monotonic()
        self.future: Future[str] = reader.ask("get", key=recipe.key, timeout=timeout, verify="full")
        self._ended = timed(self.future)

    @property
    def moment(self) -> float:
        """When it ended; waits for that."""
        return self._ended.result(self._timeout + PATIENCE)

    def arrived(self) -> bool:
        """Whether the bytes are here; else there is a typed error. Waits for that."""
        late = self.moment - self._begun - self._timeout
        assert late < SLACK, f"{self._recipe.key!r} ended {late:.3f} s after its deadline"
        error = self.future.exception()
        if error is None:
            assert self.future.result() == fingerprint(self._recipe.make())
            return True
        assert isinstance(error, KVLinkError), f"{self._recipe.key!r}: {error!r}"
        return False
