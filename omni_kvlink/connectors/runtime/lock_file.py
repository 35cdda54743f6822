"""The right to serve at a path: one process at a time has it, and nobody ever waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref

from omni_kvlink.errors import BusyError
from omni_kvlink.system.failures import translate_errors

_held: weakref.WeakSet[LockFile] = weakref.WeakSet()


class LockFile:
    """A locked file `PATH.lock`; whoever serves at `path` keeps it until `close`. Never blocks.

    No other user can open the file, and so none can lock it. A process that is stopped keeps only
    the paths that it serves itself. A context manager that closes.

    `other` is what the caller may do if the file cannot be made.

    Raises:
        BusyError: another `LockFile` of this path is open, in this process or in another one.
        ConnectorError: the file cannot be made.
    """

    def __init__(self, path: str, other: str = "use another path"):
        self._path, self._fd = f"{path}.lock", -1
        with translate_errors(self._path, other):
            self._fd = self._open(path)
        _held.add(self)

    def __repr__(self) -> str:
        return f"<LockFile {self._path!r}{', closed' if self._fd < 0 else ''}>"

    def close(self) -> None:
        """Remove and unlock the file; needs no descriptor. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        # It is removed before it is unlocked: who locks it next finds that it is not at the path.
        with contextlib.suppress(OSError):  # somebody removed it, or its directory
            if os.path.samestat(os.fstat(fd), os.lstat(self._path)):
                os.unlink(self._path)
        os.close(fd)

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child: in it the lock would outlive its owner."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> LockFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            fd = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.lstat(self._path)):
                    return fd
            except FileNotFoundError:
                pass  # its last owner removed it just now
            except BaseException as error:
                os.close(fd)
                if isinstance(error, BlockingIOError):
                    raise BusyError(
                        f"{path}: another producer serves this name; close it, or serve another"
                    ) from None
                raise
            os.close(fd)


def _close_inherited() -> None:
    for lock_file in list(_held):
        lock_file.close_in_child()


os.register_at_fork(after_in_child=_close_inherited)
