"""Event loops of the package, held up by a test."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.connectors.runtime.event_loop import EventLoop

PATIENCE = 60.0


@contextlib.contextmanager
def paused(loop: EventLoop) -> Iterator[None]:
    """Hold the loop within a call until the block ends."""
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go_on.wait(PATIENCE)

    loop.call(hold)
    assert began.wait(PATIENCE)
    try:
        yield
    finally:
        go_on.set()
