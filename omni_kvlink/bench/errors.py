"""The error that ends a benchmark with one line instead of a traceback."""

from __future__ import annotations

from omni_kvlink.errors import KVLinkError


class BenchError(KVLinkError):
    """The benchmark could not be set up, or its reader failed; the text says why."""
