"""Gets in the background: each returns the right bytes or raises a typed error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink import KVLinkError
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink

if TYPE_CHECKING:
    from concurrent.futures import Future


class Get:
    """A get that verifies every byte."""

    def __init__(self, reader: RemoteLink, recipe: Recipe, timeout: float):
        self._recipe, self._timeout = recipe, timeout
        self.future: Future[str] = reader.submit(
            "get", key=recipe.key, timeout=timeout, verify="full"
        )

    def arrived(self) -> bool:
        """Wait for the end; return whether the bytes arrived, or False after a typed error."""
        error = self.future.exception(self._timeout + PATIENCE)
        if error is None:
            assert self.future.result() == fingerprint(self._recipe.make())
            return True
        assert isinstance(error, KVLinkError), f"{self._recipe.key!r}: {error!r}"
        return False


def insist(reader: RemoteLink, recipe: Recipe) -> None:
    """Repeat a get until it succeeds."""
    deadline = time.monotonic() + PATIENCE
    while not (get := Get(reader, recipe, max(0.0, deadline - time.monotonic()))).arrived():
        if time.monotonic() > deadline:
            get.future.result()
