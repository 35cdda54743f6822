"""`kvlink store`, its writers and its readers, which can be killed at any time.

`python store_peers.py` forks a process for each line of JSON, as `peer_process.py` does. What each
has kept, withdrawn, read and missed is in its log before it goes on.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import re
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import CapacityError, TransferTimeout
from omni_kvlink.cli import commands
from omni_kvlink.kept import CacheIdentity, StoreClient
from omni_kvlink.kept.link_thread import LinkThread
from omni_kvlink.testing.caches import fingerprint
from support.connectors.zmq_addresses import start_garbage_collection
from support.network.cut_relay import send_lanes_to
from support.network.features import incarnation_of, recipe
from support.network.peer_process import (
    Incarnation,
    Log,
    check_resources,
    main,
    resources,
    wait_for_term,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink import Payload, Received

IDENTITY = CacheIdentity(model="campaign", dtype="uint8")
OTHER = CacheIdentity(model="another", dtype="uint8")
"""Of which nothing is ever kept."""
PATIENCE = 60.0
OVERDUE = 15.0
"""Seconds after which a call hangs that asks one store and two peers for two seconds each."""
PAUSE = 0.1
"""Seconds, at most, between two puts of a writer."""
DRAINED = 6
"""Puts, at most, until a writer waits for the store."""
WITHDRAWS = 0.15
"""How often a writer withdraws one of its payloads after a put."""
MOST_HELD = 2
"""Payloads that a reader holds while it reads on."""
WAYS = ("views", "scatter", "hold", "drop", "give")
OWNERS = 100
"""Incarnations of one writer, at most: `owner_of` tells those of all writers apart."""


def owner_of(incarnation: Incarnation) -> int:
    """A number of a writer's incarnation, which decides the bytes that it puts."""
    return OWNERS * int(incarnation.peer[1:]) + incarnation.number


def made(key: str, owner: int) -> Payload:
    """What an incarnation of a writer puts under a key, as a reader gets it."""
    return dataclasses.replace(recipe(key, owner), key=IDENTITY.key(key)).make()


def connect_through(relays: dict[str, int]) -> None:
    """Have this process connect to stores, writers and peers through relays, all its life."""
    connect = LinkThread.connect

    def redirected(self: Any, url: str, options: dict[str, Any], *, timeout: float) -> Any:
        url = re.sub(r":(\d+)$", lambda port: f":{relays.get(port[1], port[1])}", url)
        return connect(self, url, options, timeout=timeout)

    LinkThread.connect = redirected  # type: ignore[method-assign]


def keep_store(incarnation: Incarnation) -> None:
    """Run `kvlink store` until SIGTERM."""
    arguments = [f"--{name}={value}" for name, value in incarnation.options.items()]
    status = commands.perform(commands.parse(["store", incarnation.url, *arguments]))
    assert status == 0, f"kvlink store ended with status {status}"


class Writer:
    """Keeps payloads, withdraws some, and waits again and again for the store to have them."""

    def __init__(self, client: StoreClient, incarnation: Incarnation, log: Log):
        self._client, self._log, self._owner = client, log, owner_of(incarnation)
        self._rng = random.Random(f"{incarnation.seed}/{incarnation.peer}/{incarnation.number}")
        self._own = list[str]()

    def run(self, tasks: Sequence[tuple[str, float]]) -> None:
        """Put each key; `tasks` say how many writers do: what two put is not withdrawn."""
        left = 0
        for key, writers in tasks:
            self._put(key)
            if writers == 1:
                self._own.append(key)
            if self._own and self._rng.random() < WITHDRAWS:
                self._withdraw(self._own.pop(self._rng.randrange(len(self._own))))
            left -= 1
            if left < 0:
                self.drain()
                left = self._rng.randrange(DRAINED)
            time.sleep(PAUSE * self._rng.random())
        self.drain()

    def _put(self, key: str) -> None:
        data, started = recipe(key, self._owner).make(), time.monotonic()
        self._log.write(key, "keep", self._owner)
        try:
            is_new = self._client.put(key, data, timeout=PATIENCE)
        except (CapacityError, TransferTimeout):
            self._log.write(key, "refused", self._owner)
        else:
            self._log.write(key, "kept" if is_new else "known", self._owner)
        if time.monotonic() > started + PATIENCE + OVERDUE:
            self._log.write(key, "LATE", self._owner)

    def _withdraw(self, key: str) -> None:
        self._log.write(key, "withdraw", self._owner)
        self._client.withdraw(key)
        self._log.write(key, "withdrawn", self._owner)

    def drain(self) -> None:
        """Wait for the store; write down how many payloads memory had lost before."""
        is_drained = self._client.drain(timeout=PATIENCE)
        evicted = self._client.stats()["link"]["transfers"]["evicted"]
        self._log.write("-", "drained" if is_drained else "LATE", self._owner, evicted)


