"""Directories that belong to this user alone, and the Unix sockets in them."""

from __future__ import annotations

import os
import socket
import stat

from omni_kvlink.errors import ConnectorError


def default_directory() -> str:
    """Return this user's directory of sockets and keys; the caller creates and checks it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "kvlink")
    return f"/tmp/kvlink-{os.geteuid()}"


def check_private(directory: str, *, forbidden: int = 0o022) -> None:
    """Create a directory, or check its owner, and that it has no `forbidden` permission bits.

    Raises:
        ConnectorError: it belongs to another user, is open to others, or cannot be created.
    """
    cure = "give directory=, or set XDG_RUNTIME_DIR to a directory of this user"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        found = os.lstat(directory)
    except OSError as error:
        raise ConnectorError(f"{directory} cannot be used: {error.strerror}; {cure}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConnectorError(
            f"{directory} must be a directory of uid {os.geteuid()}, it is of uid {found.st_uid}, "
            f"mode {stat.filemode(found.st_mode)}: {cure}, the same on both sides"
        )
    if found.st_mode & forbidden:
        verb, mode = ("enter", "700") if forbidden & 0o055 else ("write to", "go-w")
        raise ConnectorError(
            f"{directory} must be a directory that nobody else can {verb}; its mode is "
            f"{stat.S_IMODE(found.st_mode):o}: chmod {mode} it, or give another one"
        )


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
