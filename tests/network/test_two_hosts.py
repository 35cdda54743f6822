"""Two network namespaces: packet loss, a disconnected cable, processes that die."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest

from omni_kvlink import ConnectorError, PeerLostError, TransferTimeout
from omni_kvlink.testing.caches import Recipe, fingerprint, sized
from omni_kvlink.testing.peer_harness import PATIENCE, ProcessPeer, RemoteLink
from omni_kvlink.testing.rig import expect, until
from support.faults.harness import kill
from support.network.gets import Get, insist
from support.network.hosts import HAS_UCX, SCHEMES, Hosts, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator


HUGE = sized("huge", 64 << 20)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(hosts: Hosts, scheme: str) -> Iterator[Pair]:
    pair = hosts.join(scheme)
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("percent", "nbytes", "timeout", "at_least"),
    [(1, 300_000, 60, 12), (5, 300_000, 60, 6), (20, 30_000, 3, 0)],
)
def test_random_loss(
    hosts: Hosts, pair: Pair, percent: int, nbytes: int, timeout: float, at_least: int
) -> None:
    """Gets are slower or raise a typed error; afterwards the link works."""
    recipes = [sized(f"k{n}", nbytes, seed=n) for n in range(12)]
    assert run_with_loss(hosts, pair, recipes, percent, timeout) >= at_least


@pytest.mark.slow
@pytest.mark.parametrize("percent", [1, 5, 20])
def test_random_loss_for_long(hosts: Hosts, pair: Pair, percent: int) -> None:
    for turn in range(10):
        recipes = [sized(f"{turn}.{n}", 1 << 20, seed=n) for n in range(20)]
        run_with_loss(hosts, pair, recipes, percent, timeout=5)


def run_with_loss(
    hosts: Hosts, pair: Pair, recipes: list[Recipe], percent: int, timeout: float
) -> int:
    """Return how many payloads arrived."""
    with hosts.cable.losing(percent):
        for recipe in recipes:
            pair.put(recipe)
        gets = [pair.get(recipe, timeout) for recipe in recipes]
        arrived = sum(get.arrived() for get in gets)
        assert hosts.cable.dropped() > 3, "hardly anything was lost"
    pair.works(f"after {recipes[0].key}")
    return arrived


def test_the_cable_is_disconnected_for_a_second(hosts: Hosts, pair: Pair) -> None:
    recipes = [sized(f"k{n}", 2 << 20, seed=n) for n in range(24)]
    for recipe in recipes:
        pair.put(recipe)
    gets = [pair.get(recipe) for recipe in recipes]
    until(lambda: any(get.future.done() for get in gets), "they come")
    hosts.cable.disconnect()
    try:
        time.sleep(1)
    finally:
        hosts.cable.reconnect()
    assert sum([get.arrived() for get in gets]) > 0
    pair.works("after")


def test_the_cable_is_disconnected(hosts: Hosts, scheme: str) -> None:
    """Both sides detect it, whether idle or in the middle of a payload."""
    idle, busy = hosts.join(scheme), hosts.join(scheme)
    waiting = idle.get(sized("never", 1))
    busy.put(HUGE)
    coming = busy.get(HUGE)
    until(lambda: busy.reader.call("stats")["memory"]["used"] > 0, "bytes come")
    hosts.cable.disconnect()
    try:
        for pair in (idle, busy):
            until(partial(has_no_reader, pair), "the producer noticed")
        assert not waiting.arrived()
        assert isinstance(waiting.future.exception(), PeerLostError)
        coming.arrived()
    finally:
        hosts.cable.reconnect()
    for pair in (idle, busy):
        pair.works("after")
        pair.close()


def has_no_reader(pair: Pair) -> bool:
    return not pair.producer.call("stats")["readers"]


def until_stopped(target: ProcessPeer) -> None:
    """Wait until a process has stopped itself at the fault point that it is armed with."""
    process = psutil.Process(target.process.pid)
    until(lambda: process.status() == psutil.STATUS_STOPPED, "it stopped")


def get_until_stopped(pair: Pair, target: ProcessPeer) -> Get:
    """Begin a get that its sender stops; one that ends before, on a busy machine, begins again."""
    process, timeout = psutil.Process(target.process.pid), 3.0
    while True:
        get, timeout = pair.get(HUGE, timeout=timeout), 2 * timeout
        until(
            lambda get=get: get.future.done() or process.status() == psutil.STATUS_STOPPED,  # type: ignore[misc]
            "the sender stopped, or the get ended",
        )
        if not get.future.done():
            return get


def is_coming(pair: Pair) -> bool:
    used: int = pair.reader.call("stats")["memory"]["used"]
    return used > 0


def test_a_producer_is_frozen_amid_its_bytes(hosts: Hosts) -> None:
    """The get ends in time; bytes that arrive later do not overwrite another payload."""
    target = hosts.process(hosts.cable.left, {"send.chunk": "stop"})
    pair = hosts.join("zmq+tcp", producer=target)
    next_one = sized("next", 64 << 20, seed=5)
    pair.put(next_one)
    pair.put(HUGE)
    get = get_until_stopped(pair, target)
    assert not get.arrived()
    assert isinstance(get.future.exception(), (TransferTimeout, PeerLostError))
    until(lambda: not is_coming(pair), "the reader's memory is free")
    os.kill(target.process.pid, signal.SIGCONT)
    assert pair.reader.call("hold", key="next", timeout=PATIENCE) == fingerprint(next_one.make())
    before = hosts.reader.call("hash_held", key="next")
    pair.put(sized("last", 1))  # sent after all that was late
    assert pair.get(sized("last", 1)).arrived()
    assert hosts.reader.call("hash_held", key="next") == before
    hosts.reader.call("release", key="next")
    pair.close()


def test_a_reader_is_frozen_amid_its_bytes(hosts: Hosts) -> None:
    """Another reader gets the payload when the frozen one is disconnected."""
    target = hosts.process(hosts.cable.right, {"fetch.chunk": "stop"})
    pair = hosts.join("zmq+tcp", reader=target)
    pair.put(HUGE)
    pair.get(HUGE)
    until_stopped(target)
    pair.reader = pair.connect(hosts.reader)
    get = pair.get(HUGE)
    until(lambda: pair.producer.call("stats")["readers"] == 1, "the producer noticed")
    if not get.arrived():  # on a busy machine this reader may be taken for a frozen one, too
        insist(pair.reader, HUGE)
    kill(target)
    pair.close()


def test_dead_peers(hosts: Hosts) -> None:
    """A peer's death ends waiting gets and frees leased payloads at once."""
    targets = {side: hosts.target(side) for side in (hosts.cable.left, hosts.cable.right)}
    schemes = ["zmq+tcp", "ucx"] if HAS_UCX else ["zmq+tcp"]
    waiters = [hosts.join(scheme, producer=targets[hosts.cable.left]) for scheme in schemes]
    lenders = [hosts.join(scheme, reader=targets[hosts.cable.right]) for scheme in schemes]
    waiting = [pair.get(sized("never", 1)) for pair in waiters]
    payloads = [sized(scheme, 1 << 20) for scheme in schemes]
    for pair, recipe in zip(lenders, payloads, strict=True):
        pair.put(recipe)
        pair.reader.call("hold", key=recipe.key, timeout=PATIENCE)
    for target in targets.values():
        kill(target)
    for pair, recipe in zip(lenders, payloads, strict=True):
        pair.reader = pair.connect(hosts.reader)
        assert pair.get(recipe).arrived()
    for get in waiting:
        assert not get.arrived()
        assert isinstance(get.future.exception(), PeerLostError)
    for pair in lenders:
        pair.close()