class KeptReader:
    """Reads batches of keys, and compares each byte that it gets with what was put."""

    def __init__(self, client: StoreClient, incarnation: Incarnation, log: Log):
        self._client, self._log = client, log
        self._rng = random.Random(f"{incarnation.seed}/{incarnation.peer}/{incarnation.number}")
        self._held: list[tuple[str, int, Received]] = []
        self._counts = {"hits": 0, "misses": 0}

    def read(self, keys: Sequence[str]) -> None:
        """Read a batch once; a miss is written down."""
        started = time.monotonic()
        if self._rng.random() < 0.3 and self._client.contains([*keys, "store.0.0.x"])[-1]:
            self._log.write(keys[0], "WRONG")
        for key, received in zip(keys, self._client.get_many(keys), strict=True):
            self._counts["misses" if received is None else "hits"] += 1
            if received is None:
                self._log.write(key, "missing")
            else:
                self._take(key, received)
        if time.monotonic() > started + OVERDUE:
            self._log.write(keys[0], "LATE")

    def audit(self, key: str) -> None:
        """Read a key when nothing happens any longer; write down why it is not there."""
        deadline = time.monotonic() + PATIENCE
        while True:
            before = self._client.stats()["misses"]
            [received] = self._client.get_many([key])
            if received is not None:
                self._log.write(key, "found", self._check(key, received.data))
                received.release()
                return
            misses = self._client.stats()["misses"]
            [reason] = [name for name in misses if misses[name] > before[name]]
            if reason != "unreachable" or time.monotonic() > deadline:
                self._log.write(key, f"gone:{reason}")
                return

    def end(self) -> None:
        """Check what is held, and that the client has counted each key once, none as damaged."""
        while self._held:
            self._let_go()
        stats = self._client.stats()
        for name, count in self._counts.items():
            if sum(stats[name].values()) != count:
                self._log.write("-", "MISCOUNTED")
        if stats["misses"]["damaged"]:
            self._log.write("-", "DAMAGED", stats["misses"]["damaged"])

    def _take(self, key: str, received: Received) -> None:
        """Check a payload, and leave it in a way drawn by lot."""
        how, owner = self._rng.choice(WAYS), self._check(key, received.data)
        if how == "scatter":
            targets = made(key, owner)
            for view in targets.tensors():
                assert isinstance(view, torch.Tensor)
                view.zero_()
            received.scatter(targets)
            self._compare(key, owner, targets)
        self._log.write(key, "read", owner)
        if how == "hold":
            self._held.append((key, owner, received))
            if len(self._held) > MOST_HELD:
                self._let_go()
        elif how == "give":
            received.release_unread()
        elif how != "drop":
            received.release()

    def _let_go(self) -> None:
        """Release what is held longest: its bytes are the same still."""
        key, owner, received = self._held.pop(0)
        self._compare(key, owner, received.data)
        received.release()

    def _check(self, key: str, data: Any) -> int:
        owner = incarnation_of(data)
        self._compare(key, owner, data)
        return owner

    def _compare(self, key: str, owner: int, data: Any) -> None:
        if fingerprint(data) != fingerprint(made(key, owner)):
            self._log.write(key, "WRONG", owner)


def client_of(incarnation: Incarnation, identity: CacheIdentity, url: str) -> StoreClient:
    """The client of a process, or another one of it."""
    return StoreClient(
        url,
        stores=[incarnation.store],
        peers=incarnation.peers,
        identity=identity,
        **incarnation.options,
    )


def write(incarnation: Incarnation, log: Log) -> None:
    with client_of(incarnation, IDENTITY, incarnation.url) as client:
        writer = Writer(client, incarnation, log)
        writer.run(incarnation.tasks)
        wait_for_term(log)
        writer.drain()


def read(incarnation: Incarnation, log: Log) -> None:
    other_url = incarnation.lookups["other"]
    rng = random.Random(incarnation.log)
    with (
        client_of(incarnation, IDENTITY, incarnation.url) as client,
        client_of(incarnation, OTHER, other_url) as other,
    ):
        reader = KeptReader(client, incarnation, log)
        for number, batch in groupby(incarnation.tasks, lambda pair: pair[1]):
            keys = [key for key, _ in batch]
            reader.read(keys)
            if rng.random() < 0.1 and other.get_many(keys) != [None] * len(keys):
                log.write(keys[0], "WRONG")
            log.write("-", "batch", int(number))
            time.sleep(PAUSE / 5 * rng.random())
        reader.end()
        wait_for_term(log)


def audit(incarnation: Incarnation, log: Log) -> None:
    with client_of(incarnation, IDENTITY, incarnation.url) as client:
        assert client.wait_connected(timeout=PATIENCE)
        reader = KeptReader(client, incarnation, log)
        for key, _ in incarnation.tasks:
            reader.audit(key)
        if client.stats()["misses"]["damaged"]:
            log.write("-", "DAMAGED")
        wait_for_term(log)


def run(incarnation: Incarnation) -> None:
    log = Log(incarnation.log)
    gc.disable()  # as servers do: nothing may wait for the cyclic collector
    start_garbage_collection()
    if incarnation.lanes:
        send_lanes_to(incarnation.lanes)
        connect_through(incarnation.relays)
    if incarnation.role == "store":  # its lines go to a file beside its log
        with open(f"{incarnation.log}.out", "w") as lines:
            os.dup2(lines.fileno(), 1)
    before = resources()
    try:
        if incarnation.role == "store":
            keep_store(incarnation)
        else:
            {"writer": write, "reader": read, "auditor": audit}[incarnation.role](incarnation, log)
        check_resources(before, log)
    except BaseException:
        log.write("-", "BROKE")
        raise


if __name__ == "__main__":
    main(run)
