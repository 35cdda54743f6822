"""Stops a UCX peer amid the bytes of a payload."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.testing.caches import fingerprint, sized
from omni_kvlink.testing.peer_harness import PATIENCE, ProcessPeer, RemoteLink
from omni_kvlink.testing.rig import until
from support.faults.frozen import freeze

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


HUGE_NBYTES = 96 << 20
HUGE = sized("k", HUGE_NBYTES)
"""Takes so long that its sender can be stopped during the transfer."""


def done_or(future: Future[Any], count: Callable[[], int]) -> bool:
    return future.done() or count() > 0


def in_use(stats: dict[str, Any]) -> int:
    """Return the number of requests whose memory UCX has."""
    return int(stats["ucx"]["active"] + stats["ucx"]["quarantined"])


def active(reader: RemoteLink) -> int:
    return in_use(reader.call("stats"))


def stop_amid(
    target: ProcessPeer, producer: RemoteLink, reader: RemoteLink, timeout: float
) -> Future[Any]:
    """Start a `get` whose producer is stopped when it has sent a part."""
    for _ in range(20):
        producer.call("put", recipe=HUGE.to_dict())
        waiting = reader.submit("get", key="k", timeout=timeout)
        until(partial(done_or, waiting, lambda: active(reader)), "its bytes are coming")
        freeze(target.process.pid)
        time.sleep(0.3)  # what is in the sockets still arrives
        if active(reader):
            return waiting
        os.kill(target.process.pid, signal.SIGCONT)
        assert waiting.result(PATIENCE) == fingerprint(HUGE.make())
        until(lambda: producer.call("stats")["transfers"]["live"] == 0, "it was read")
    raise AssertionError("the producer could not be stopped in time")
