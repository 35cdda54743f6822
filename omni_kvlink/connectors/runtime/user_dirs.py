"""Directories that belong to this user alone, and the Unix sockets in them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from omni_kvlink.errors import ConnectorError
from omni_kvlink.system.failures import translate_errors

OTHER = "give directory=, or set XDG_RUNTIME_DIR to a directory of this user, on both sides"
"""The cure for a default directory that cannot be used."""


def default_directory() -> str:
    """Return this user's directory of sockets and keys; the caller creates and checks it.

    It is below XDG_RUNTIME_DIR, else /tmp; below TMPDIR where /tmp is missing or read-only.

    Raises:
        ConnectorError: whether one of them is a directory cannot be found out. Another directory
            would then keep the two ends apart, without a word.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_directory(runtime):
        return os.path.join(runtime, "kvlink")
    base, spare = "/tmp", os.environ.get("TMPDIR", "")
    if spare and not os.access(base, os.W_OK) and _is_directory(spare):
        base = spare
    return os.path.join(base, f"kvlink-{os.geteuid()}")


def _is_directory(path: str) -> bool:
    with translate_errors(path, OTHER):
        try:
            return stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def check_private(directory: str, *, forbidden: int = 0o022, other: str = OTHER) -> None:
    """Create a directory, or check its owner, and that it has no `forbidden` permission bits.

    `other` is what the caller may give instead.

    Raises:
        ConnectorError: it belongs to another user, is open to others, or cannot be created.
    """
    with translate_errors(directory, other):
        os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.lstat(directory)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_mode & stat.S_ISVTX:
        raise ConnectorError(f"{directory} is for every user (mode {mode:o}): {other}")
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConnectorError(
            f"{directory} must be a directory of uid {os.geteuid()}, it is of uid {status.st_uid}, "
            f"mode {stat.filemode(status.st_mode)}: {other}"
        )
    if mode & forbidden:
        verb, right = ("enter", "700") if forbidden & 0o055 else ("write to", "go-w")
        raise ConnectorError(
            f"{directory} must be a directory that nobody else can {verb}; its mode is "
            f"{mode:o}: chmod {right} it, or {other}"
        )


def is_alive(path: str, kind: socket.SocketKind) -> bool:
    """Return whether a process listens at a Unix socket, even if it is too busy to accept.

    Raises ConnectorError if that cannot be found out.
    """
    with translate_errors(path), socket.socket(socket.AF_UNIX, kind) as sock:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                sock.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                return False
    return True
