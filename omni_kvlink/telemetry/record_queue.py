"""A bounded queue between transfers and a thread of low priority that works their records off."""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import threading
import time
import traceback
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink.errors import CapacityError
from omni_kvlink.system.threads import lower_priority, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_WAITING = 4096
"""Records that wait: they take about 4 MB."""
_STEP, _PAUSE = 5e-4, 5e-5
"""Seconds of work, and of the pause after it, in which others have the interpreter's lock."""
_NICENESS = 10
_log = logging.getLogger("omni_kvlink")

Work: TypeAlias = "Callable[..., None]"


class RecordQueue:
    """Runs what is added in one thread, in its order.

    `add` never blocks and takes no lock: a record is dropped and counted where `most` others wait.
    The thread starts with the first record, and sleeps while there is none. A record waits for
    others up to `linger` seconds, or until half the queue is full: in between the thread takes
    nothing from the transfers.
    """

    def __init__(self, subject: str, linger: float, most: int = MOST_WAITING):
        self._subject, self._linger, self._most = subject, linger, most
        self._has_failed = False
        self.reset()

    def reset(self) -> None:
        """Forget all records, and the thread: those of a forked child's parent are not its own."""
        self._records: deque[tuple[Any, ...]] = deque()
        self._alarm: SimpleQueue[threading.Event | None] = SimpleQueue()
        self._drops = itertools.count()
        self._threads: dict[str, threading.Thread] = {}  # `setdefault` decides who starts it
        self._end: threading.Event | None = None
        self._is_awake = self._is_closed = self._is_urgent = False
        self.dropped = 0

    def add(self, work: Work, *arguments: Any) -> None:
        """Have `work(*arguments)` run."""
        waiting = len(self._records)
        if waiting >= self._most or self._is_closed:
            self.dropped = next(self._drops) + 1  # `+=` loses one where two threads add
            return
        self._records.append((work, *arguments))
        if not self._is_awake or waiting == self._most // 2:
            self._wake()

    def flush(self, timeout: float) -> bool:
        """Wait until the records that are here have run; False after `timeout` seconds."""
        if not self._threads:
            return not self._records
        done = threading.Event()
        self._is_urgent = True
        self._alarm.put(done)
        return done.wait(timeout)

    def close(self, timeout: float, *last: tuple[Any, ...]) -> bool:
        """Run all records and these last ones, and end the thread; as `flush`."""
        if not self._threads and not self._records:
            for work, *arguments in last:
                work(*arguments)
            return True
        self._records.extend(last)
        self._is_closed = self._is_urgent = True
        self._wake()
        self._end = done = threading.Event()
        self._alarm.put(done)
        return done.wait(timeout)

    def _wake(self) -> None:
        self._is_awake = True
        if not self._threads:
            subject = self._subject
            thread = threading.Thread(target=self._run, name=f"kvlink-{subject}", daemon=True)
            if self._threads.setdefault("one", thread) is thread:
                try:
                    start_thread(thread)
                except CapacityError:  # the next record tries again
                    self._threads.clear()
                    self._is_awake = False
        self._alarm.put(None)

    def _run(self) -> None:
        lower_priority(_NICENESS)
        while True:
            flushed = self._alarm.get()
            if flushed is None and not self._is_closed:
                with contextlib.suppress(Empty):
                    flushed = self._alarm.get(timeout=self._linger)
            self._is_awake = False  # before it looks: what is added later wakes it again
            self._run_records()
            if flushed is not None:
                self._is_urgent = self._is_closed
                flushed.set()
                if flushed is self._end:
                    return

    def _run_records(self) -> None:
        resumed = time.perf_counter()
        for _ in range(len(self._records)):
            work, *arguments = self._records.popleft()
            try:
                work(*arguments)
            except Exception:
                self._log_once()
            del work, arguments  # while it pauses, it keeps nothing
            if not self._is_urgent and time.perf_counter() - resumed > _STEP:
                select.select((), (), (), _PAUSE)
                resumed = time.perf_counter()

    def _log_once(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.error("a record failed; this is logged once\n%s", traceback.format_exc())
