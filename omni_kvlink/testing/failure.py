"""What the kit raises."""

from __future__ import annotations


class CheckFailed(AssertionError):
    """A behaviour is missing.

    Attributes:
        check: the name of the function that asked for it.
    """

    def __init__(self, check: str, why: str):
        super().__init__(f"{check}: {why}")
        self.check = check
