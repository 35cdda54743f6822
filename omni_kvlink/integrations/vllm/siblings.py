"""The processes of an engine's other ranks: the end of one is noticed at once."""

from __future__ import annotations

import logging
import os
import select
import threading
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(f"vllm.{__name__}")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SiblingWatch:
    """Calls `lost` once, in a thread of its own, when one of these processes has ended.

    vLLM ends all ranks then, but a rank that waits for the dead one in a collective call only after
    seconds; the other side would wait as long. `close` ends the watch; `lost` is not called then.
    """

    def __init__(self, pids: Iterable[int], lost: Callable[[], None]):
        self._lost = lost
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fds: dict[int, int] = {}
        self._is_closed = False
        for pid in pids:
            self._open(pid)
        self._thread = threading.Thread(target=self._run, name="kvlink-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; idempotent, and not for the thread that calls `lost`."""
        if not self._is_closed:
            self._is_closed = True
            os.eventfd_write(self._wakeup, 1)
            self._thread.join()
            for fd in (self._wakeup, *self._fds):
                os.close(fd)

    def _open(self, pid: int) -> None:
        try:
            self._fds[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            os.eventfd_write(self._wakeup, 1)  # it has ended already
        except OSError as error:  # a sandbox may forbid it
            log.warning("rank's process %d cannot be watched: %s", pid, str(error))

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._wakeup, *self._fds):
            poller.register(fd, select.POLLIN)
        ended = [self._fds[fd] for fd, _ in poller.poll() if fd in self._fds]
        if not self._is_closed:
            log.error("the rank in process %s has ended: closing this rank's links", ended)
            self._lost()


def sibling_pids() -> list[int]:
    """The processes of the engine's other ranks on this machine; every rank calls it at once."""
    if not torch.distributed.is_initialized():
        return []
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    namespace, pid = (BOOT_ID.read_text(), os.stat("/proc/self/ns/pid").st_ino), os.getpid()
    processes = [(namespace, pid)]
    for group in (get_tp_group(), get_pp_group()):  # a stage's ranks, then those of all stages
        parts: list[list[tuple[tuple[str, int], int]]] = [[]] * group.world_size
        torch.distributed.all_gather_object(parts, processes, group=group.cpu_group)
        processes = list(chain(*parts))
    return [other for space, other in processes if space == namespace and other != pid]
