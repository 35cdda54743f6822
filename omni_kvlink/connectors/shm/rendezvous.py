"""Brings two processes of a user together: by a named socket in a private directory."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time

from omni_kvlink.connectors.runtime.user_files import (
    OTHER,
    LockFile,
    WakeupFifo,
    check_private,
    default_directory,
    is_alive,
    wait_readable,
    wake,
)
from omni_kvlink.errors import BusyError, ClosedError, SchemaError, TransferTimeout, format_seconds
from omni_kvlink.system import process
from omni_kvlink.system.failures import translate_errors

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_BACKLOG = 128
_MAX_SEND_TIMEOUT = 86_400.0


def socket_path(name: str, directory: str = "") -> str:
    """Return the path of the socket of `shm://name`; create and check its directory.

    Raises SchemaError if the name is not a plain file name, or the path is too long; ConnectorError
    if the directory is open to other users.
    """
    if not _NAME.fullmatch(name):
        raise SchemaError(
            f"shm://{name}: a name is 1 to 48 letters, digits, '.', '_' or '-', a letter first"
        )
    directory = directory or default_directory()
    path = os.path.join(directory, f"{name}.sock")
    if len(os.fsencode(path)) > 90:  # sun_path holds 107, the draft's suffix needs some
        raise SchemaError(f"{path} is too long for a Unix socket; give a shorter directory=")
    check_private(directory)
    return path


class NamedListener:
    """A listening socket, `sock`, that appears under `path` atomically, replacing a dead one.

    Only this user can connect, whatever the umask. Raises BusyError if a live producer listens
    there.
    """

    def __init__(self, path: str):
        self._path = path
        self._file: os.stat_result | None = None
        with translate_errors(path, OTHER), contextlib.ExitStack() as undo:
            self._lock = LockFile(path, OTHER)
            undo.callback(self._lock.close)
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self.close)
            self._bind(f"{path}.{os.getpid()}", undo)
            undo.pop_all()
        self.sock.setblocking(False)
        process.call_in_children(self.sock, socket.socket.close)  # it would outlive this process

    def _bind(self, draft: str, undo: contextlib.ExitStack) -> None:
        if is_alive(self._path, socket.SOCK_SEQPACKET):  # its lock file was removed
            raise BusyError(
                f"{self._path}: another producer serves this name; close it, or serve another name"
            )
        _unlink(draft)
        undo.callback(_unlink, draft)
        os.fchmod(self.sock.fileno(), 0o600)  # the file gets this mode
        self.sock.bind(draft)
        self.sock.listen(_BACKLOG)
        self._file = os.lstat(draft)
        os.rename(draft, self._path)
        wake(self._path)

    def close(self) -> None:
        """Close the socket and remove its file, unless that is another's; needs no descriptor."""
        self.sock.close()
        with contextlib.suppress(OSError):  # the file or its directory was removed
            if self._file is not None and os.path.samestat(self._file, os.lstat(self._path)):
                os.unlink(self._path)
        self._lock.close()


def dial(path: str, timeout: float, cancelled: int) -> socket.socket:
    """Connect as soon as a producer listens at `path`, which wakes this call; never polls.

    Raises TransferTimeout after `timeout` seconds, and ClosedError when the descriptor `cancelled`
    becomes readable: the link was closed.
    """
    deadline = time.monotonic() + timeout
    with translate_errors(path, OTHER):
        found = _try_dial(path, timeout)
        if found is not None:
            return found  # nothing to wait for
        with WakeupFifo(path) as fifo:
            while (left := deadline - time.monotonic()) > 0:
                changed = fifo.arm()
                found = _try_dial(path, left)
                if found is not None:
                    return found
                if cancelled in wait_readable(deadline - time.monotonic(), changed, cancelled):
                    raise ClosedError(f"the link was closed while it waited for {path}")
    raise TransferTimeout(
        f"nobody serves {path} after {format_seconds(timeout)}; "
        "start the producer, or give a longer timeout",
        waited=timeout,
        phase="connecting",
    )


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # there is none; or `bind` says what is wrong
        os.unlink(path)


def peer_identity(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel recorded them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _try_dial(path: str, timeout: float) -> socket.socket | None:
    """Connect to a producer that listens; wait `timeout` seconds if it is too busy to accept."""
    # The kernel's own timeout: Python's does not apply here.
    seconds = min(max(timeout, 0.001), _MAX_SEND_TIMEOUT)
    limit = struct.pack("ll", *divmod(int(seconds * 1e6) + 1, 1_000_000))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(path)
    except BaseException as error:
        sock.close()
        if isinstance(error, (FileNotFoundError, ConnectionRefusedError, BlockingIOError)):
            return None
        raise
    return sock
