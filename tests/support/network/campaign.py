"""Transfers between processes that are killed and restarted meanwhile."""

from __future__ import annotations

import os
import random
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from support.connectors.zmq_addresses import free_port
from support.network.cut_relay import CutRelay
from support.network.evidence import UNREAD, Record, chunk_counts, keys_read, parse, task_of
from support.network.faulty_processes import PATIENCE, Fault, FaultyProcesses, Forker
from support.network.features import PLAIN, feature_of, names
from support.network.peer_process import Incarnation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ROUNDS = int(os.environ.get("KVLINK_ROUNDS", "3"))
"""Seeds of each test that kills or harms at random in `make test-all`; for a night, 30."""
PRODUCER, READERS = "P", ("A", "B")
DOUBT = 0.3
"""Timeout of a repeated get for a payload that the killed process may have received."""
_END = re.compile(b" (read|ended|TransferTimeout|TransferFailed) ")


def address(transport: str, directory: str, name: str = "campaign") -> str:
    """The URL of a link of a campaign over a transport; sockets are in the directory."""
    if transport == "shm":
        return f"shm://{name}"
    if transport == "zmq+ipc":
        return f"zmq+ipc://{directory}/{name}.sock"
    if transport == "auto":
        return f"auto://{name}?tcp=127.0.0.1:{free_port()}"
    query = "?trusted_network=1" if transport == "ucx" else ""
    return f"{transport}://127.0.0.1:{free_port()}{query}"


def lookup_addresses(transport: str, directory: str) -> dict[str, str]:
    """The URLs by which each process answers or asks lookups."""
    return {peer: address(transport, directory, f"look-{peer}") for peer in (PRODUCER, *READERS)}


