"""Brings two processes together: by a named socket in a directory of their user, or group."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import time
from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime.owner import is_ambiguous, peer_identity
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
from omni_kvlink.errors import (
    BusyError,
    ClosedError,
    ConnectorError,
    SchemaError,
    TransferTimeout,
    format_seconds,
)
from omni_kvlink.system import process
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Collection

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_BACKLOG = 128
_MAX_SEND_TIMEOUT = 86_400.0
_ALLOW = "allow_uids= and a directory= of mode 2770, of a group that both are in, on both sides"
_OTHER = f"{OTHER}; between two users, give {_ALLOW}"


def socket_path(name: str, directory: str = "", allow_uids: Collection[int] = ()) -> str:
    """Return the path of the socket of `shm://name`; create and check its directory.

    Raises SchemaError if the name is not a plain file name, the path is too long, or `allow_uids`
    comes without a directory; ConnectorError if the directory is open to other users.
    """
    if not _NAME.fullmatch(name):
        raise SchemaError(
            f"shm://{name}: a name is 1 to 48 letters, digits, '.', '_' or '-', a letter first"
        )
    if allow_uids and not directory:
        raise SchemaError(f"allow_uids={allow_uids} needs directory=: give {_ALLOW}")
    directory = directory or default_directory()
    path = os.path.join(directory, f"{name}.sock")
    if len(os.fsencode(path)) > 90:  # sun_path holds 107, the draft's suffix needs some
        raise SchemaError(f"{path} is too long for a Unix socket; give a shorter directory=")
    check_private(directory, other=_OTHER, allow_uids=allow_uids)
    return path


class NamedListener:
    """A listening socket, `sock`, that appears under `path` atomically, replacing a dead one.

    Only this user can connect, whatever the umask; if it `is_shared`, the directory's group, too.
    Raises BusyError if a live producer listens there.
    """

    def __init__(self, path: str, *, is_shared: bool = False):
        self._path, self._is_shared = path, is_shared
        self._file: os.stat_result | None = None
        with translate_errors(path, _OTHER), contextlib.ExitStack() as undo:
            self._lock = LockFile(path, _OTHER)
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
        if self._is_shared:
            _let_group_connect(draft)
        os.rename(draft, self._path)
        wake(self._path)

    def close(self) -> None:
        """Close the socket and remove its file, unless that is another's; needs no descriptor."""
        self.sock.close()
        with contextlib.suppress(OSError):  # the file or its directory was removed
            if self._file is not None and os.path.samestat(self._file, os.lstat(self._path)):
                os.unlink(self._path)
        self._lock.close()


def _let_group_connect(path: str) -> None:
    """Give a socket of this user mode 0660, whatever the umask; never what replaced it there."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise ConnectorError(f"{path} was replaced by another process")
        os.chmod(f"/proc/self/fd/{fd}", 0o660)  # fchmod takes no O_PATH
    finally:
        os.close(fd)


def dial(path: str, timeout: float, cancelled: int, *, is_shared: bool = False) -> socket.socket:
    """Connect as soon as a producer listens at `path`, which wakes this call; never polls.

    Raises TransferTimeout after `timeout` seconds, and ClosedError when the descriptor `cancelled`
    becomes readable: the link was closed.
    """
    deadline = time.monotonic() + timeout
    with translate_errors(path, _OTHER):
        found = _try_dial(path, timeout)
        if found is not None:
            return found  # nothing to wait for
        with WakeupFifo(path, is_shared=is_shared) as fifo:
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


def refusal(sock: socket.socket, allow_uids: Collection[int], right: str) -> str:
    """Return why the process at the other end is refused; "" if it is of this user or a listed one.

    `right` is the verb of what it may not do: "read from". The uids are those that this process's
    user namespace shows. One that stands for every user that is not mapped there is let in only if
    it is listed, even where this process itself is such a user.
    """
    _, uid = peer_identity(sock)
    own = os.geteuid()
    if uid in allow_uids or (uid == own and not is_ambiguous(uid)):
        return ""
    unmapped = ", as which its user namespace shows every user that it does not map"
    note = unmapped if is_ambiguous(uid) else ""
    return (
        f"uid {uid}{note} may not {right} uid {own}; if that user is trusted, give uid {own} "
        f"allow_uids={uid}, and a directory= of mode 2770, of a group that both are in"
    )


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
        if isinstance(error, PermissionError):
            raise _denied(path) from None
        raise
    return sock


def _denied(path: str) -> ConnectorError:
    owner, group, own = "another user", "its directory", os.geteuid()
    with contextlib.suppress(OSError):  # the directory lets nobody in
        status = os.stat(path)
        owner, group = f"uid {status.st_uid}", f"gid {status.st_gid}"
    return ConnectorError(
        f"{path} is served by {owner}, and uid {own} may not connect to it: give {owner} "
        f"allow_uids={own}, and let uid {own} be of the group of {group}"
    )
