"""Errors of system calls: each becomes an error of the library, with the name and the cure.

`translate_errors` is the only place where that is done. Code that knows a path, an address or a
size puts its system calls into such a block; `KVLink.serve` and `KVLink.connect` have one around
all, which names the URL.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from omni_kvlink.errors import (
    BusyError,
    ConnectorError,
    FileError,
    KVLinkError,
    MissingFileError,
    PeerLostError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_OWNER = "let uid {uid} use it, or {other}"
_PEER = "the other side closed the connection: look at its log, and open the link again"
_ROUTE = "there is no route to it: check the network, or {other}"
_FULL = "make room there, or {other}"
_CURES = {
    errno.EMFILE: "this process has too many open: raise `ulimit -n`, or close links",
    errno.ENFILE: "this machine has too many open: raise fs.file-max, or end processes",
    errno.ENOMEM: "end processes, or raise this one's limits (`ulimit -v`, memory.max)",
    errno.ENOBUFS: "end processes, or raise this one's limits (`ulimit -v`, memory.max)",
    errno.EAGAIN: "there are no more threads: raise `ulimit -u` or pids.max, or close links",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: f"this user's quota is used up: {_FULL}",
    errno.EFBIG: "raise `ulimit -f`, or {other}",
    errno.EACCES: _OWNER,
    errno.EPERM: _OWNER,
    errno.EROFS: "nothing there can be written: {other}",
    errno.ENOENT: "make it, or {other}",
    errno.ENOTDIR: "a part of the path is no directory: {other}",
    errno.EISDIR: "{other}",
    errno.EEXIST: "remove it, or {other}",
    errno.ELOOP: "it may be no symbolic link: {other}",
    errno.ENAMETOOLONG: "its name is too long: {other}",
    errno.EADDRINUSE: "another process serves there: end it, or {other}",
    errno.EADDRNOTAVAIL: "this machine has no such address (`ip address`): {other}",
    errno.ENODEV: "this machine has no such address or device (`ip address`): {other}",
    errno.ECONNREFUSED: "nobody serves there: start the producer, or {other}",
    errno.ECONNRESET: _PEER,
    errno.ECONNABORTED: _PEER,
    errno.EPIPE: _PEER,
    errno.ENOTCONN: _PEER,
    errno.ENETUNREACH: _ROUTE,
    errno.EHOSTUNREACH: _ROUTE,
    errno.EIO: "the device failed (`dmesg`): {other}",
    errno.EINTR: "a signal interrupted it: call again",
    errno.ENOLCK: "that file system has no locks: {other}",
    errno.ENOSYS: "this kernel or its sandbox (seccomp) does not allow it: {other}",
    errno.EOPNOTSUPP: "that file system does not support it: {other}",
}
"""The cure of each errno; `{other}` is what the caller may give instead."""
_UNKNOWN = "see the limits of this process (`ulimit -a`) and the kernel's log (`dmesg`), or {other}"


@contextlib.contextmanager
def translate_errors(
    subject: str, other: str = "use another", kind: type[KVLinkError] = ConnectorError
) -> Iterator[None]:
    """Raise what a system call of this block raises as an error of the library.

    `subject` is what the call was about: a path, an address, a setting. `other` is what the caller
    may do about the place, such as "give another directory=". Errors of the library pass.
    """
    try:
        yield
    except Exception as error:
        if is_of_system(error):
            raise system_error(error, subject, other, kind) from None
        raise


def system_error(
    error: Exception,
    subject: str,
    other: str = "use another",
    kind: type[KVLinkError] = ConnectorError,
) -> KVLinkError:
    """Return the error to raise for that of a system call; see `translate_errors`.

    It is a BusyError for an address in use, and a PeerLostError for a connection that broke.
    """
    number: int = getattr(error, "errno", None) or 0
    if number in errno.errorcode:
        reason = os.strerror(number)  # ZMQ's own text repeats the address
    else:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        number = errno.ECONNRESET if isinstance(error, ConnectionError) else number
    text = f"{subject}: {reason}; {cure_of(number, other)}"
    if number == errno.EADDRINUSE:
        return BusyError(text)
    if isinstance(error, ConnectionError) and number != errno.ECONNREFUSED:
        return PeerLostError(text)
    if issubclass(kind, FileError):
        return (MissingFileError if number == errno.ENOENT else kind)(text, errno=number)
    return kind(text)


def is_of_system(error: Exception) -> bool:
    """Whether it is a system call's and not yet the library's: an OSError, or one of ZMQ."""
    has_errno = isinstance(error, OSError) or isinstance(getattr(error, "errno", None), int)
    return has_errno and not isinstance(error, KVLinkError)


def cure_of(number: int, other: str = "use another") -> str:
    """Return what helps against an errno."""
    return _CURES.get(number, _UNKNOWN).format(other=other, uid=os.geteuid())