class Campaign(FaultyProcesses):
    """A producer P, readers A and B, and keys; if `shared`, each fifth task is for both readers.

    `patience`: seconds that a reader waits for a payload. `leaves`: how often a reader leaves one
    unread, beside all faults. `seed` decides what is transferred, and what processes draw by lot.
    `lookups` are the URLs of links for lookups, by the name of the process that serves each. The
    readers `are_contained`: they have PID, IPC and network namespaces of their own.

    Attributes:
        orders: the readers of each key.
        hits: of each fault its kind, and the feature that the process was busy with.
    """

    def __init__(
        self,
        forker: Forker,
        root: Path,
        url: str,
        options: dict[str, Any],
        keys: int,
        *,
        shared: bool = True,
        patience: float = PATIENCE,
        features: Sequence[str] = PLAIN,
        leaves: float = 0.0,
        seed: str = "",
        lookups: Mapping[str, str] | None = None,
        are_contained: bool = False,
    ):
        super().__init__(forker, root, (PRODUCER, *READERS))
        self._patience, self._url, self._options = patience, url, options
        self._leaves, self._seed, self._are_contained = leaves, seed, are_contained
        self.orders: dict[str, list[str]] = {}
        number = -1
        for key in names(features, keys, random.Random(seed)):
            number += task_of(key) not in map(task_of, list(self.orders)[-1:])
            both = shared and number % 5 == 4
            self.orders[key] = list(READERS) if both else [READERS[number % 2]]
        self._counts: dict[Path, tuple[int, int]] = {}
        is_looked_up = any(feature_of(key) == "lookup" for key in self.orders)
        self._lookups = dict(lookups or {}) if is_looked_up else {}

    def run(self, rng: random.Random, faults: Sequence[Fault]) -> list[Record]:
        """Do this to these processes at random times; return the logs of all processes."""
        if any(kind == "cut" for kind, _ in faults):
            self._relay = CutRelay(urlsplit(self._url).port or 0)
            self._lanes = self._relay.listen_for_lanes()
        for name in self._logs:
            self._begin(name)
        moments = sorted(rng.sample(range(len(self.orders) // 12, len(self.orders)), len(faults)))
        for (kind, name), moment in zip(faults, moments, strict=True):
            self._until(lambda m=moment: self._reads() >= m, f"{moment} reads")  # type: ignore[misc]
            time.sleep(rng.random() * 0.01)
            self._inflict(rng, kind, name)
        self._until(self._ended, "everybody ended")
        for name in (*READERS, PRODUCER):
            self._end(name)
        return self.records()

    def _incarnation(self, peer: str, number: int, log: Path) -> Incarnation:
        tasks = self._puts() if peer == PRODUCER else self._gets(peer)
        url = self._url
        if self._relay is not None and peer != PRODUCER:
            url = url.replace(f":{urlsplit(url).port}", f":{self._relay.port}")
        return Incarnation(
            self._role(peer),
            number,
            url,
            self._options,
            str(log),
            tasks,
            peer,
            self._seed,
            self._leaves,
            {} if peer == PRODUCER else self._positions(peer),
            self._lookups,
            self._lanes,
            self._are_contained and peer != PRODUCER,
        )

    def _had(self) -> set[tuple[str, str]]:
        """Who has read which key, also of those that were killed."""
        records = self.records()
        counts = chunk_counts(records)
        return {(record.peer, key) for record in records for key in keys_read(record, counts)}

    def _settled(self) -> set[tuple[str, str]]:
        """Who has read which key, or was told that it does not get it, and went on."""
        entries = ((record.peer, entry) for record in self.records() for entry in record.entries)
        return self._had() | {(peer, one.key) for peer, one in entries if one.event in UNREAD}

    def _puts(self) -> list[tuple[str, float]]:
        """Return the keys that readers lack, and by how many."""
        had = self._settled()
        lack = {
            key: sum((peer, key) not in had for peer in self.orders[key]) for key in self.orders
        }
        return [(key, count) for key, count in lack.items() if count]

    def _gets(self, peer: str) -> list[tuple[str, float]]:
        """Return the keys that a reader has not read, and again those of its last task."""
        had, incarnations = self._had(), self._logs[peer]
        last = parse(incarnations[-1]) if incarnations else []
        read = [entry.key for entry in last if entry.event in ("read", "chunk", "ended")]
        mine = [key for key, readers in self.orders.items() if peer in readers]
        doubtful = {task_of(key) for key in read[-1:] if feature_of(key) != "lookup"}
        again = [
            (key, DOUBT)
            for key in mine
            if task_of(key) in doubtful and all((one, key) in had for one in self.orders[key])
        ]  # only if every other reader has it: else a get could take another one's share
        settled = self._settled()
        return again + [(key, self._patience) for key in mine if (peer, key) not in settled]

    def _positions(self, peer: str) -> dict[str, int]:
        """Of each stream, the chunk behind the last one that a reader has of this producer."""
        number = len(self._logs[PRODUCER]) - 1
        chunks = (
            entry
            for record in self.records()
            for entry in record.entries
            if record.peer == peer and entry.event == "chunk" and entry.number == number
        )
        return {entry.key: entry.part + 1 for entry in chunks}

    def _reads(self) -> int:
        """How often a payload was read, or waited for in vain; reads only logs that have grown."""
        for path in (path for name in READERS for path in self._logs[name]):
            size = path.stat().st_size if path.exists() else 0
            if self._counts.get(path, (0, 0))[0] != size:
                self._counts[path] = size, len(_END.findall(path.read_bytes()))
        return sum(count for _, count in self._counts.values())

    def _doing(self, peer: str) -> str:
        """The feature that a process was busy with when it wrote its last line."""
        entries = [entry for entry in parse(self._logs[peer][-1]) if entry.key != "-"]
        return feature_of(entries[-1].key) if entries else "start"

    def _ended(self) -> bool:
        last = [paths[-1] for paths in self._logs.values()]
        return all(path.exists() and path.read_bytes().endswith(b"- end -1 -1\n") for path in last)

    def _cut(self) -> None:
        """Cut all connections of the readers at once, and note where each of them was."""
        for path in (self._logs[name][-1] for name in READERS):
            self._cuts.setdefault(path, []).append(len(parse(path)))
        super()._cut()

    def _role(self, peer: str) -> str:
        return "producer" if peer == PRODUCER else "reader"
