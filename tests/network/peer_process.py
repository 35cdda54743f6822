"""Producers and readers that can be killed at any time; what each did stays on disk.

`python peer_process.py` forks a process for each line of JSON and answers with its pid. Each
process appends to a log of its own, a line for each event, written at once: it survives a SIGKILL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from zmq_fixtures import start_garbage_collection

from omni_kvlink import (
    CapacityError,
    IntegrityError,
    KVCacheTransferData,
    KVConsumer,
    KVLink,
    KVLinkError,
    KVProducer,
    PeerLostError,
    Receipt,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.memory_checks import sized

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (2_000, 40_000, 300_000, 1_500_000)
"""Bytes of payloads: inline, in one chunk, in several."""
TTL = 5.0
PATIENCE = 60.0
"""Seconds until what is still in use is a leak."""
EXHAUSTED = 0.3
"""Seconds that a process is left without a free descriptor."""
was_exhausted = threading.Event()
"""Set once this process had no free descriptor: then calls may fail for that."""
AHEAD = 12
"""Payloads that a producer puts before it waits for the first one's receipt."""


@dataclasses.dataclass(frozen=True)
class Incarnation:
    """One process, from its start to its end.

    Args:
        role: "producer" or "reader".
        number: How many processes of this name were before.
        url: The link's URL.
        options: The link's options.
        log: The path of its log.
        tasks: Keys, each with its number of readers (producer) or its timeout (reader).
    """

    role: str
    number: int
    url: str
    options: dict[str, Any]
    log: str
    tasks: list[tuple[str, float]]


def recipe(key: str, incarnation: int) -> Recipe:
    """Return a payload whose bytes differ for each incarnation of the producer."""
    number = int(key.removeprefix("k"))
    return sized(key, SIZES[number % len(SIZES)], seed=1 + 1000 * incarnation + number)


def incarnation_of(key: str, seed: int) -> int:
    return (seed - 1 - int(key.removeprefix("k"))) // 1000


class Log:
    """A file of events, complete also after a SIGKILL."""

    def __init__(self, path: str):
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, key: str, event: str, number: int = -1) -> None:
        os.write(self._fd, f"{key} {event} {number}\n".encode())


def produce(incarnation: Incarnation, log: Log) -> None:
    waiting: deque[tuple[str, Receipt]] = deque()
    with KVLink.serve(incarnation.url, **incarnation.options) as link:
        threading.Thread(target=exhaust_when_told, daemon=True).start()
        for key, readers in incarnation.tasks:
            log.write(key, "put", int(readers))
            receipt = put(link, key, incarnation.number, int(readers), log)
            waiting.append((key, receipt))
            if len(waiting) == AHEAD:
                wait_receipt(*waiting.popleft(), log)
        for key, receipt in waiting:
            wait_receipt(key, receipt, log)
        check_memory(link, log)
        wait_for_term(log)


def put(link: KVProducer, key: str, incarnation: int, readers: int, log: Log) -> Receipt:
    """Put a payload, again if there was no descriptor for its memory."""
    while True:
        try:
            data = recipe(key, incarnation).make()
            return link.put(data, readers=readers, ttl=TTL, timeout=60)
        except CapacityError:  # noqa: PERF203 (it is rare)
            log.write(key, "refused")
            time.sleep(EXHAUSTED / 10)


def check_memory(link: KVProducer | KVConsumer, log: Log) -> None:
    """Log a leak if memory of payloads that have ended stays in use."""
    deadline = time.monotonic() + PATIENCE
    while link.stats().get("memory", {}).get("used"):
        if time.monotonic() > deadline:
            log.write("-", "LEAK")
            return
        time.sleep(0.01)


def resources() -> dict[str, str]:
    """Descriptors of this process, and shared memory that it maps."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    with open("/proc/self/maps") as maps:
        mapped = (line.split(maxsplit=5) for line in maps)
        return found | {row[0]: row[5].strip() for row in mapped if row[5:6] and "memfd:" in row[5]}


def remaining(before: dict[str, str]) -> set[str]:
    """What this process has more than before; something, while no descriptor is free to look."""
    try:
        return {what for key, what in resources().items() if before.get(key) != what}
    except OSError:
        return {"unknown"}


def check_resources(before: dict[str, str], log: Log) -> None:
    """Log as leaks what this process has more than before, its links being closed."""
    deadline = time.monotonic() + PATIENCE
    while left := remaining(before):
        if time.monotonic() > deadline:
            for what in left:
                log.write(what.replace(" ", "_"), "LEAK")
            return
        time.sleep(0.01)


def exhaust_when_told() -> None:
    """At each SIGUSR1, leave this process without a free descriptor for a while."""
    while True:
        signal.sigwait([signal.SIGUSR1])
        was_exhausted.set()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        plugs, highest = list[int](), max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    plugs.append(os.dup(2))
            time.sleep(EXHAUSTED)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for plug in plugs:
                os.close(plug)


def wait_receipt(key: str, receipt: Receipt, log: Log) -> None:
    with contextlib.suppress(TransferFailed, TransferTimeout):  # the state says which
        receipt.wait(timeout=TTL + 60)
    log.write(key, receipt.state)


def read(incarnation: Incarnation, log: Log) -> None:
    with KVLink.connect(incarnation.url, timeout=60, **incarnation.options) as link:
        threading.Thread(target=exhaust_when_told, daemon=True).start()
        for key, patience in incarnation.tasks:
            deadline = time.monotonic() + patience
            while not read_one(link, key, deadline, log):
                pass
        check_memory(link, log)
        wait_for_term(log)


def read_one(link: KVConsumer, key: str, deadline: float, log: Log) -> bool:
    """Get and check one payload; return False if the get should be repeated."""
    left = deadline - time.monotonic()
    try:
        with link.get(key, timeout=max(0.0, left), verify="full") as data:
            assert isinstance(data, KVCacheTransferData)
            incarnation = incarnation_of(key, data.metadata.extra["seed"])
            is_right = fingerprint(data) == fingerprint(recipe(key, incarnation).make())
            log.write(key, "read" if is_right else "WRONG", incarnation)
    except PeerLostError:
        log.write(key, "lost")
        return left <= 0
    except (TransferFailed, TransferTimeout) as error:
        log.write(key, type(error).__name__)
    except (KVLinkError, OSError) as error:
        if isinstance(error, IntegrityError) or not was_exhausted.is_set():
            raise
        log.write(key, "lost")  # nothing could be opened for it: it is requested again
        return left <= 0
    return True


def wait_for_term(log: Log) -> None:
    """Log the end, then wait for SIGTERM."""
    log.write("-", "end")
    signal.sigwait([signal.SIGTERM])


def run_incarnation(incarnation: Incarnation) -> None:
    log = Log(incarnation.log)
    gc.disable()  # as servers do: nothing may wait for the cyclic collector
    start_garbage_collection()
    before = resources()
    try:
        (produce if incarnation.role == "producer" else read)(incarnation, log)
        check_resources(before, log)
    except BaseException:
        log.write("-", "BROKE")
        raise


def main(run: Callable[[Incarnation], None] = run_incarnation) -> None:
    """Fork a process that calls `run` for each incarnation on standard input."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
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
                run(Incarnation(**command))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)


if __name__ == "__main__":
    main()
