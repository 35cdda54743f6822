"""A file of when this process's transfers did what; and one timeline of several processes.

`record` has each process write a file of its own into a directory; `merge` makes one document of
them, in the Trace Event Format that https://ui.perfetto.dev and Chrome's about:tracing open.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import platform
import threading
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from omni_kvlink.errors import FileError, MissingFileError
from omni_kvlink.telemetry import observers
from omni_kvlink.telemetry.record_queue import RecordQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import NoReturn

    from omni_kvlink.telemetry.observers import TransferEvent
    from omni_kvlink.telemetry.record_queue import Work

VARIABLE = "KVLINK_TRACE"
"""The environment variable with the directory: the first link of a process that opens records."""
SUFFIX = ".kvlink-trace.jsonl"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_VERSION = 1
_LANE = 1 << 32
"""Added to a thread's number for slices that overlap others of it, as those of asyncio's tasks."""
_NANOSECOND = 1e-3  # µs
_changing = threading.Lock()
_recorder: TimelineRecorder | None = None
_is_registered = False
_TIMEOUT = 30.0
"""Seconds for which the end of a record waits for the thread that writes it."""

TraceEvent: TypeAlias = "dict[str, Any]"


def record(directory: str | os.PathLike[str], process: str = "") -> str:
    """Write what this process's transfers do to a new file of this directory; return its path.

    `process` is its name in the timeline, such as "prefill-0"; by default that of the program.
    The directory is made if there is none. A thread writes what has ended, four times a second and
    when the interpreter exits: a process that is killed loses what it did since. A second call goes
    on in another file. A forked child writes to a file of its own. FileError if it cannot be
    written.
    """
    global _recorder
    new = TimelineRecorder(Path(directory), process)
    _register()
    with _changing:
        previous, _recorder = _recorder, new
        _stop(previous)
        observers.add_observer(new)
    return str(new.path)


def record_if_asked() -> None:
    """`record` to the directory that `KVLINK_TRACE` names, unless this process records already."""
    if _recorder is None and (directory := os.environ.get(VARIABLE)):
        record(directory)


def stop() -> None:
    """End the record of this process, and close its file. Idempotent."""
    global _recorder
    with _changing:
        previous, _recorder = _recorder, None
        _stop(previous)


def _stop(recorder: TimelineRecorder | None) -> None:
    if recorder is not None:
        observers.remove_observer(recorder)
        recorder.close()


def _register() -> None:
    """Have the interpreter's exit write what was recorded, and forks forget it."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(stop)
        os.register_at_fork(after_in_child=_leave_parent)


def _leave_parent() -> None:
    global _changing
    _changing = threading.Lock()
    if _recorder is not None:
        _recorder.forget()


class FileHead(msgspec.Struct):
    """The first line of a process's file.

    Attributes:
        kvlink_trace: the version of the file.
        pid: of the process.
        process: its name, as `record` was given it; else that of the program.
        host: the machine's name.
        boot: names this run of the machine, whose processes have one CLOCK_MONOTONIC.
        wall: microseconds since 1970 at 0 of that clock.
    """

    kvlink_trace: int
    pid: int
    process: str
    host: str
    boot: str
    wall: float


class Ended(NamedTuple):
    """All that a line needs of a `TransferEvent`; times in µs of CLOCK_MONOTONIC.

    Attributes:
        error: its class and text; "" if there is none.
        began: when the put began, if that was seen.
        at: when it ended.
        thread: number and name of the one it ended in.
    """

    scheme: str
    key: str
    outcome: str
    nbytes: int
    copies: int
    error: str
    seconds: dict[str, float]
    layer: int
    branch: str
    began: float | None
    at: float
    thread: tuple[int, str]

    @property
    def started(self) -> float:
        """When it began, by the seconds of its phases."""
        return self.at - 1e6 * sum(self.seconds.values())


