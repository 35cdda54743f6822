"""`Deadline`: when a call that its caller gave `timeout` seconds must have ended."""

from __future__ import annotations

import math
import time

from omni_kvlink.errors import TransferTimeout, format_seconds

NEVER = math.inf
"""A deadline (`time.monotonic`) that does not pass."""


class Deadline:
    """The end of a call with a timeout of so many seconds, counted from now.

    With a timeout of 0 the call waits for nobody, and its own work takes as long as it takes.

    Attributes:
        timeout: in seconds.
        at: when it waits no longer (`time.monotonic`).
        work: when its own work, such as copying, ends unfinished: `at`, or `NEVER`.
    """

    def __init__(self, timeout: float):
        self.timeout, self.at = timeout, time.monotonic() + timeout
        self.work = self.at if timeout else NEVER

    def seconds_left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(0.0, self.at - time.monotonic())

    @property
    def timeout_left(self) -> float:
        """The timeout of a call below this one: 0 only if this one waits for nobody."""
        return max(1e-9, self.at - time.monotonic()) if self.timeout else 0.0

    def check(self, key: str) -> None:
        """Raise TransferTimeout if the timeout has passed."""
        if self.timeout and not self.seconds_left():
            raise self.passed(key, "reserving memory")

    def passed(self, key: str, phase: str) -> TransferTimeout:
        """Return the error for one of `check_deadline`, with the payload's key and the timeout."""
        text = f"{format_seconds(self.timeout)} have passed while {phase}: raise timeout="
        return TransferTimeout(
            f"payload {key!r}: {text}", key=key, waited=self.timeout, phase=phase
        )


def check_deadline(deadline: float, phase: str) -> None:
    """Raise TransferTimeout if a deadline (`time.monotonic`) has passed in this phase of the work.

    For loops over large pieces of work: the caller knows for what, and names it.
    """
    if time.monotonic() >= deadline:
        raise deadline_passed(phase)


def deadline_passed(phase: str) -> TransferTimeout:
    """The error of `check_deadline`."""
    return TransferTimeout(f"the deadline passed while {phase}: raise timeout=", phase=phase)
