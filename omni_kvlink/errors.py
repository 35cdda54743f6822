"""All errors of the library, named by what the caller can do.

Each is a `KVLinkError` and, where one fits, also the builtin error that an ordinary `except` names.
Further facts are attributes, so that no caller has to parse a message.
"""

from __future__ import annotations

from typing import TypeVar

_ErrorT = TypeVar("_ErrorT", bound=BaseException)


def format_seconds(duration: float) -> str:
    """Return a duration as the texts of errors give it: rounded, such as "0.5 s"."""
    return f"{duration:.3g} s" if duration < 1 else f"{round(duration, 2):.12g} s"


def without_frames(error: _ErrorT) -> _ErrorT:
    """Drop the tracebacks of an error that is kept, and of those that it came from; return it.

    A frame keeps its locals and its callers: a payload's memory, a session and its descriptors.
    """
    chain: list[BaseException] = [error]
    for one in chain:
        one.__traceback__ = None
        origins = (one.__cause__, one.__context__)
        chain += [other for other in origins if other is not None and other not in chain]
    return error


class KVLinkError(Exception):
    """Base of all errors that omni_kvlink raises on purpose."""


class SchemaError(KVLinkError, ValueError):
    """The caller's tensors or arguments are not valid; names layer, K or V, got and wanted."""


class WireError(KVLinkError, ValueError):
    """A peer or a file sent invalid bytes; none of them was used."""


class VersionError(WireError):
    """The peer or file is of another major version; names both versions."""


class IntegrityError(WireError):
    """The bytes are not the ones that were committed; names branch, layer, K or V."""


class FileError(KVLinkError, OSError):
    """A file cannot be read or written; names the path and the cure. `errno` is the system's."""

    def __init__(self, message: str, *, errno: int | None = None):
        super().__init__(message)
        self.errno = errno


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""


class ConnectorError(KVLinkError):
    """A connection or a transfer failed."""


class UnavailableError(ConnectorError, ImportError):
    """A connector cannot run here; names the reason, and the command or setting that cures it."""


class TransferTimeout(ConnectorError, TimeoutError):
    """The deadline of the payload `key` passed after `waited` seconds.

    `phase` is how far the transfer had come, such as "not announced".
    """

    def __init__(self, message: str, *, key: str = "", waited: float = 0.0, phase: str = ""):
        super().__init__(message)
        self.key, self.waited, self.phase = key, waited, phase


class TransferFailed(ConnectorError):
    """The other side failed or aborted the payload `key`, for `reason`, or its `ttl` ran out."""

    def __init__(self, message: str, *, key: str = "", reason: str = ""):
        super().__init__(message)
        self.key, self.reason = key, reason


class MissingError(TransferFailed):
    """The producer has no payload `key` now, and the get was not to wait for one."""


class PeerLostError(ConnectorError, ConnectionError):
    """The peer died or closed the connection; its payloads are lost."""


class CapacityError(ConnectorError, MemoryError):
    """Not enough memory for the `requested` bytes; at most `free` bytes could be allocated."""

    def __init__(self, message: str, *, requested: int = 0, free: int = 0):
        super().__init__(message)
        self.requested, self.free = requested, free


class DuplicateKeyError(ConnectorError):
    """A live payload has this request id; it was not overwritten."""


class ClosedError(KVLinkError):
    """The link, lease or payload was closed or released before this call."""


class BusyError(KVLinkError):
    """Another process uses this name or resource."""


class NativeError(KVLinkError, RuntimeError):
    """The compiled library reported an error; quotes its text."""
