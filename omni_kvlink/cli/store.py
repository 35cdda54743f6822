"""`kvlink store`: keeps payloads for other processes, in memory and in files."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from omni_kvlink.cli.arguments import SECONDS, examples, size
from omni_kvlink.cli.process import show
from omni_kvlink.system.threads import start_thread

if TYPE_CHECKING:
    import argparse

    from omni_kvlink.cli.arguments import Parser
    from omni_kvlink.kept.store import PayloadStore

_ABOUT = """keep the payloads that other processes offer (omni_kvlink.kept.StoreClient), for any
number of readers, beyond the end of the process that made them; SIGTERM and Ctrl-C write what is in
memory alone to the directory and end the store with exit status 0, a second one ends it at once"""
_DRAIN_SECONDS = 86_400.0


def add_to(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the parser of the verb."""
    lines = (
        "kvlink store shm://store --budget 64GiB",
        "kvlink store shm://store --budget 64GiB --directory /var/kv",
        "kvlink store zmq+tcp://127.0.0.1:7400 --writers 'zmq+tcp://10.0.0.*:*'",
    )
    about = "keep payloads for other processes, in memory and in files"
    parser = commands.add_parser("store", help=about, description=_ABOUT, epilog=examples(*lines))
    parser.set_defaults(perform=_store, grace=_DRAIN_SECONDS)
    add = parser.add_argument
    add("url", metavar="URL", help="where to serve; options follow a '?'")
    budget_help = """memory of all payloads together, as 64GiB; the least recently used one goes
    (default: %(default)s)"""
    add("--budget", metavar="SIZE", type=size, default="4GiB", help=budget_help)
    directory_help = "write each payload to a file here, too; made if there is none"
    add("--directory", metavar="DIR", help=directory_help)
    files_help = "bytes of all files together; the least recently used one goes (default: 1TiB)"
    add("--directory-budget", metavar="SIZE", type=size, default="1TiB", help=files_help)
    writers_help = """URLs of processes that the store may connect to, when they ask for it; a *
    stands for any part of a name or address, options follow a '?'; may be given several times
    (default: those of this user on this machine)"""
    add("--writers", metavar="PATTERN", action="append", default=[], help=writers_help)
    stats_help = "print a line of what is kept so often; 0 for never (default: %(default)g)"
    add("--stats-seconds", type=SECONDS, metavar="SECONDS", default=60.0, help=stats_help)


def _store(arguments: argparse.Namespace) -> int:
    # Blocked before the first thread starts, so that the signal waits for `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    from omni_kvlink.kept.store import PayloadStore

    store = PayloadStore(
        arguments.url,
        budget=arguments.budget,
        files=arguments.directory,
        files_budget=arguments.directory_budget,
        writers=arguments.writers,
    )
    with store:
        ended = _ended_by_signal()
        allowed = (
            ", ".join(pattern.text for pattern in store.policy.patterns) or "nobody: see --writers"
        )
        show(f"serving {store.url} for writers at {allowed}; Ctrl-C ends it")
        _report_until(ended, store, arguments.stats_seconds or None)
        show("writing what is in memory alone", to_stderr=True)
    show(_line(store.stats()))
    return 0


def _ended_by_signal() -> threading.Event:
    """An event that SIGTERM sets, for which a thread waits."""
    ended = threading.Event()

    def wait_for_signal() -> None:
        signal.sigwait([signal.SIGTERM])
        ended.set()

    # `sigtimedwait` returns as if the signal had come, if this process is stopped meanwhile.
    start_thread(threading.Thread(target=wait_for_signal, name="kvlink-signal", daemon=True))
    return ended


def _report_until(ended: threading.Event, store: PayloadStore, seconds: float | None) -> None:
    """Print a line of statistics every `seconds` seconds, if it changed, until `ended` is set."""
    last = ""
    while not ended.wait(seconds):
        line = _line(store.stats())
        if line != last:
            show(line)
        last = line


def _line(stats: dict[str, Any]) -> str:
    transfers, memory, files = (
        stats["link"]["transfers"],
        stats["link"]["memory"],
        stats["directory"],
    )
    parts = [f"{transfers['kept']} payloads in memory, {_amount(memory['used'])}"]
    if files is not None:
        parts.append(f"{files['files']} in files, {_amount(files['nbytes'])}")
    parts += [
        f"{len(stats['writers'])} writers",
        f"{stats['added']} fetched, {transfers['evicted']} evicted, {transfers['missed']} missed",
    ]
    if files is not None:
        failed = files["write_failed"], files["damaged"] + files["unreadable"]
        parts.append(f"{files['loaded']} loaded, {failed[0]} not written, {failed[1]} damaged")
    return "; ".join(parts)


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
