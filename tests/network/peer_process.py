"""Producers and readers that can be killed at any moment; what each saw stays on disk.

`python lives.py` forks a process for each line of JSON and answers with its pid. Each life appends
to a diary of its own, one word to a line, written at once: what is there, is there, also after a
SIGKILL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from typing import Any

from omni_kvlink import KVLink, PeerLostError, Receipt, TransferFailed, TransferTimeout
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.memory_checks import sized

SIZES = (2_000, 40_000, 300_000, 1_500_000)
"""Bytes of payloads: beside their offer, in one chunk, in several."""
TTL = 5.0
AHEAD = 12
"""Payloads that a producer has on their way at a time."""


@dataclasses.dataclass(frozen=True)
class Life:
    """One process, from its start to its end.

    Args:
        number: how many of its name were before.
        errands: keys; for a producer with how many readers each is for, for a reader with the
            seconds that it asks for it.
    """

    role: str
    number: int
    url: str
    options: dict[str, Any]
    diary: str
    errands: list[tuple[str, float]]


def recipe(key: str, life: int) -> Recipe:
    """Every life of a producer gives a key other bytes."""
    number = int(key.removeprefix("k"))
    return sized(key, SIZES[number % len(SIZES)], seed=1 + 1000 * life + number)


def life_of(key: str, seed: int) -> int:
    return (seed - 1 - int(key.removeprefix("k"))) // 1000


class Diary:
    """Words that outlive the process."""

    def __init__(self, path: str):
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, key: str, word: str, number: int = -1) -> None:
        os.write(self._fd, f"{key} {word} {number}\n".encode())


def produce(life: Life, diary: Diary) -> None:
    waiting: deque[tuple[str, Receipt]] = deque()
    with KVLink.serve(life.url, **life.options) as link:
        for key, readers in life.errands:
            data = recipe(key, life.number).make()
            diary.write(key, "put", int(readers))
            receipt = link.put(data, readers=int(readers), ttl=TTL, timeout=30)
            waiting.append((key, receipt))
            if len(waiting) == AHEAD:
                settle(*waiting.popleft(), diary)
        for key, receipt in waiting:
            settle(key, receipt, diary)
        stay(diary)


def settle(key: str, receipt: Receipt, diary: Diary) -> None:
    with contextlib.suppress(TransferFailed, TransferTimeout):  # the state says which
        receipt.wait(timeout=TTL + 30)
    diary.write(key, receipt.state)


def read(life: Life, diary: Diary) -> None:
    with KVLink.connect(life.url, timeout=30, **life.options) as link:
        for key, patience in life.errands:
            deadline = time.monotonic() + patience
            while not read_one(link, key, deadline, diary):
                pass
        stay(diary)


def read_one(link: KVLink, key: str, deadline: float, diary: Diary) -> bool:
    """Whether no more is to be hoped for."""
    left = deadline - time.monotonic()
    try:
        with link.get(key, timeout=max(0.0, left), verify="full") as data:
            life = life_of(key, data.metadata.extra["seed"])
            is_right = fingerprint(data) == fingerprint(recipe(key, life).make())
            diary.write(key, "read" if is_right else "WRONG", life)
    except PeerLostError:
        diary.write(key, "lost")
        return left <= 0
    except (TransferFailed, TransferTimeout) as error:
        diary.write(key, type(error).__name__)
    return True


def stay(diary: Diary) -> None:
    """All is done; leave when told to."""
    diary.write("-", "end")
    signal.sigwait([signal.SIGTERM])


def live(life: Life) -> None:
    diary = Diary(life.diary)
    try:
        (produce if life.role == "producer" else read)(life, diary)
    except BaseException:
        diary.write("-", "BROKE")
        raise


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for line in sys.stdin:
        command = json.loads(line)
        if "reap" in command:
            _, status = os.waitpid(command["reap"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            os.close(0)
            try:
                live(Life(**command))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)


if __name__ == "__main__":
    main()
