"""Transfers between processes that are killed and restarted meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from omni_kvlink.testing.rig import until
from support.connectors.zmq_addresses import free_port
from support.network.cut_relay import CutRelay
from support.network.evidence import (
    UNREAD,
    Record,
    chunk_counts,
    keys_read,
    parse,
    task_of,
    with_cuts,
)
from support.network.features import PLAIN, feature_of, names
from support.network.peer_process import RUNS, Incarnation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROUNDS = int(os.environ.get("KVLINK_ROUNDS", "3"))
"""Seeds of each test that kills or harms at random in `make test-all`; for a night, 30."""
PRODUCER, READERS = "P", ("A", "B")
PATIENCE = 60.0
"""Timeout of a get, in seconds."""
RESTART = 0.1
"""Seconds between a kill and the restart; the others finish what they are reading."""
LOOK = 0.02
"""Seconds between two looks whether a process has ended."""
DOUBT = 0.3
"""Timeout of a repeated get for a payload that the killed process may have received."""


FREEZE = 1.0
"""Seconds that a process is stopped at most; its peers go on waiting for it."""
STARVED = 0.3
STARVED_NBYTES = 256 << 10
"""Seconds that a process gets little more memory, and less than so much."""
PEER_PROCESS = Path(__file__).with_name("peer_process.py")
KINDS = ("kill", "freeze", "descriptors", "memory", "cut")
"""A process is killed and restarted, stopped for a while, or has no free descriptor for a while, or
so little memory that the kernel may end it; or all TCP connections of the readers are cut."""
_END = re.compile(b" (read|ended|TransferTimeout|TransferFailed) ")
Fault: TypeAlias = tuple[str, str]
"""One of `KINDS`, and the name of a process."""
DYING = b"- dying -1 -1\n"
"""The last line of a process that kills itself in the middle of a stream."""


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


def memory_controller() -> Path | None:
    """Where control groups limit memory, if this process may make one there."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if os.geteuid() or not os.access(second, os.W_OK):
        return None
    if (first / "memory.limit_in_bytes").exists():
        return first if os.access(first, os.W_OK) else None
    enabled = second / "cgroup.subtree_control"
    return second if enabled.exists() and "memory" in enabled.read_text().split() else None


class MemoryGroup:
    """A control group of one process, without a limit at first."""

    def __init__(self, controller: Path, pid: int):
        self._folder = controller / f"kvlink-{pid}"
        self._folder.mkdir()
        names = "limit_in_bytes", "usage_in_bytes", "oom_control"
        if not (self._folder / f"memory.{names[0]}").exists():  # version 2
            names = "max", "current", "events"
        self._limit, self._usage, self._events = (self._folder / f"memory.{one}" for one in names)
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, nbytes: int) -> None:
        """Let the process use so many bytes more than it does."""
        until(lambda: self._try_limit(nbytes), "its memory is limited")

    def _try_limit(self, nbytes: int) -> bool:
        try:
            self._limit.write_text(str(int(self._usage.read_text()) + nbytes))
        except OSError as error:
            if error.errno != errno.EBUSY:  # version 1: it uses more by now
                raise
            return False
        return True

    def lift(self) -> None:
        """End the limit."""
        self._limit.write_text("max" if self._limit.name == "memory.max" else "-1")

    def has_killed(self) -> bool:
        """Whether the kernel has ended the process."""
        return " ".join(re.findall(r"^oom_kill (\d+)", self._events.read_text(), re.M)) != "0"

    def close(self) -> None:
        """Remove the group; its process has ended."""
        self._folder.rmdir()


