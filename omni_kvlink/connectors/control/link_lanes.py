"""Threads, counters and options of the lanes of a consumer, which all of its connections share."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from omni_kvlink.connectors.control.lane import LaneThreads, lanes_refusal

_log = logging.getLogger("omni_kvlink")


class LinkLanes:
    """Threads, counters and options of the lanes of all connections of a consumer.

    `why` says why the last one could not be opened, or was lost; "" if none was.
    """

    def __init__(self, url: str, count: int, *, is_encrypted: bool):
        self._url, self.count, self.is_encrypted = url, count, is_encrypted
        self.why = lanes_refusal(count, is_encrypted=is_encrypted)
        self.is_possible = not self.why
        self.threads, self.counters = LaneThreads(count), Counter[str]()
        self._logged = {"", "lanes=0"}
        self.report(self.why)

    def report(self, why: str) -> None:
        """Keep why bytes go over ZMQ, and log it once."""
        self.why = why
        if why not in self._logged:
            self._logged.add(why)
            _log.warning("%s: bytes go over ZMQ, and by no lane: %s", self._url, why)

    def stats(self) -> dict[str, Any]:
        """Return counts of lanes and of bytes, and the reason, as JSON values; any thread."""
        names = ("opened", "lost", "received_nbytes", "again_nbytes")
        return {**{name: self.counters[name] for name in names}, "why": self.why}
