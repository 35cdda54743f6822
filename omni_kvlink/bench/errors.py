"""What ends a benchmark with one line instead of a traceback."""

from __future__ import annotations

from omni_kvlink.errors import KVLinkError


class BenchError(KVLinkError):
    """The benchmark could not be set up, or its reader is gone; the text says why."""


class ReaderError(BenchError):
    """The reader could not do what it was asked, and lives on; the text is its error."""
