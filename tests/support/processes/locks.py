"""Finds the locks that objects of the package use, and holds them as other threads would."""

from __future__ import annotations

import contextlib
import gc
import threading
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.FrameType, threading.Thread)


def locks_of(*roots: object) -> list[Any]:
    """Every lock that can be reached from these objects, but for those of threads and modules."""
    found: list[Any] = []
    seen, queue = {id(root) for root in roots}, list(roots)
    while queue:
        one = queue.pop()
        if isinstance(one, LOCKS):
            found.append(one)
            continue
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, _OPAQUE):
                seen.add(id(other))
                queue.append(other)
    return found


@contextlib.contextmanager
def held(locks: list[Any]) -> Iterator[int]:
    """Hold those of the locks that are free, in another thread; the number of them."""
    ready, done, taken = threading.Event(), threading.Event(), list[Any]()

    def hold() -> None:
        taken.extend(lock for lock in locks if lock.acquire(blocking=False))
        ready.set()
        done.wait()
        for lock in taken:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    try:
        yield len(taken)
    finally:
        done.set()
        thread.join()
