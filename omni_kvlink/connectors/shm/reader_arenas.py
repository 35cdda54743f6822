"""`ReaderArenas`: the arenas of a producer that a consumer maps for reading."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.errors import ClosedError, WireError
from omni_kvlink.memory.mapping import STEP, Mapping, is_sealed

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.messages import Memory


class ReaderArenas(dict[int, Mapping]):
    """Mappings by the number of their arena; `add` is for the loop's thread.

    Reading from them works at once. A thread touches the pages of a large one meanwhile, so that
    readers pay few page faults and the loop is not held up.
    """

    def __init__(self, url: str):
        super().__init__()
        self._url = url
        self._stats = {"nbytes": 0, "touched": 0, "milliseconds": 0}

    def add(self, message: Memory, fd: int) -> None:
        """Map the memory file that came with a message; takes `fd`.

        Raises WireError if it is not sealed and of the announced size: reading it might SIGBUS.
        """
        if fd < 0:
            raise WireError(f"{self._url} announced an arena without its descriptor")
        nbytes = message.nbytes
        try:
            if not is_sealed(fd) or os.fstat(fd).st_size != nbytes or nbytes == 0:
                raise WireError(
                    f"{self._url} passed an arena that is not sealed or not of {nbytes} bytes"
                )
        except BaseException:
            os.close(fd)
            raise
        mapping = self[message.arena] = Mapping.readonly(fd, nbytes, populate=nbytes <= STEP)
        self._stats["nbytes"] += nbytes
        if nbytes <= STEP:
            self._stats["touched"] += nbytes
            return
        touch = partial(_touch, mapping, message.arena, weakref.ref(self))
        with contextlib.suppress(RuntimeError):  # no more threads: readers pay the page faults
            threading.Thread(target=touch, name="kvlink-memory", daemon=True).start()

    def stats(self) -> dict[str, int]:
        """Arenas that are mapped now; bytes mapped and touched so far, and how long that took."""
        return {"arenas": len(self), **self._stats}

    def on_touched(self, nbytes: int, seconds: float) -> None:
        """Count an arena whose pages were touched; in the thread that did it."""
        self._stats["touched"] += nbytes
        self._stats["milliseconds"] += round(1e3 * seconds)


def _touch(mapping: Mapping, arena: int, owner: weakref.ref[ReaderArenas]) -> None:
    """Touch the pages of an arena, as long as its owner has it."""
    began = time.monotonic()
    try:
        mapping.populate(lambda: arena in (owner() or ()))
    except ClosedError:
        return
    arenas = owner()
    if arenas is not None:
        arenas.on_touched(mapping.nbytes, time.monotonic() - began)
