"""Transfers between processes that are killed and restarted meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from evidence import Record, parse
from peer_process import Incarnation
from zmq_fixtures import free_port

from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

ROUNDS = int(os.environ.get("KVLINK_ROUNDS", "3"))
"""Seeds of each test that kills or harms at random in `make test-all`; for a night, 30."""
PRODUCER, READERS = "P", ("A", "B")
PATIENCE = 60.0
"""Timeout of a get, in seconds."""
RESTART = 0.1
"""Seconds between a kill and the restart; the others finish what they are reading."""
DOUBT = 0.3
"""Timeout of a repeated get for a payload that the killed process may have received."""


FREEZE = 1.0
"""Seconds that a process is stopped at most; its peers go on waiting for it."""
STARVED = 0.3
STARVED_NBYTES = 256 << 10
"""Seconds that a process gets little more memory, and less than so much."""
PEER_PROCESS = Path(__file__).with_name("peer_process.py")
KINDS = ("kill", "freeze", "descriptors", "memory")
"""A process is killed and restarted, stopped for a while, or has no free descriptor for a while, or
so little memory that the kernel may end it."""
_END = re.compile(b" (read|TransferTimeout) ")
Fault: TypeAlias = tuple[str, str]
"""One of `KINDS`, and the name of a process."""


def address(transport: str, directory: str) -> str:
    """The URL of a campaign over a transport; sockets are in the directory."""
    if transport == "shm":
        return "shm://campaign"
    if transport == "zmq+ipc":
        return f"zmq+ipc://{directory}/campaign.sock"
    if transport == "auto":
        return f"auto://campaign?tcp=127.0.0.1:{free_port()}"
    query = "?trusted_network=1" if transport == "ucx" else ""
    return f"{transport}://127.0.0.1:{free_port()}{query}"


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
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)

    def begin(self, incarnation: Incarnation) -> int:
        """Fork a process; return its pid."""
        return self._command(dataclasses.asdict(incarnation))

    def reap(self, pid: int) -> int:
        """Wait for a process; return its exit code."""
        return self._command({"reap": pid})

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _command(self, command: dict[str, Any]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class Campaign:
    """A producer P, readers A and B, and keys; if `shared`, each fifth is for both readers.

    `patience`: seconds that a reader waits for a payload.
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
    ):
        self._forker, self._root, self._patience = forker, root, patience
        self._url, self._options = url, options
        self._pids: dict[str, int] = {}
        self._logs: dict[str, list[Path]] = {name: [] for name in (PRODUCER, *READERS)}
        self._killed: set[Path] = set()
        self.orders = {
            f"k{n}": list(READERS) if shared and n % 5 == 4 else [READERS[n % 2]]
            for n in range(keys)
        }
        self._counts: dict[Path, tuple[int, int]] = {}
        self._groups: dict[int, MemoryGroup] = {}

    def run(self, rng: random.Random, faults: Sequence[Fault]) -> list[Record]:
        """Do this to these processes at random times; return the logs of all processes."""
        for name in self._logs:
            self._begin(name)
        moments = sorted(rng.sample(range(10, len(self.orders)), len(faults)))
        for (kind, name), moment in zip(faults, moments, strict=True):
            until(lambda m=moment: self._reads() >= m, f"{moment} reads", 3 * PATIENCE)  # type: ignore[misc]
            time.sleep(rng.random() * 0.01)
            if kind == "kill":
                self._kill(name)
                self._begin(name)
            elif kind == "freeze":
                os.kill(self._pids[name], signal.SIGSTOP)
                time.sleep(FREEZE * rng.random())
                os.kill(self._pids[name], signal.SIGCONT)
            elif kind == "memory":
                self._starve(name, rng.randrange(STARVED_NBYTES))
            else:
                os.kill(self._pids[name], signal.SIGUSR1)
        until(self._ended, "everybody ended", 3 * PATIENCE)
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

    def records(self) -> list[Record]:
        return [
            Record(_role(peer), peer, number, path in self._killed, parse(path))
            for peer, paths in self._logs.items()
            for number, path in enumerate(paths)
        ]

    def _begin(self, peer: str) -> None:
        incarnations = self._logs[peer]
        tasks = self._puts() if peer == PRODUCER else self._gets(peer)
        path = self._root / f"{peer}.{len(incarnations)}"
        incarnation = Incarnation(
            _role(peer), len(incarnations), self._url, self._options, str(path), tasks
        )
        incarnations.append(path)
        self._pids[peer] = self._forker.begin(incarnation)

    def _puts(self) -> list[tuple[str, float]]:
        """Return the keys that readers lack, and by how many."""
        had = {(record.peer, key) for record in self.records() for key, _ in record.reads}
        lack = {
            key: sum((peer, key) not in had for peer in self.orders[key]) for key in self.orders
        }
        return [(key, count) for key, count in lack.items() if count]

    def _gets(self, peer: str) -> list[tuple[str, float]]:
        """Return the keys that a reader has not read, and again the last one that it read."""
        incarnations = [record for record in self.records() if record.peer == peer]
        had = {key for incarnation in incarnations for key, _ in incarnation.reads}
        doubtful = {key for incarnation in incarnations[-1:] for key, _ in incarnation.reads[-1:]}
        mine = [key for key, readers in self.orders.items() if peer in readers]
        again = [(key, DOUBT) for key in mine if key in doubtful and self._is_over(key)]
        return again + [(key, self._patience) for key in mine if key not in had]

    def _is_over(self, key: str) -> bool:
        """Whether every other reader has it: else a get could take another one's share."""
        had = {(record.peer, key) for record in self.records() for key, _ in record.reads}
        return all((name, key) in had for name in self.orders[key])

    def _reads(self) -> int:
        """How often a payload was read, or waited for in vain; reads only logs that have grown."""
        for path in (path for name in READERS for path in self._logs[name]):
            size = path.stat().st_size if path.exists() else 0
            if self._counts.get(path, (0, 0))[0] != size:
                self._counts[path] = size, len(_END.findall(path.read_bytes()))
        return sum(count for _, count in self._counts.values())

    def _ended(self) -> bool:
        last = [paths[-1] for paths in self._logs.values()]
        return all(path.exists() and path.read_bytes().endswith(b"- end -1\n") for path in last)

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
