"""How a request, or the whole engine, may end besides the library's own errors."""

from __future__ import annotations

import logging

from omni_kvlink.errors import KVLinkError

_log = logging.getLogger(__name__)


class EngineError(KVLinkError, RuntimeError):
    """The engine could not do what was asked; the text names the cure."""


class RequestAborted(EngineError):
    """Somebody aborted this request; its memory is back."""


class RequestFailed(EngineError):
    """The pipeline raised an error for this request; it is the `__cause__` where there is one."""


class EngineAsleepError(EngineError):
    """The weights are not in memory: call `wake_up` first."""


class EngineDeadError(EngineError, ConnectionError):
    """A worker or stage is gone, and with it what it was doing: restart it."""


class NoWorkersError(EngineError, NotImplementedError):
    """This executor has no workers to call: use its own methods."""


def forget_frames(error: BaseException | None) -> None:
    """Let go of an error's frames: who keeps the error must not keep the KV cache in their locals.

    Where it was raised is in the log, at level DEBUG.
    """
    if error is not None:
        _log.debug("a request ended in an error", exc_info=error)
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
