"""The wait of an append stream's writer for its readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.errors import CapacityError, format_seconds

if TYPE_CHECKING:
    import threading

    from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
    from omni_kvlink.connectors.protocol.transfer import Transfer
    from omni_kvlink.system.waits import Deadline


def wait_for_room(window: ChunkWindow[Transfer], lock: threading.Lock, deadline: Deadline) -> None:
    """Block until there may be another chunk: the oldest is released. `lock` guards the window.

    CapacityError at the deadline.
    """
    while True:
        with lock:
            oldest = window.chunks[0] if window.is_full else None
        if oldest is None:
            return
        if not oldest.wait(deadline.timeout_left):
            raise CapacityError(
                f"stream {oldest.key!r}: not every reader has released chunk {window.first} "
                f"within {format_seconds(deadline.timeout)}, and {window.size} chunks are kept "
                f"(window=); readers: {window.describe_readers()}"
            )
