"""Directories that belong to this user alone, locks on them, and the Unix sockets in them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from typing import TYPE_CHECKING

from omni_kvlink.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Iterator


def default_directory() -> str:
    """Return this user's directory of sockets and keys; the caller creates and checks it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "kvlink")
    return f"/tmp/kvlink-{os.geteuid()}"


def check_private(directory: str, *, forbidden: int = 0o022) -> None:
    """Create a directory, or check its owner, and that it has no `forbidden` permission bits.

    Raises:
        ConnectorError: it belongs to another user, or is open to others.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & forbidden:
        verb = "enter" if forbidden & 0o055 else "write to"
        raise ConnectorError(
            f"{directory} must be a directory of uid {os.geteuid()} that nobody else can {verb}; "
            f"it is of uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"
        )


@contextlib.contextmanager
def locked(directory: str) -> Iterator[None]:
    """Exclude other processes that lock the directory; blocks. Not to be held across a fork."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_alive(path: str, kind: socket.SocketKind) -> bool:
    """Return whether a process listens at a Unix socket, even if it is too busy to accept."""
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True
    return True
