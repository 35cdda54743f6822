"""`PendingCalls`: calls of somebody elsewhere, until they are answered."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.errors import ClosedError


class PendingCalls:
    """A future for each call, by number; thread-safe.

    Attributes:
        ended: what all calls end in, once nobody is there to answer.
    """

    def __init__(self) -> None:
        self.ended: EngineError | ClosedError | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}

    def add(self) -> tuple[int, Future[Any]]:
        """The next call's number, and its future; raises what all calls end in."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            if self.ended is not None:
                raise self.ended
            number = next(self._numbers)
            self._answers[number] = answer
        return number, answer

    def settle(self, number: int, found: Mapping[str, Any]) -> None:
        """An answer, {"value"} or {"error"}; one that nobody waits for is dropped."""
        with self._lock:
            answer = self._answers.pop(number, None)
        if answer is None:
            return
        if "error" in found:
            answer.set_exception(found["error"])
        else:
            answer.set_result(found["value"])

    def end(self, error: EngineError | ClosedError) -> None:
        """Nobody is there any more."""
        with self._lock:
            self.ended = error
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(error)


def failed(error: Exception) -> Future[Any]:
    """An answer that was known before anybody was asked."""
    answer: Future[Any] = Future()
    answer.set_exception(error)
    return answer
