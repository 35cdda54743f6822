"""torch.multiprocessing: a CPU tensor in shared memory, sent by its handle.

The sender's shared tensor is made once and gathered into again: nothing says when a receiver no
longer reads it. The processes are no children of one another, so that they share a key.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "blocks → shared tensor → blocks"
VERIFIES = "nothing"
WAITS = "wakes"
REQUIRES = ()
_KEY = b"kvlink-bench"


@contextlib.contextmanager
def sender(end: Any) -> Iterator[Callable[[], None]]:
    """Gather into the shared tensor, and send its handle."""
    from multiprocessing import connection, current_process

    import torch
    import torch.multiprocessing

    current_process().authkey = _KEY
    shared = torch.from_numpy(end.flat()).share_memory_()

    def send() -> None:
        end.gather(shared.numpy())
        socket.send(shared)

    with connection.Listener(f"{end.folder}/torch", authkey=_KEY) as listener:
        end.publish("bound", b"")
        with listener.accept() as socket:
            yield send


@contextlib.contextmanager
def receiver(end: Any) -> Iterator[Callable[[], int]]:
    """Map the tensor of the handle, and scatter it."""
    from multiprocessing import connection, current_process

    import torch.multiprocessing  # noqa: F401  # registers the tensors' handles

    current_process().authkey = _KEY

    def receive() -> int:
        tensor = socket.recv()
        arrived = time.monotonic_ns()
        end.scatter(tensor.numpy())
        return arrived

    end.published("bound")
    with connection.Client(f"{end.folder}/torch", authkey=_KEY) as socket:
        yield receive
