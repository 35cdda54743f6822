"""Mooncake's transfer engine over TCP: the sender writes into the registered target blocks.

The engine does not tell the receiver that all bytes are there, so that a byte through a pipe does.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "blocks → kernel → blocks, by TCP"
VERIFIES = "nothing"
WAITS = "wakes, by a pipe"
REQUIRES = (("mooncake-transfer-engine-non-cuda", "numpy"),)
HINT = "it needs Debian's libibverbs1 and librdmacm1, also where there is no RDMA"
_BATCH = 256
"""Blocks of one call; thousands of them fail."""


@contextlib.contextmanager
def sender(end: Any) -> Iterator[Callable[[], None]]:
    """Write the blocks into the receiver's, and wake it."""
    engine = _engine(end)
    host, extents = json.loads(end.published("receiver"))
    sources = [address for address, _ in end.extents()]
    targets, lengths = ([extent[part] for extent in extents] for part in (0, 1))

    def send() -> None:
        for first in range(0, len(sources), _BATCH):
            parts = (part[first : first + _BATCH] for part in (sources, targets, lengths))
            if engine.batch_transfer_sync_write(host, *parts):
                raise RuntimeError("Mooncake's transfer failed")
        end.notify()

    yield send


@contextlib.contextmanager
def receiver(end: Any) -> Iterator[Callable[[], int]]:
    """Register the target blocks, and sleep until the sender has written them."""
    engine = _engine(end)
    host = f"127.0.0.1:{engine.get_rpc_port()}"
    end.publish("receiver", json.dumps((host, end.extents())).encode())

    def receive() -> int:
        end.wait()
        return time.monotonic_ns()

    yield receive


def _engine(end: Any) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("Mooncake's engine cannot be initialized")
    if engine.register_memory(end.memory.ctypes.data, end.memory.nbytes):
        raise RuntimeError("Mooncake's engine cannot register the memory")
    return engine
