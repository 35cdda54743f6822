"""A store with writers and readers that are killed, stopped or cut off, and restarted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from omni_kvlink.testing.rig import until
from support.network.campaign import address
from support.network.cut_relay import CutRelay
from support.network.evidence import parse
from support.network.faulty_processes import PATIENCE, Fault, FaultyProcesses, Forker
from support.network.peer_process import Incarnation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.network.evidence import Record

STORE, WRITERS, READERS, AUDITOR = "S", ("W0", "W1"), ("A", "B"), "Z"
VICTIMS = (STORE, STORE, *WRITERS, *READERS)
"""Of whom a fault chooses one."""
STORE_PEERS = Path(__file__).with_name("store_peers.py")
OWN_MEMORY = f"memfd:kvlink-{STORE} "
"""In the name of memory that a store over shared memory keeps payloads in."""
BATCHES = 150
"""Of each reader."""
MOST_READ = 4
"""Keys of a batch."""
SHARED = 0.2
"""How many keys both writers put."""


class Budgets(NamedTuple):
    """Bytes of memory of the store, of its directory, and of each writer's memory."""

    memory: int
    files: int
    writer: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Budgets:
        """Half of all directories hold everything; a few writers lose payloads that wait."""
        return cls(8 << 20, rng.choice((16, 256)) << 20, rng.choice((6, 64, 64, 64)) << 20)


class Usage(NamedTuple):
    """What a process has of the system."""

    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Of a store that runs; its own payloads' memory, which its budget bounds, is left out."""
        folder = Path("/proc", str(pid))
        mapped = [line for line in (folder / "maps").read_text().splitlines() if "memfd:" in line]
        opened = list[str]()
        for path in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                opened.append(os.readlink(path))
        others = [sum(OWN_MEMORY not in one for one in found) for found in (opened, mapped)]
        # UCX makes one with its first endpoint, and keeps it.
        timers = min(1, opened.count("anon_inode:[timerfd]"))
        return cls(others[0] - timers, len(os.listdir(folder / "task")), others[1])

    def exceeds(self, other: Usage, spare: Usage) -> bool:
        """Whether there is more of anything than that and `spare` together."""
        return any(mine > most + few for mine, most, few in zip(self, other, spare, strict=True))


NOTHING, LANES = Usage(0, 0, 0), Usage(8, 4, 0)
"""What lanes over TCP have until their link is closed, however many readers come and go."""


