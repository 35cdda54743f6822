"""How a request, or the whole engine, may end besides the library's own errors."""

from __future__ import annotations

from ..errors import KVLinkError


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
