"""How two processes of a user find each other: by a named socket in a private directory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import socket
import struct
import time
import weakref
from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime.user_dirs import (
    check_private,
    default_directory,
    is_alive,
    locked,
)
from omni_kvlink.errors import BusyError, ClosedError, ConnectorError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_BACKLOG = 128
_IN_MOVED_TO = 0x80  # linux/inotify.h
_inherited: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def socket_path(name: str, directory: str = "") -> str:
    """Return the path of the socket of `shm://name`; create and check its directory.

    Raises ValueError if the name is not a plain file name, or the path is too long; ConnectorError
    if the directory is open to other users.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"shm://{name}: a name is 1 to 48 letters, digits, '.', '_' or '-', a letter first"
        )
    directory = directory or default_directory()
    check_private(directory)
    path = os.path.join(directory, f"{name}.sock")
    if len(os.fsencode(path)) > 90:  # sun_path holds 107, the draft's suffix needs some
        raise ValueError(f"{path} is too long for a Unix socket; give a shorter directory=")
    return path


def listen(path: str) -> socket.socket:
    """Return a listening socket that appears under `path` atomically, replacing a dead one.

    Raises BusyError if a live producer listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    draft = f"{path}.{os.getpid()}"
    try:
        with locked(os.path.dirname(path)):
            if is_alive(path, socket.SOCK_SEQPACKET):
                raise BusyError(
                    f"{path}: another producer serves this name; close it, or serve another name"
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            listener.bind(draft)
            listener.listen(_BACKLOG)
            os.rename(draft, path)  # waiting consumers see one event, when the socket listens
    except BaseException:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    listener.setblocking(False)
    close_in_child(listener)
    return listener


def unlink(path: str, listener: socket.socket) -> None:
    """Close a listening socket and remove its file, unless another producer listens there now."""
    listener.close()
    # The directory may have been removed already.
    with contextlib.suppress(FileNotFoundError), locked(os.path.dirname(path)):
        if not is_alive(path, socket.SOCK_SEQPACKET):
            os.unlink(path)


def dial(path: str, timeout: float, cancelled: int) -> socket.socket:
    """Connect as soon as a producer listens at `path`; woken by inotify, never polling.

    Raises TransferTimeout after `timeout` seconds, and ClosedError when the descriptor `cancelled`
    becomes readable: the link was closed.
    """
    deadline = time.monotonic() + timeout
    found = _try_dial(path, max(timeout, 0.001))
    if found is not None:
        return found  # nothing to watch for
    with watching(os.path.dirname(path)) as events:
        while True:
            left = deadline - time.monotonic()
            found = _try_dial(path, max(left, 0.001))
            if found is not None:
                return found
            ready = select.select([events, cancelled], [], [], max(0.0, left))[0]
            if cancelled in ready:
                raise ClosedError(f"the link was closed while it waited for {path}")
            if left <= 0 or not ready:
                raise TransferTimeout(
                    f"nobody serves {path} after {timeout:g} s; "
                    "start the producer, or give a longer timeout",
                    waited=timeout,
                    phase="connecting",
                )
            os.read(events, 65536)


def peer_identity(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel recorded them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _try_dial(path: str, timeout: float) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The kernel's own timeout, for a producer too busy to accept: Python's does not apply here.
    limit = struct.pack("ll", *divmod(int(timeout * 1e6) + 1, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise ConnectorError(f"{path}: {error.strerror}") from error
    return sock


@contextlib.contextmanager
def watching(directory: str) -> Iterator[int]:
    """Give an inotify descriptor, readable when a file was renamed into the directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(directory), _IN_MOVED_TO) < 0:
        problem = os.strerror(ctypes.get_errno())
        if fd >= 0:
            os.close(fd)
        raise ConnectorError(f"cannot watch {directory} for the producer: {problem}")
    try:
        yield fd
    finally:
        os.close(fd)


def close_in_child(sock: socket.socket) -> None:
    """Have forked children close a socket: in them it would outlive this process."""
    _inherited.add(sock)


def _close_inherited() -> None:
    for sock in list(_inherited):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