class StoreCampaign(FaultyProcesses):
    """A store with a directory, two writers and two readers; an auditor at the end.

    Writers put each key once, and again after their death if the store may not have it. The store
    is restarted before the end; the auditor then reads each key, its writers being gone.

    Attributes:
        owners: the writers of each key.
        directory: the store's.
    """

    def __init__(
        self,
        forker: Forker,
        root: Path,
        scheme: str,
        folder: str,
        options: dict[str, Any],
        keys: int,
        budgets: Budgets,
        seed: str,
    ):
        super().__init__(forker, root, (STORE, *WRITERS, *READERS, AUDITOR))
        self._scheme, self._folder, self._options = scheme, folder, options
        self.budgets, self._seed = budgets, seed
        self.directory = Path(folder, "kept")
        rng = random.Random(seed)
        self.owners = {
            f"store.{number}.{number}": list(WRITERS)
            if rng.random() < SHARED
            else [rng.choice(WRITERS)]
            for number in range(keys)
        }
        names = (*self._logs, *(f"{name}-other" for name in READERS))
        self._urls = {name: address(scheme, folder, name) for name in names}
        self._batches = {name: self._draw_batches(rng) for name in READERS}
        self._relays: dict[str, int] = {}
        self._idle: Usage | None = None
        self._sizes: dict[Path, tuple[int, int]] = {}

    def run(self, rng: random.Random, faults: Sequence[Fault]) -> list[Record]:
        """Do this to these processes at random times; return the logs of all processes."""
        if any(kind == "cut" for kind, _ in faults):
            self._relay_all()
        self._begin(STORE)
        self._until(self._is_serving, "the store serves")
        self._idle = Usage.of(self._pids[STORE])
        for name in (*WRITERS, *READERS):
            self._begin(name)
        steps = len(READERS) * BATCHES + len(self.owners)
        moments = sorted(rng.sample(range(steps // 20, steps * 9 // 10), len(faults)))
        for (kind, name), moment in zip(faults, moments, strict=True):
            self._until(lambda m=moment: self._steps() >= m, f"{moment} steps")  # type: ignore[misc]
            time.sleep(rng.random() * 0.02)
            self._inflict(rng, kind, name)
        self._until(lambda: self._have_ended(*WRITERS, *READERS), "everybody ended")
        for name in (*READERS, *WRITERS):
            self._end(name)
        self._until_idle()
        if rng.random() < 0.5:
            self._kill(STORE)
        else:
            self._end(STORE)
        self._begin(STORE)
        self._begin(AUDITOR)
        self._until(lambda: self._have_ended(AUDITOR), "the auditor ended")
        self._end(AUDITOR)
        self._until_idle()
        self._end(STORE)
        return self.records()

    def _role(self, peer: str) -> str:
        return {"S": "store", "W": "writer", "Z": "auditor"}.get(peer[0], "reader")

    def _doing(self, peer: str) -> str:
        return "store" if peer == STORE else f"store {self._role(peer)}"

    def _incarnation(self, peer: str, number: int, log: Path) -> Incarnation:
        url = self._urls[peer]
        common = Incarnation(self._role(peer), number, url, self._options, str(log), [], peer)
        common = dataclasses.replace(
            common, seed=self._seed, lanes=self._lanes, relays=self._relays
        )
        if peer == STORE:
            url += ("&" if "?" in url else "?") + urlencode(self._options)
            return dataclasses.replace(common, url=url, options=self._store_options())
        if peer in WRITERS:
            options = {**self._options, "budget": self.budgets.writer}
            tasks = self._puts(peer)
        else:
            options = {**self._options, "budget": 1 << 20}
            tasks = self._asks(peer) if peer in READERS else [(key, 0.0) for key in self.owners]
        return dataclasses.replace(
            common,
            options=options,
            tasks=tasks,
            store=self._urls[STORE],
            peers=[self._urls[name] for name in WRITERS] if peer == "B" else [],
            lookups={"other": self._urls.get(f"{peer}-other", "")},
        )

    def _store_options(self) -> dict[str, Any]:
        writers = {
            "zmq+ipc": f"zmq+ipc://{self._folder}/*",
            "ucx": "ucx://127.0.0.1:*?trusted_network=1",
        }
        options: dict[str, Any] = {
            "budget": self.budgets.memory,
            "directory": self.directory,
            "directory-budget": self.budgets.files,
            "stats-seconds": 0.05,
        }
        if self._scheme in writers:
            options["writers"] = writers[self._scheme]
        return {name: str(value) for name, value in options.items()}

    def _relay_all(self) -> None:
        """Have all connections to stores and writers pass through one relay."""
        ports = [str(urlsplit(self._urls[name]).port) for name in (STORE, *WRITERS)]
        self._relay = CutRelay(int(ports[0]))
        self._lanes = self._relay.listen_for_lanes()
        self._relays = {ports[0]: self._relay.port}
        self._relays |= {port: self._relay.listen(int(port)) for port in ports[1:]}

    def _puts(self, peer: str) -> list[tuple[str, float]]:
        """What a writer still has to put, and by how many writers each key is put."""
        settled, kept = set[str](), list[str]()
        for path in self._logs[peer]:
            kept.clear()  # what a killed writer kept is lost, if the store has not said so
            for entry in parse(path):
                if entry.event == "withdraw":
                    settled.add(entry.key)
                elif entry.event == "kept":
                    kept.append(entry.key)
                elif entry.event == "drained":
                    settled.update(kept)
        left = [
            (key, float(len(writers))) for key, writers in self.owners.items() if peer in writers
        ]
        return [(key, writers) for key, writers in left if key not in settled]

    def _draw_batches(self, rng: random.Random) -> list[list[str]]:
        keys = list(self.owners)
        return [rng.sample(keys, rng.randint(1, MOST_READ)) for _ in range(BATCHES)]

    def _asks(self, peer: str) -> list[tuple[str, float]]:
        """The batches that a reader has not had, each key with its batch's number."""
        entries = [entry for path in self._logs[peer] for entry in parse(path)]
        done = {entry.number for entry in entries if entry.event == "batch"}
        batches = enumerate(self._batches[peer])
        return [(key, float(n)) for n, keys in batches if n not in done for key in keys]

    def _steps(self) -> int:
        """How many batches were read, and keys put; reads only logs that have grown."""
        for path in (path for name in (*WRITERS, *READERS) for path in self._logs[name]):
            size = path.stat().st_size if path.exists() else 0
            if self._sizes.get(path, (0, 0))[0] != size:
                count = len(re.findall(rb" (?:kept|batch) ", path.read_bytes()))
                self._sizes[path] = size, count
        return sum(count for _, count in self._sizes.values())

    def _is_serving(self) -> bool:
        lines = Path(f"{self._logs[STORE][-1]}.out")
        return lines.exists() and lines.read_text().startswith("serving ")

    def _have_ended(self, *peers: str) -> bool:
        last = [self._logs[peer][-1] for peer in peers]
        return all(path.exists() and b"- end -1 -1\n" in path.read_bytes() for path in last)

    def _until_idle(self) -> None:
        """Wait until the store has no more of the system than when nobody had come yet."""
        idle, pid = self._idle, self._pids[STORE]
        assert idle is not None
        usage, spare = [idle], LANES if self._scheme == "zmq+tcp" else NOTHING

        def is_idle() -> bool:
            usage[:] = [Usage.of(pid)]
            return not usage[0].exceeds(idle, spare)

        try:
            until(is_idle, "the store let go of all that its clients had", PATIENCE)
        except AssertionError:
            raise AssertionError(f"the store has {usage[0]}, and had {idle}") from None