class TimelineRecorder(observers.Observer):
    """Writes the file of one process, a line for each event, in a thread of its own."""

    def __init__(self, directory: Path, process: str = ""):
        self._directory, self._process = directory, process
        self._queue = RecordQueue("timeline", linger=0.25)
        self._forget()
        self._open()

    def _forget(self) -> None:
        self._began = observers.Recent()  # µs of puts, by scheme and key
        self._streams = observers.Recent()  # µs of streams that arrive
        self._layered = observers.Recent()  # the puts that have layers

    def _open(self) -> None:
        self._pid, self._threads = os.getpid(), set[int]()
        name = f"{platform.node() or 'host'}-{self._pid}-{time.monotonic_ns()}{SUFFIX}"
        self.path = self._directory / name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - until `close`
        except OSError as error:
            _refuse(self.path, error)
        boot = _BOOT.read_text().strip() if _BOOT.exists() else platform.node()
        process, wall = self._process or _program(), 1e-3 * (time.time_ns() - time.monotonic_ns())
        header = FileHead(_VERSION, self._pid, process, platform.node(), boot, wall)
        self._file.write(msgspec.json.encode(header) + b"\n")

    def close(self) -> None:
        """Write what was recorded, and close the file; what ends later is not recorded."""
        self._queue.close(_TIMEOUT)
        self._file.close()

    def forget(self) -> None:
        """Forget what the parent of this forked child has recorded: it writes that."""
        self._queue.reset()
        self._forget()

    def on_begin(self, scheme: str, key: str, started: float) -> Mapping[str, str]:
        """See `Observer.on_begin`."""
        self._began.add((scheme, key), 1e6 * started)
        return {}

    def on_open(self, event: TransferEvent) -> None:
        """See `Observer.on_open`."""
        self._add(self._write_open, event)

    def on_layer(self, event: TransferEvent) -> None:
        """See `Observer.on_layer`."""
        self._add(self._write_layer, event)

    def on_put(self, event: TransferEvent) -> None:
        """See `Observer.on_put`."""
        self._add(self._write_put, event, self._began.pop((event.scheme, event.key)))

    def on_get(self, event: TransferEvent) -> None:
        """See `Observer.on_get`."""
        self._add(self._write_get, event)

    def on_copy(self, event: TransferEvent) -> None:
        """See `Observer.on_copy`."""
        self._add(self._write_copy, event)

    def on_receipt(self, event: TransferEvent) -> None:
        """See `Observer.on_receipt`."""
        self._add(self._write_receipt, event)

    def _add(self, work: Work, event: TransferEvent, began: float | None = None) -> None:
        scheme, key, outcome, nbytes, seconds, error, _, _, copies, layer, branch = event
        text = "" if error is None else f"{type(error).__name__}: {error}"
        thread = threading.get_native_id(), threading.current_thread().name
        about = scheme, key, outcome, nbytes, copies, text, dict(seconds)
        self._queue.add(work, Ended(*about, layer, branch, began, _now(), thread))

    def _write_open(self, end: Ended) -> None:
        self._streams.add((end.scheme, end.key), end.started)
        self._write(end, _phases(end, end.started, _about(end)))

    def _write_layer(self, end: Ended) -> None:
        phase = "copy" if end.outcome == "written" else "wait for"
        if end.outcome == "written":
            self._layered.add((end.scheme, end.key), True)
        name, about = f"{phase} layer {end.layer}", _about(end)
        about |= {"layer": end.layer, "branch": end.branch}
        self._write(end, [_slice(name, end.started, end.at - end.started, about)])

    def _write_put(self, end: Ended) -> None:
        started = end.began or end.started
        is_layered = self._layered.pop((end.scheme, end.key))
        phases = [] if is_layered else _phases(end, started, ended=end.at)
        lines = [_slice("put", started, end.at - started, _about(end)), *phases]
        self._write(end, lines if end.error else [*lines, _flow("s", end.key, end.at)])

    def _write_get(self, end: Ended) -> None:
        stream = self._streams.pop((end.scheme, end.key))
        started = stream or end.started
        phases = [] if stream else _phases(end, started, ended=end.at)
        lines = [_slice("get", started, end.at - started, _about(end)), *phases]
        self._write(end, lines if end.error else [*lines, _flow("f", end.key, end.at)])

    def _write_copy(self, end: Ended) -> None:
        slices = _phases(end, end.started, _about(end))
        for each in slices if end.layer >= 0 else ():
            each["name"] += f" layer {end.layer}"
            each["args"] |= {"layer": end.layer, "branch": end.branch}
        self._write(end, slices)

    def _write_receipt(self, end: Ended) -> None:
        name = {"ph": "i", "s": "t", "name": f"receipt {end.outcome}"}
        self._write(end, [{**name, "ts": end.at, "args": _about(end)}])

    def _write(self, end: Ended, events: list[TraceEvent]) -> None:
        if self._pid != os.getpid():
            self._open()
        tid, thread = end.thread
        if tid not in self._threads:
            self._threads.add(tid)
            events.insert(0, {"ph": "M", "name": "thread_name", "args": {"name": thread}})
        common = {"cat": "kvlink", "pid": self._pid, "tid": tid}
        lines = [msgspec.json.encode({**event, **common}) for event in events]
        self._file.write(b"\n".join([*lines, b""]))


def _program() -> str:
    """The program's name, without its arguments: they may have secrets."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/comm").read_text().strip()
    return "process"


def _now() -> float:
    return time.monotonic_ns() / 1e3


def _about(end: Ended) -> TraceEvent:
    about = {"key": end.key, "scheme": end.scheme, "outcome": end.outcome}
    if end.error:
        about["error"] = end.error
    return {**about, "nbytes": end.nbytes, "copies": end.copies}


def _slice(name: str, started: float, duration: float, about: TraceEvent) -> TraceEvent:
    return {"ph": "X", "name": name, "ts": started, "dur": max(0.0, duration), "args": about}


def _phases(
    event: Ended,
    started: float,
    about: TraceEvent | None = None,
    ended: float = math.inf,
) -> Any:
    """The slices of an event's phases; none ends after the slice around them, at `ended`."""
    slices = []
    for name, seconds in event.seconds.items():
        if seconds > 0:
            duration = min(1e6 * seconds, ended - started - _NANOSECOND)  # sums are rounded
            slices.append(_slice(name, started, duration, about or {"key": event.key}))
        started += 1e6 * seconds
    return slices


