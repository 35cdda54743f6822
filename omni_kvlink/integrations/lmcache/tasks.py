"""`TaskThread`: runs one kind of an adapter's tasks, and keeps their results until they are asked.

LMCache submits a task, polls a file descriptor, and then asks for the result, once.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

log = logging.getLogger(f"lmcache.{__name__}")


class TaskThread(Generic[R]):
    """Runs tasks in their order, in one thread; `fileno` is readable when one has ended.

    A task that raises has the result `failure` makes of nothing: LMCache knows no other.
    """

    def __init__(self, name: str):
        self._name, self._notifier = name, create_event_notifier()
        self._executor = ThreadPoolExecutor(1, f"kvlink-lmcache-{name}")
        self._results: dict[int, R] = {}
        self._next_id, self._lock = 0, threading.Lock()

    def fileno(self) -> int:
        """The file descriptor for LMCache's poll."""
        return int(self._notifier.fileno())

    def submit(self, work: Callable[[], R], failed: Callable[[], R]) -> int:
        """Run `work` later; return the task's id. If it raises, `failed()` is its result."""
        with self._lock:
            task_id, self._next_id = self._next_id, self._next_id + 1
        self._executor.submit(self._run, task_id, work, failed)
        return task_id

    def take(self, task_id: int) -> R | None:
        """The result of a task that has ended; None before, and after it was taken."""
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, R]:
        """The results of all tasks that have ended since."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Wait for the task that runs, drop those that wait, and close the descriptor."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._notifier.close()

    def _run(self, task_id: int, work: Callable[[], R], failed: Callable[[], R]) -> None:
        try:
            result = work()
        except Exception:
            log.exception("a %s task has failed", self._name)
            result = failed()
        with self._lock:
            self._results[task_id] = result
        self._notifier.notify()
