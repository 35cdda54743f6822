"""The whole error family: each error is named by what the caller can do about it.

Every error is a `KVLinkError` and, where one fits, also the builtin an ordinary `except` expects.
Extra facts are attributes, so that a caller never has to parse a message.
"""

from __future__ import annotations


class KVLinkError(Exception):
    """Base of every error that omni_kvlink raises on purpose."""


class SchemaError(KVLinkError, ValueError):
    """The caller's tensors or cache do not fit: the text names layer, K or V, got and wanted."""


class WireError(KVLinkError, ValueError):
    """Bad bytes from a peer or a file; nothing of them was used."""


class VersionError(WireError):
    """The peer or file speaks another major version; both versions are named."""


class IntegrityError(WireError):
    """The bytes are not the ones that were committed; names branch, layer, K or V."""


class ConnectorError(KVLinkError):
    """A transfer could not be made."""


class UnavailableError(ConnectorError, ImportError):
    """This connector cannot run here: why, and the command or setting that cures it."""


class TransferTimeout(ConnectorError, TimeoutError):
    """The deadline passed.

    Attributes:
        key: the payload asked for.
        waited: seconds.
        phase: how far the transfer had come, in words.
    """

    def __init__(self, message: str, *, key: str = "", waited: float = 0.0, phase: str = ""):
        super().__init__(message)
        self.key, self.waited, self.phase = key, waited, phase


class TransferFailed(ConnectorError):
    """The other side said that this transfer failed, or its time to live ran out.

    Attributes:
        key: the payload concerned.
        reason: the other side's words.
    """

    def __init__(self, message: str, *, key: str = "", reason: str = ""):
        super().__init__(message)
        self.key, self.reason = key, reason


class PeerLostError(ConnectorError, ConnectionError):
    """The peer died or closed the connection; its payloads are gone."""


class CapacityError(ConnectorError, MemoryError):
    """No room for the payload.

    Attributes:
        asked: bytes wanted.
        free: bytes that were free, the largest that could be had.
    """

    def __init__(self, message: str, *, asked: int = 0, free: int = 0):
        super().__init__(message)
        self.asked, self.free = asked, free


class DuplicateKeyError(ConnectorError):
    """A live payload has this key; another payload is never overwritten."""


class ClosedError(KVLinkError):
    """The link, lease or payload was closed, released or moved away before this use."""


class BusyError(KVLinkError):
    """Somebody else holds this name or resource."""


class NativeError(KVLinkError, RuntimeError):
    """The compiled library reported an error; its own text is quoted."""
