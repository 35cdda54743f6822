"""Ends a call by the exception of a signal handler, at each of its lines."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import omni_kvlink

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

T = TypeVar("T")
ROOT = Path(omni_kvlink.__file__).parent
TRACED = (str(ROOT / "link"), str(ROOT / "connectors"), str(ROOT / "memory" / "arena"))
LOCKING = threading.__file__, str(Path(futures.__file__).parent)
"""Python's own conditions and futures, whose functions a handler may end after their last line."""
WRAPPERS = ("with ", "try:", "finally:", "pass", "def ", "@")
"""Beginnings of lines that are traced, too, where Python itself looks for no signal: it enters and
leaves blocks there. A trace that raises where an `except` ends leaves its error in the thread."""


def interrupted(
    number: int,
    call: Callable[[], T],
    results: list[T],
    interrupt: type[BaseException] = KeyboardInterrupt,
    traced: tuple[str, ...] = TRACED,
) -> bool:
    """Raise `interrupt` at the n-th line of the package that a call runs; False if fewer.

    In a finalizer Python ignores it.
    """
    lines, raised = itertools.count(), list[int]()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(traced):
            return None
        line = linecache.getline(path, frame.f_lineno).strip()
        is_line = event == "line" and not line.startswith(WRAPPERS)
        is_end = event == "return" and path.startswith(LOCKING)
        if (is_line or is_end) and next(lines) == number:
            raised.append(number)
            raise interrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        results.append(call())
    except interrupt:
        pass
    finally:
        sys.settrace(previous)
    return bool(raised)