def _flow(kind: str, key: str, at: float) -> TraceEvent:
    """One end of the arrow from a put to its gets."""
    # 1 ns before the end: it belongs to the slice around it.
    arrow = {"ph": kind, "name": "payload", "id": _arrow(key), "ts": at - _NANOSECOND}
    return {**arrow, "bp": "e"} if kind == "f" else arrow


def _arrow(key: str) -> int:
    return zlib.crc32(key.encode())


class Timeline:
    """The files of a directory on one time axis.

    Processes of one machine have one clock. What other machines recorded is moved by the
    difference of their wall clocks, which is right to within what these disagree by.

    Attributes:
        events: those of the Trace Event Format.
        processes: how many files there are.
        machines: how many machines they are of.
        torn: lines that could not be read: what a process wrote as it was killed.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.events: list[TraceEvent] = []
        self.processes = self.torn = 0
        paths = sorted(Path(directory).glob(f"*{SUFFIX}"))
        if not paths:
            cure = f"set {VARIABLE} to it, or call omni_kvlink.telemetry.timeline.record"
            raise MissingFileError(f"{os.fspath(directory)}: no *{SUFFIX} file is there; {cure}")
        files = [self._read(path) for path in paths]
        machines = list(dict.fromkeys(header.boot for header, _ in files))
        self.machines = len(machines)
        taken = set[int]()
        for header, lines in files:
            pid = header.pid
            while pid in taken:  # of another machine, or reused
                pid += 1 << 22  # above every pid of Linux
            taken.add(pid)
            self._add(header, lines, pid, header.wall - files[0][0].wall, machines[0])

    def document(self) -> bytes:
        """The JSON object that viewers open."""
        return msgspec.json.encode({"traceEvents": self.events, "displayTimeUnit": "ms"})

    def _read(self, path: Path) -> tuple[FileHead, list[TraceEvent]]:
        try:
            first, *rest = path.read_bytes().splitlines()
            header = msgspec.json.decode(first, type=FileHead)
        except OSError as error:
            _refuse(path, error)
        except (ValueError, msgspec.DecodeError) as error:
            raise FileError(f"{path} is no timeline of a process: {error}") from None
        if header.kvlink_trace != _VERSION:
            text = f"{path} has version {header.kvlink_trace}; this library reads {_VERSION}"
            raise FileError(text)
        events = list[TraceEvent]()
        for line in rest:
            try:
                events.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:  # noqa: PERF203
                self.torn += 1
        return header, events

    def _add(
        self, header: FileHead, lines: list[TraceEvent], pid: int, shift: float, first: str
    ) -> None:
        self.processes += 1
        name = {"name": f"{header.process} ({header.host}, {header.pid})"}
        self.events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": name})
        shift = 0.0 if header.boot == first else shift
        by_thread = defaultdict[int, list[TraceEvent]](list)
        for event in lines:
            event["pid"] = pid
            if "ts" in event:
                event["ts"] += shift
            by_thread[event["tid"]].append(event)
        for events in by_thread.values():
            self.events += _in_lanes(events)


def _in_lanes(events: list[TraceEvent]) -> Iterator[TraceEvent]:
    """Move slices that overlap others of their thread, without lying in them, beside it."""
    names = [event for event in events if event["ph"] == "M"]
    lanes = list[list[float]]()  # of each: the ends of the slices that are open
    at = dict[int, int]()  # lanes of puts and gets, by the number of their arrow
    slices = [event for event in events if event["ph"] != "M"]
    for event in sorted(slices, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        if event["ph"] == "X":
            number = _lane_of(lanes, event["ts"], event["dur"])
            if event["name"] in ("put", "get"):
                at[_arrow(event["args"]["key"])] = number
        else:
            number = at.get(event.get("id", 0), 0)
        event["tid"] += number * _LANE
        yield event
    for name in names:
        for number in range(max(1, len(lanes))):
            beside = {"name": f"{name['args']['name']}{f' ({number + 1})' if number else ''}"}
            yield {**name, "tid": name["tid"] + number * _LANE, "args": beside}


def _lane_of(lanes: list[list[float]], started: float, duration: float) -> int:
    ended = started + duration
    for number, lane in enumerate(lanes):
        while lane and lane[-1] <= started:
            lane.pop()
        if not lane or ended <= lane[-1]:
            lane.append(ended)
            return number
    lanes.append([ended])
    return len(lanes) - 1


def _refuse(path: Path, error: OSError) -> NoReturn:
    raise FileError(f"{path}: {error.strerror}") from error
