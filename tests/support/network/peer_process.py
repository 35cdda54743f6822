"""Producers and readers that can be killed at any time; what each did stays on disk.

`python peer_process.py` forks a process for each line of JSON and answers with its pid. Each
process appends to a log of its own, a line for each event, written at once: it survives a SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from itertools import groupby
from typing import TYPE_CHECKING, Any

from omni_kvlink import (
    IntegrityError,
    KVConsumer,
    KVLink,
    KVLinkError,
    KVProducer,
    Receipt,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.telemetry.observers import add_observer
from support.connectors.zmq_addresses import start_garbage_collection
from support.network.cut_relay import send_lanes_to
from support.network.evidence import task_of
from support.network.lookups import Lookups, connected
from support.network.receivers import Receiver, is_path
from support.network.senders import TTL, Sender
from support.telemetry.recorder import Raising

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 60.0
"""Seconds until what is still in use is a leak."""
EXHAUSTED = 0.3
"""Seconds that a process is left without a free descriptor."""
was_exhausted = threading.Event()
"""Set once this process had no free descriptor: then calls may fail for that."""
RUNS = 1000
"""The answer of `poll` while a process runs; no exit code."""
AHEAD = 12
"""Payloads that a producer puts before it waits for the first one's receipt."""


_NEWPID, _NEWIPC, _NEWNET = 0x20000000, 0x08000000, 0x40000000


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
        peer: The process's name.
        seed: Of what it draws by lot.
        leaves: How often a reader leaves a payload unread, and a producer fails one, of all times.
        positions: Of append streams: the chunk behind the last that this reader has read.
        lookups: The URLs of the links by which caches are looked up, by the server's name.
        lanes: The port of the relay that a reader opens its lanes through; 0 if there is none.
        is_contained: Whether it has PID, IPC and network namespaces of its own.
        store: The URL of the store that it shares payloads through; empty if there is none.
        peers: The URLs of those whose payloads it reads without the store.
        relays: The ports through which it connects to others, by their own ports.
    """

    role: str
    number: int
    url: str
    options: dict[str, Any]
    log: str
    tasks: list[tuple[str, float]]
    peer: str = ""
    seed: str = ""
    leaves: float = 0.0
    positions: dict[str, int] = dataclasses.field(default_factory=dict)
    lookups: dict[str, str] = dataclasses.field(default_factory=dict)
    lanes: int = 0
    is_contained: bool = False
    store: str = ""
    peers: list[str] = dataclasses.field(default_factory=list)
    relays: dict[str, int] = dataclasses.field(default_factory=dict)

    def by_task(self) -> Iterator[tuple[list[str], float]]:
        """The keys that are got together, and their timeout."""
        for (_, number), keys in groupby(self.tasks, lambda pair: (task_of(pair[0]), pair[1])):
            yield [key for key, _ in keys], number


class Log:
    """A file of events, complete also after a SIGKILL."""

    def __init__(self, path: str):
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, key: str, event: str, number: int = -1, part: int = -1) -> None:
        os.write(self._fd, f"{key} {event} {number} {part}\n".encode())


def produce(incarnation: Incarnation, log: Log) -> None:
    waiting: deque[tuple[str, Receipt]] = deque()
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(KVLink.serve(incarnation.url, **incarnation.options))
        threading.Thread(target=exhaust_when_told, daemon=True).start()
        sender = Sender(link, incarnation, log)
        if urls := incarnation.lookups:
            lookups = Lookups(urls, incarnation.number, incarnation.options)
            sender.lookups = stack.enter_context(lookups)
        for _, task in groupby(incarnation.tasks, lambda pair: task_of(pair[0])):
            waiting += sender.send({key: int(readers) for key, readers in task})
            while len(waiting) >= AHEAD:
                key, receipt = waiting.popleft()
                wait_receipt(incarnation, key, receipt, log)
                sender.withdraw(key)
        for key, receipt in waiting:
            wait_receipt(incarnation, key, receipt, log)
            sender.withdraw(key)
        check_memory(link, log)
        wait_for_term(log)


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


def wait_receipt(incarnation: Incarnation, key: str, receipt: Receipt, log: Log) -> None:
    with contextlib.suppress(TransferFailed, TransferTimeout):  # the state says which
        receipt.wait(timeout=TTL + 60)
    if receipt.state == "released" and not is_path(incarnation, receipt.ledger.path):
        log.write(key, "WRONG", incarnation.number)
    log.write(key, receipt.state)


def read(incarnation: Incarnation, log: Log) -> None:
    with contextlib.ExitStack() as stack:
        if incarnation.lanes:
            send_lanes_to(incarnation.lanes)
        link = KVLink.connect(incarnation.url, timeout=60, **incarnation.options)
        stack.enter_context(link)
        threading.Thread(target=exhaust_when_told, daemon=True).start()
        receiver = Receiver(link, incarnation, log)
        if urls := incarnation.lookups:
            lookup = connected(urls, incarnation.peer, incarnation.options)
            receiver.lookup = stack.enter_context(lookup)
        for keys, patience in incarnation.by_task():
            receive(receiver, keys, patience, log)
        check_memory(link, log)
        wait_for_term(log)


def receive(receiver: Receiver, keys: list[str], patience: float, log: Log) -> None:
    """Receive a task's payloads, again if there was no descriptor for them."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return receiver.receive(keys, max(0.0, deadline - time.monotonic()))
        except (KVLinkError, OSError) as error:  # noqa: PERF203 (it is rare)
            if isinstance(error, IntegrityError) or not was_exhausted.is_set():
                raise
            log.write(keys[0], "lost")  # nothing could be opened for it: it is requested again


def wait_for_term(log: Log) -> None:
    """Log the end, then wait for SIGTERM."""
    log.write("-", "end")
    signal.sigwait([signal.SIGTERM])


def run_incarnation(incarnation: Incarnation) -> None:
    log = Log(incarnation.log)
    gc.disable()  # as servers do: nothing may wait for the cyclic collector
    start_garbage_collection()
    if incarnation.number % 2:
        add_observer(Raising())
    before = resources()
    try:
        (produce if incarnation.role == "producer" else read)(incarnation, log)
        check_resources(before, log)
    except BaseException:
        log.write("-", "BROKE")
        raise


def fork_contained() -> int:
    """As `os.fork`; the child has namespaces of its own. Its pid is that of this process's."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/pid") as own:
        if libc.unshare(_NEWPID):
            raise OSError(ctypes.get_errno(), "unshare")
        pid = os.fork()
        if pid == 0 and libc.unshare(_NEWIPC | _NEWNET):
            os._exit(1)
        if pid and libc.setns(own.fileno(), _NEWPID):  # of the next child, which may have none
            raise OSError(ctypes.get_errno(), "setns")
    return pid


def main(run: Callable[[Incarnation], None] = run_incarnation) -> None:
    """Fork a process that calls `run` for each incarnation on standard input."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    for line in sys.stdin:
        command = json.loads(line)
        if "poll" in command:
            pid, status = os.waitpid(command["poll"], os.WNOHANG)
            print(os.waitstatus_to_exitcode(status) if pid else RUNS, flush=True)
        elif "reap" in command:
            _, status = os.waitpid(command["reap"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif pid := fork_contained() if command["is_contained"] else os.fork():
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
