"""Files by which processes of one user meet: private directories, the lock and the FIFO of a path.

A `LockFile` is the right to serve at a path: one process at a time has it, and nobody waits for it.
A `WakeupFifo` beside a path wakes those who wait for a file to appear there: it hangs up. Unlike
inotify this takes no resource of which a user has few. The FIFO `PATH.wait` is there only while
somebody waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import stat
from typing import TYPE_CHECKING

from omni_kvlink.errors import BusyError, ConnectorError
from omni_kvlink.system import process
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Collection

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


def check_private(
    directory: str,
    *,
    forbidden: int = 0o022,
    other: str = OTHER,
    allow_uids: Collection[int] = (),
) -> None:
    """Create a directory, or check its owner, and that it has no `forbidden` permission bits.

    `other` is what the caller may give instead. With `allow_uids` it is a directory that this user
    shares with those: it is there already, of one of them or of root, and has S_ISGID, so that
    files in it are of its group, which may write to it.

    Raises:
        ConnectorError: it belongs to another user, is open to others, or cannot be created.
    """
    owners = {os.geteuid()}
    if allow_uids:
        owners |= {0, *allow_uids}
        forbidden &= 0o007
    with translate_errors(directory, other):
        if not allow_uids:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.lstat(directory)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_mode & stat.S_ISVTX:
        raise ConnectorError(f"{directory} is for every user (mode {mode:o}): {other}")
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
        raise ConnectorError(
            f"{directory} must be a directory of uid {os.geteuid()}, it is of uid {status.st_uid}, "
            f"mode {stat.filemode(status.st_mode)}: {other}"
        )
    if allow_uids and not mode & stat.S_ISGID:
        raise ConnectorError(f"{directory} has mode {mode:o}: chmod 2770 it, or {other}")
    if mode & forbidden:
        verb, right = ("enter", "700") if forbidden & 0o055 else ("write to", "go-w")
        right = "o-w" if allow_uids else right
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
        process.call_in_children(self, LockFile._close_file)  # in them it would outlive its owner

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

    def _close_file(self) -> None:
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


_MAX_POLL = 86_400_000  # milliseconds; poll counts them in an int


class WakeupFifo:
    """Wakes its owner when `wake(path)` is called, by any process of this user; for one thread.

    If it `is_shared`, by any user of the directory's group: the directory has S_ISGID.
    """

    def __init__(self, path: str, *, is_shared: bool = False):
        self._path, self._is_shared = path, is_shared
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
                    self._make(fifo)
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

    def _make(self, fifo: str) -> None:
        """Make the FIFO; one that is shared appears with its mode, whatever the umask."""
        if not self._is_shared:
            os.mkfifo(fifo, 0o600)
            return
        draft = f"{fifo}.{_token()}"
        os.mkfifo(draft, 0o600)
        try:
            fd = os.open(draft, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(fd, 0o660)
            finally:
                os.close(fd)
            os.link(draft, fifo, follow_symlinks=False)
        finally:
            os.unlink(draft)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> WakeupFifo:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _token() -> str:
    """Return what no other draft's name has, also of a process of another PID namespace."""
    return os.urandom(8).hex()


def wake(path: str) -> None:
    """Wake everybody who waits for `path`, after it has appeared; does not block.

    Raises ConnectorError if they could not be woken: there is no free descriptor.
    """
    fifo = f"{path}.wait"
    # Renamed first, so that nobody can open it any more: all who have it open are woken.
    taken = f"{fifo}.{_token()}"
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
