"""Processes that meet faults while they work: killed, stopped, starved or cut off."""

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

from omni_kvlink.testing.rig import until
from support.network.evidence import Record, parse, with_cuts
from support.network.peer_process import RUNS, Incarnation

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from support.network.cut_relay import CutRelay

PATIENCE = 60.0
"""Seconds that a call of a process waits; thrice as many, and the campaign hangs."""
RESTART = 0.1
"""Seconds between a kill and the restart; the others finish what they are reading."""
LOOK = 0.02
"""Seconds between two looks whether a process has ended."""
FREEZE = 1.0
"""Seconds that a process is stopped at most; its peers go on waiting for it."""
STARVED = 0.3
STARVED_NBYTES = 256 << 10
"""Seconds that a process gets little more memory, and less than so much."""
PEER_PROCESS = Path(__file__).with_name("peer_process.py")
KINDS = ("kill", "freeze", "descriptors", "memory", "cut")
"""A process is killed and restarted, stopped for a while, or has no free descriptor for a while, or
so little memory that the kernel may end it; or all TCP connections of the readers are cut."""
Fault: TypeAlias = tuple[str, str]
"""One of `KINDS`, and the name of a process."""
DYING = b"- dying -1 -1\n"
"""The last line of a process that kills itself in the middle of a stream."""


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


class FaultyProcesses:
    """The processes of a campaign, each restarted when it was killed; their logs stay.

    A subclass says what an incarnation is (`_incarnation`) and what its peer does (`_doing`).

    Attributes:
        hits: of each fault its kind, and what the process was busy with.
    """

    def __init__(self, forker: Forker, root: Path, peers: Sequence[str]):
        self._forker, self._root = forker, root
        self._pids: dict[str, int] = {}
        self._logs: dict[str, list[Path]] = {name: [] for name in peers}
        self._killed: set[Path] = set()
        self.hits: list[tuple[str, str]] = []
        self._groups: dict[int, MemoryGroup] = {}
        self._next_look = 0.0
        self._relay: CutRelay | None = None  # of connections that are to be cut
        self._lanes = 0  # its port for lanes
        self._cuts: dict[Path, list[int]] = {}  # how many entries each log had at each cut

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
                self._role(peer),
                peer,
                number,
                path in self._killed,
                with_cuts(parse(path), self._cuts.get(path, [])),
            )
            for peer, paths in self._logs.items()
            for number, path in enumerate(paths)
        ]

    def _role(self, peer: str) -> str:
        raise NotImplementedError

    def _doing(self, peer: str) -> str:
        """What a process is busy with."""
        raise NotImplementedError

    def _incarnation(self, peer: str, number: int, log: Path) -> Incarnation:
        """The next process of a peer, of which there were so many."""
        raise NotImplementedError

    def _begin(self, peer: str) -> None:
        incarnations = self._logs[peer]
        path = self._root / f"{peer}.{len(incarnations)}"
        incarnation = self._incarnation(peer, len(incarnations), path)
        incarnations.append(path)
        self._pids[peer] = self._forker.begin(incarnation)

    def _inflict(self, rng: random.Random, kind: str, peer: str) -> None:
        """Do one of `KINDS` to a process."""
        self.hits.append((kind, self._doing(peer)))
        if kind == "kill":
            self._kill(peer)
            self._begin(peer)
        elif kind == "freeze":
            os.kill(self._pids[peer], signal.SIGSTOP)
            time.sleep(FREEZE * rng.random())
            os.kill(self._pids[peer], signal.SIGCONT)
        elif kind == "cut":
            self._cut()
        elif kind == "memory":
            self._starve(peer, rng.randrange(STARVED_NBYTES))
        else:
            os.kill(self._pids[peer], signal.SIGUSR1)

    def _end(self, peer: str) -> None:
        """Have a process end by itself, as it does for SIGTERM."""
        os.kill(self._pids[peer], signal.SIGTERM)
        assert self._reap(peer) == 0, f"{peer} failed while it exited"

    def _cut(self) -> None:
        """Cut all connections that are relayed, at once."""
        assert self._relay is not None
        self._relay.cut()

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
            self.hits.append(("death", self._doing(peer)))
            self._killed.add(path)
            self._begin(peer)

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
        code, path = self._reap(peer), self._logs[peer][-1]
        # It may have killed itself just before.
        is_killed = code == -signal.SIGKILL or path.read_bytes().endswith(DYING)
        assert is_killed, f"{peer} had ended already, with exit code {code}"
        self._killed.add(path)
        time.sleep(RESTART)