def test_a_required_path(hosts: Hosts, socket_dir: str) -> None:
    """Between hosts, which share no directory: shared memory is refused, encryption is given."""
    url = f"auto://hosts?tcp={hosts.cable.address[hosts.cable.left]}:6999"
    producer, reader = RemoteLink(hosts.producer, url), RemoteLink(hosts.reader, url)
    producer.call("serve", url=url, **hosts.key_files.producer_options)
    there = {"timeout": PATIENCE, "directory": socket_dir, **hosts.key_files.consumer_options()}
    text = "require='shm', and the path is zmq+tcp+curve (no shm: nobody serves"
    expect(
        ConnectorError, reader.call, "connect", url=url, require="shm", **there, mentions=(text,)
    )
    until(lambda: counted(producer) == 1, "the producer counts it")
    reader.call("connect", url=url, require="encrypted", **there)
    recipe = sized("k", 1 << 20)
    producer.call("put", recipe=recipe.to_dict())
    assert reader.call("get_path", key="k", timeout=PATIENCE).startswith("zmq+tcp+curve")
    reader.call("remove")
    producer.call("remove")


def counted(producer: RemoteLink) -> int:
    """Readers that a producer has refused for their path."""
    return sum(each["refused"].get("path", 0) for each in producer.call("stats")["listeners"])
