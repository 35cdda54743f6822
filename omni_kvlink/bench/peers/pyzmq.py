"""Raw pyzmq: one multipart message over ipc, a part for each tensor."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "blocks → parts → kernel → parts → blocks"
VERIFIES = "nothing"
WAITS = "wakes"
REQUIRES = ()


@contextlib.contextmanager
def sender(end: Any) -> Iterator[Callable[[], None]]:
    """Gather the blocks, and push them without a further copy."""
    import zmq

    parts = end.flat()

    def send() -> None:
        end.gather(parts)
        socket.send_multipart(list(parts), copy=False)

    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.bind(f"ipc://{end.folder}/zmq")
        end.publish("bound", b"")
        yield send
        socket.linger = 0


@contextlib.contextmanager
def receiver(end: Any) -> Iterator[Callable[[], int]]:
    """Pull, and scatter the parts."""
    import numpy as np
    import zmq

    def receive() -> int:
        frames = socket.recv_multipart(copy=False)
        arrived = time.monotonic_ns()
        end.scatter([np.frombuffer(frame.buffer, np.uint8) for frame in frames])
        return arrived

    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        end.published("bound")
        socket.connect(f"ipc://{end.folder}/zmq")
        yield receive
