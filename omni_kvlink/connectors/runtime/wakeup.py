"""Wakes those who wait for a file to appear: by a FIFO beside it, which hangs up.

Unlike inotify this takes no resource of which a user has few. The FIFO `PATH.wait` is there only
while somebody waits.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import stat
import threading

from omni_kvlink.errors import ConnectorError
from omni_kvlink.system.failures import translate_errors

_MAX_POLL = 86_400_000  # milliseconds; poll counts them in an int


class WakeupFifo:
    """Wakes its owner when `wake(path)` is called, by any process of this user; for one thread."""

    def __init__(self, path: str):
        self._path = path
        self._fd = -1

    def __repr__(self) -> str:
        return f"<WakeupFifo of {self._path!r}>"

    def arm(self) -> int:
        """Return a descriptor that hangs up (for `wait_readable`) at the next `wake`.

        Call it before looking whether `path` is there, and again after each wake.
        Raises ConnectorError if the FIFO cannot be made.
        """
        self._close()
        fifo = f"{self._path}.wait"
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with translate_errors(fifo, "start the producer first, so that nothing is waited for"):
            while self._fd < 0:
                with contextlib.suppress(FileExistsError):
                    os.mkfifo(fifo, 0o600)
                with contextlib.suppress(FileNotFoundError):  # a `wake` came between the two
                    self._fd = os.open(fifo, flags)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            raise ConnectorError(f"{fifo} is no FIFO; remove it")
        return self._fd

    def close(self) -> None:
        """Wait no longer. Others who wait are woken, since the FIFO is removed."""
        if self._fd >= 0:
            self._close()  # first: it may be the only descriptor that `wake` can have
            with contextlib.suppress(ConnectorError):  # a later `wake` removes it
                wake(self._path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> WakeupFifo:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def wake(path: str) -> None:
    """Wake everybody who waits for `path`, after it has appeared; does not block.

    Raises ConnectorError if they could not be woken: there is no free descriptor.
    """
    fifo = f"{path}.wait"
    # Renamed first, so that nobody can open it any more: all who have it open are woken.
    taken = f"{fifo}.{os.getpid()}.{threading.get_ident()}"
    try:
        os.rename(fifo, taken)
    except OSError:
        return  # nobody waits, or the directory was removed
    try:
        # It hangs up for its readers when its last writer closes it. One that reads, too, is
        # never refused and never blocks.
        with translate_errors(fifo):
            os.close(os.open(taken, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))
    except ConnectorError:
        with contextlib.suppress(OSError):  # another one waits already
            os.link(taken, fifo)
        raise
    finally:
        with contextlib.suppress(OSError):  # the directory was removed
            os.unlink(taken)


def wait_readable(timeout: float, *fds: int) -> list[int]:
    """Block until a descriptor is readable or hung up, or `timeout` seconds; return which are."""
    poll = select.poll()  # select() cannot take descriptors above 1,023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    milliseconds = min(math.ceil(max(0.0, min(timeout, 1e9)) * 1e3), _MAX_POLL)
    return [fd for fd, _ in poll.poll(milliseconds)]
