"""`Area`: makes the findings of one area, also from the library's own errors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from omni_kvlink.doctor.report import Finding
from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator

_NO_CURE = "look the message up in docs/errors.md"


class Area:
    """The findings of an area, in the order in which they are made."""

    def __init__(self, name: str):
        self.name, self.findings = name, list[Finding]()

    def ok(self, name: str, text: str) -> None:
        """Add a fact that is as it should be."""
        self.findings.append(Finding(self.name, name, "ok", text))

    def note(self, name: str, text: str) -> None:
        """Add a fact that is to be known, and hinders nothing that was asked for."""
        self.findings.append(Finding(self.name, name, "note", text))

    def wrong(self, name: str, text: str, cure: str) -> None:
        """Add an error, and its cure."""
        self.findings.append(Finding(self.name, name, "wrong", text, cure))

    def failed(self, name: str, error: KVLinkError | str, cure: str = "") -> None:
        """Add an error of the library, whose text ends with the cure unless one is given."""
        text = " ".join(str(error).split())
        start = max(text.rfind("; "), text.rfind(": "))
        reason, own_cure = text[: max(0, start)], text[start + 2 :]
        if cure or not reason:
            reason, own_cure = text, cure or _NO_CURE
        self.wrong(name, reason, own_cure)

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Add an error that the library raises in this block, which it ends."""
        try:
            yield
        except KVLinkError as error:
            self.failed(name, error)