class Forker:
    """Forks processes of a script from one that has imported everything."""

    def __init__(self, script: Path = PEER_PROCESS) -> None:
        pipe, command = subprocess.PIPE, [sys.executable, str(script)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env)

    def begin(self, incarnation: Incarnation) -> int:
        """Fork a process; return its pid."""
        return self._command(dataclasses.asdict(incarnation))

    def reap(self, pid: int) -> int:
        """Wait for a process; return its exit code."""
        return self._command({"reap": pid})

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a process, or None if it runs."""
        code = self._command({"poll": pid})
        return None if code == RUNS else code

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _command(self, command: dict[str, Any]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class Campaign:
    """A producer P, readers A and B, and keys; if `shared`, each fifth task is for both readers.

    `patience`: seconds that a reader waits for a payload. `leaves`: how often a reader leaves one
    unread, beside all faults. `seed` decides what is transferred, and what processes draw by lot.
    `lookups` are the URLs of links for lookups, by the name of the process that serves each.

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
    ):
        self._forker, self._root, self._patience = forker, root, patience
        self._url, self._options = url, options
        self._leaves, self._seed = leaves, seed
        self._pids: dict[str, int] = {}
        self._logs: dict[str, list[Path]] = {name: [] for name in (PRODUCER, *READERS)}
        self._killed: set[Path] = set()
        self.orders: dict[str, list[str]] = {}
        self.hits: list[tuple[str, str]] = []
        number = -1
        for key in names(features, keys, random.Random(seed)):
            number += task_of(key) not in map(task_of, list(self.orders)[-1:])
            both = shared and number % 5 == 4
            self.orders[key] = list(READERS) if both else [READERS[number % 2]]
        self._counts: dict[Path, tuple[int, int]] = {}
        self._groups: dict[int, MemoryGroup] = {}
        is_looked_up = any(feature_of(key) == "lookup" for key in self.orders)
        self._lookups = dict(lookups or {}) if is_looked_up else {}
        self._next_look = 0.0
        self._relay: CutRelay | None = None  # of the readers, if their connections are to be cut
        self._lanes = 0  # its port for lanes
        self._cuts: dict[Path, list[int]] = {}  # how many entries each log had at each cut

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
            self.hits.append((kind, self._feature(name)))
            if kind == "kill":
                self._kill(name)
                self._begin(name)
            elif kind == "freeze":
                os.kill(self._pids[name], signal.SIGSTOP)
                time.sleep(FREEZE * rng.random())
                os.kill(self._pids[name], signal.SIGCONT)
            elif kind == "cut":
                self._cut()
            elif kind == "memory":
                self._starve(name, rng.randrange(STARVED_NBYTES))
            else:
                os.kill(self._pids[name], signal.SIGUSR1)
        self._until(self._ended, "everybody ended")
        for name in (*READERS, PRODUCER):
            os.kill(self._pids[name], signal.SIGTERM)
            assert self._reap(name) == 0, f"{name} failed while it exited"
        return self.records()

    def close(self) -> None:
        """Kill the processes that a failed test left."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            self._forker.reap(pid)
        for group in self._groups.values():
            group.close()
        if self._relay is not None:
            self._relay.close()

    def records(self) -> list[Record]:
        return [
            Record(
                _role(peer),
                peer,
                number,
                path in self._killed,
                with_cuts(parse(path), self._cuts.get(path, [])),
            )
            for peer, paths in self._logs.items()
            for number, path in enumerate(paths)
        ]

    def _begin(self, peer: str) -> None:
        incarnations = self._logs[peer]
        tasks = self._puts() if peer == PRODUCER else self._gets(peer)
        path = self._root / f"{peer}.{len(incarnations)}"
        url = self._url
        if self._relay is not None and peer != PRODUCER:
            url = url.replace(f":{urlsplit(url).port}", f":{self._relay.port}")
        incarnation = Incarnation(
            _role(peer),
            len(incarnations),
            url,
            self._options,
            str(path),
            tasks,
            peer,
            self._seed,
            self._leaves,
            {} if peer == PRODUCER else self._positions(peer),
            self._lookups,
            self._lanes,
        )
        incarnations.append(path)
        self._pids[peer] = self._forker.begin(incarnation)

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

    def _feature(self, peer: str) -> str:
        """The feature that a process was busy with when it wrote its last line."""
        entries = [entry for entry in parse(self._logs[peer][-1]) if entry.key != "-"]
        return feature_of(entries[-1].key) if entries else "start"

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something, and restart processes that have killed themselves."""

        def is_so() -> bool:
            self._restart_dead()
            return condition()

        until(is_so, what, 3 * PATIENCE)

    def _restart_dead(self) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK
        for peer, pid in list(self._pids.items()):
            code = self._forker.poll(pid)
            if code is None:
                continue
            del self._pids[peer]
            path = self._logs[peer][-1]
            assert path.read_bytes().endswith(DYING), f"{peer} ended with exit code {code}"
            self.hits.append(("death", self._feature(peer)))
            self._killed.add(path)
            self._begin(peer)

    def _ended(self) -> bool:
        last = [paths[-1] for paths in self._logs.values()]
        return all(path.exists() and path.read_bytes().endswith(b"- end -1 -1\n") for path in last)

    def _cut(self) -> None:
        """Cut all connections of the readers at once, and note where each of them was."""
        assert self._relay is not None
        for path in (self._logs[name][-1] for name in READERS):
            self._cuts.setdefault(path, []).append(len(parse(path)))
        self._relay.cut()

    def _kill(self, peer: str) -> None:
        os.kill(self._pids[peer], signal.SIGKILL)
        self._reap_killed(peer)

    def _starve(self, peer: str, nbytes: int) -> None:
        """Let a process have so much more memory for a while; restart it if that killed it."""
        controller = memory_controller()
        assert controller, "nobody may limit memory here"
        pid = self._pids[peer]
        group = self._groups[pid] = self._groups.get(pid) or MemoryGroup(controller, pid)
        group.limit(nbytes)
        end = time.monotonic() + STARVED
        while not group.has_killed() and time.monotonic() < end:
            time.sleep(0.01)
        group.lift()
        if group.has_killed():
            self._reap_killed(peer)
            self._begin(peer)

    def _reap(self, peer: str) -> int:
        return self._forker.reap(self._pids.pop(peer))

    def _reap_killed(self, peer: str) -> None:
        assert self._reap(peer) == -signal.SIGKILL, f"{peer} had ended already"
        self._killed.add(self._logs[peer][-1])
        time.sleep(RESTART)


def _role(peer: str) -> str:
    return "producer" if peer == PRODUCER else "reader"
