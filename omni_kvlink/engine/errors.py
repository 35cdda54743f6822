"""Errors of the engine; each is a `KVLinkError`."""

from __future__ import annotations

from omni_kvlink.errors import KVLinkError


class EngineError(KVLinkError, RuntimeError):
    """The engine cannot do what was requested; the text names the cure."""


class RequestAborted(EngineError):
    """The request was aborted; its memory is released."""


class RequestFailed(EngineError):
    """The pipeline raised an error for this request: its `__cause__`, if that is known here."""


class EngineAsleepError(EngineError):
    """The weights are not in memory: call `wake_up` first."""


class EngineDeadError(EngineError, ConnectionError):
    """A worker or a stage is gone, and the requests it had are lost: restart it."""


class NoWorkersError(EngineError, NotImplementedError):
    """This executor has no workers to call: use its own methods."""


def as_engine_error(error: Exception, context: str) -> KVLinkError:
    """`error` if it is of the library's family, else a RequestFailed that it caused."""
    if isinstance(error, KVLinkError):
        return error
    failure = RequestFailed(f"{context}: {error!r}")
    failure.__cause__ = error
    return failure
