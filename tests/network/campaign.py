"""200 transfers between processes that are killed in their midst, and start again."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evidence import Entry, Witness, parse
from peer_process import Life

from omni_kvlink.testing.rig import until

KEYS = 200
PRODUCER, READERS = "P", ("A", "B")
PATIENCE = 10.0
"""Seconds that a reader asks for a key."""
RESTART = 0.1
"""Seconds between a death and the next life; survivors finish what they are reading."""
DOUBT = 0.3
"""Seconds that a reader asks again for what its last life may have had."""


class Zygote:
    """Forks lives that need not import anything."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("peer_process.py"))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, script], stdin=pipe, stdout=pipe)

    def begin(self, life: Life) -> int:
        """The pid."""
        return self._ask(dataclasses.asdict(life))

    def reap(self, pid: int) -> int:
        """How it exited; waits for it."""
        return self._ask({"reap": pid})

    def close(self) -> None:
        self._process.communicate(timeout=10)

    def _ask(self, command: dict[str, Any]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class Campaign:
    """A producer P, readers A and B, 200 keys; each fifth is for both readers."""

    def __init__(self, zygote: Zygote, root: Path, url: str, options: dict[str, Any]):
        self._zygote, self._root = zygote, root
        self._url, self._options = url, options
        self._pids: dict[str, int] = {}
        self._lives: dict[str, list[Path]] = {name: [] for name in (PRODUCER, *READERS)}
        self._killed: set[Path] = set()
        self.orders = {
            f"k{n}": list(READERS) if n % 5 == 4 else [READERS[n % 2]] for n in range(KEYS)
        }

    def run(self, rng: random.Random, kills: list[str]) -> list[Witness]:
        """Kill and restart these, at random moments; what everybody wrote."""
        for name in self._lives:
            self._begin(name)
        moments = sorted(rng.sample(range(10, KEYS), len(kills)))
        for name, moment in zip(kills, moments, strict=True):
            until(lambda m=moment: self._reads() >= m, f"{moment} reads", 3 * PATIENCE)  # type: ignore[misc]
            time.sleep(rng.random() * 0.01)
            self._kill(name)
            self._begin(name)
        until(self._ended, "everybody ended", 3 * PATIENCE)
        for name in (*READERS, PRODUCER):
            os.kill(self._pids[name], signal.SIGTERM)
            assert self._zygote.reap(self._pids.pop(name)) == 0, f"{name} broke while it left"
        return self.witnesses()

    def close(self) -> None:
        """What a test that failed left alive."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            self._zygote.reap(pid)

    def witnesses(self) -> list[Witness]:
        return [
            Witness(_role(who), who, number, path in self._killed, parse(path))
            for who, paths in self._lives.items()
            for number, path in enumerate(paths)
        ]

    def _begin(self, who: str) -> None:
        lives = self._lives[who]
        errands = self._puts() if who == PRODUCER else self._gets(who)
        path = self._root / f"{who}.{len(lives)}"
        life = Life(_role(who), len(lives), self._url, self._options, str(path), errands)
        lives.append(path)
        self._pids[who] = self._zygote.begin(life)

    def _puts(self) -> list[tuple[str, float]]:
        """What readers still lack, and how many of them."""
        had = {(witness.who, key) for witness in self.witnesses() for key, _ in witness.reads}
        lack = {key: sum((who, key) not in had for who in self.orders[key]) for key in self.orders}
        return [(key, count) for key, count in lack.items() if count]

    def _gets(self, who: str) -> list[tuple[str, float]]:
        """What a reader's lives have not had; for what the last one read last it asks again."""
        lives = [witness for witness in self.witnesses() if witness.who == who]
        had = {key for life in lives for key, _ in life.reads}
        doubtful = {key for life in lives[-1:] for key, _ in life.reads[-1:]}
        mine = [key for key, readers in self.orders.items() if who in readers]
        again = [(key, DOUBT) for key in mine if key in doubtful]
        return again + [(key, PATIENCE) for key in mine if key not in had]

    def _reads(self) -> int:
        return sum(len(witness.reads) for witness in self.witnesses())

    def _ended(self) -> bool:
        last = [paths[-1] for paths in self._lives.values()]
        return all(Entry("-", "end") in parse(path) for path in last)

    def _kill(self, who: str) -> None:
        pid = self._pids.pop(who)
        os.kill(pid, signal.SIGKILL)
        assert self._zygote.reap(pid) == -signal.SIGKILL, f"{who} had ended already"
        self._killed.add(self._lives[who][-1])
        time.sleep(RESTART)


def _role(who: str) -> str:
    return "producer" if who == PRODUCER else "reader"
