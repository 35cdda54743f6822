"""`KVReceiver`: the thread that receives KV and enforces deadlines."""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class KVReceiver:
    """A thread that runs jobs in order and reacts to a deadline; sleeps while there are none.

    Args:
        name: of the thread.
        next_deadline: in monotonic seconds, or None; called again after each job.
        on_deadline: called in the thread when the deadline has passed.
    """

    def __init__(
        self,
        name: str,
        *,
        next_deadline: Callable[[], float | None],
        on_deadline: Callable[[], None],
    ):
        self._next_deadline, self._on_deadline = next_deadline, on_deadline
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], Any]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> None:
        """Run a job, which must not raise, after those submitted before; ignored once closed."""
        with self._changed:
            self._jobs.append(partial(call, *args))
            self._changed.notify_all()

    def close(self) -> None:
        """Stop after the current job; the others are not run. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            deadline = self._next_deadline()
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                late = deadline is not None and deadline <= now
                if not self._jobs and not late:
                    self._changed.wait(None if deadline is None else deadline - now)
                    continue
                job = self._on_deadline if late else self._jobs.popleft()
            job()
