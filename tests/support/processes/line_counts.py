"""Counts the steps of a call, which a busy machine does not change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import omni_kvlink

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

ROOT = str(Path(omni_kvlink.__file__).parent)


def count_lines(call: Callable[[], object]) -> int:
    """The lines of the package that a call runs in this thread, those of a loop each time."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return count
