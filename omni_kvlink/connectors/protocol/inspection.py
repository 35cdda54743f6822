"""The questions of an owner about the payloads that a producer keeps: both sides, without I/O."""

from __future__ import annotations

import threading
from bisect import bisect_right
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    Inspect,
    Inspected,
    LivePayload,
    Message,
)
from omni_kvlink.system.waits import Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.transfer import Transfer
    from omni_kvlink.connectors.protocol.transfer_table import TransferTable
    from omni_kvlink.errors import KVLinkError

MAX_CHUNKS = 4096
"""Chunks of append streams whose bytes one page adds up, or of one stream."""
_MEMORY = ("quota", "mapped", "used", "arenas", "blocks", "waiting")
_EPOCH = attrgetter("epoch")
_SPACE = MAX_MESSAGE - (8 << 10)
"""Bytes of a page's rows: the rest is for one more row, and for the totals."""
_ROW = 112
"""Bytes of a row beside its texts, at most."""


def inspected_page(
    message: Inspect,
    transfers: TransferTable,
    memory: Callable[[], dict[str, Any]],
    now: float,
) -> Inspected:
    """Return a page of the payloads of a table, whose lock is held; `now` is monotonic.

    `limit` payloads are looked at, whether they have the prefix or not, fewer if their texts or
    chunks are many: so that one page takes the same short time, however many there are.
    """
    kept = _payloads_after(transfers, message.after, message.limit + 1)
    rows, nbytes, chunks, resume = list[LivePayload](), 0, 0, 0
    for number, transfer in enumerate(kept):
        if number == message.limit or nbytes > _SPACE or chunks > MAX_CHUNKS:
            resume = kept[number - 1].epoch
            break
        if transfer.key.startswith(message.prefix):
            row = _row(transfer, now)
            rows.append(row)
            nbytes += _ROW + sum(map(_encoded_size, (row.key, row.path)))
            chunks += row.chunks
    if message.after:
        return Inspected(message.inspect_id, tuple(rows), resume)
    state = memory()
    numbers = {name: state[name] for name in _MEMORY}
    return Inspected(message.inspect_id, tuple(rows), resume, transfers.stats(), numbers)


def _payloads_after(transfers: TransferTable, epoch: int, limit: int) -> list[Transfer]:
    """Return payloads above an epoch, in the order of their epochs, `limit` of them at most.

    They are those that are live, and those that have ended and may still be looked at by a
    disconnected reader. Both are sorted as they stand: what a call takes beside the `limit` is
    a copy of two lists of references.
    """
    live = transfers.live
    start = bisect_right(live, epoch, key=_EPOCH)
    payloads = [*live[start : start + limit], *transfers.pins.list_after(epoch, limit)]
    unique = {transfer.epoch: transfer for transfer in payloads}
    return sorted(unique.values(), key=_EPOCH)[:limit]


def _encoded_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _row(transfer: Transfer, now: float) -> LivePayload:
    window = transfer.window
    return LivePayload(
        transfer.key,
        transfer.epoch,
        transfer.state.value,
        _form(transfer),
        sum(map(_nbytes, (transfer, *islice(window.chunks if window else (), MAX_CHUNKS)))),
        transfer.unclaimed,
        len(transfer.leases),
        len(transfer.pins),
        len(window.chunks) if window else 0,
        _milliseconds(now - transfer.begun),
        None if transfer.expires == float("inf") else _milliseconds(transfer.expires - now),
        transfer.path,
    )


def _form(transfer: Transfer) -> str:
    if transfer.stream is not None:
        return "chunk"
    if transfer.window is not None:
        return "append"
    if transfer.direct is not None:
        return "direct"
    if transfer.inline:
        return "inline"
    return "stream" if transfer.draft else "memory"


def _nbytes(transfer: Transfer) -> int:
    if transfer.location is not None:
        return transfer.location.nbytes
    return transfer.block[2] if transfer.block is not None else len(transfer.inline)


def _milliseconds(seconds: float) -> int:
    return min(max(0, int(1e3 * seconds)), 2**53)


class Inspections:
    """The questions of one connection that have no answer yet; thread-safe.

    `send` takes a message for the producer, and does not block.
    """

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self._lock = threading.Lock()
        self._pending: dict[int, Answer[Inspected]] = {}
        self._last_id = 0
        self._error: KVLinkError | None = None

    def request(self, after: int, prefix: str, timeout: float) -> Inspected | None:
        """Ask for a page; block for it, `timeout` seconds at most, and return None then.

        Raises the error with which the connection ends, or has ended.
        """
        answer = Answer[Inspected]()
        with self._lock:
            if self._error is not None:
                raise type(self._error)(str(self._error))
            self._last_id += 1
            inspect_id = self._last_id
            self._pending[inspect_id] = answer
        try:
            self._send(Inspect(inspect_id, after, prefix=prefix))
            return answer.result() if answer.wait(timeout) else None
        finally:
            self._pending.pop(inspect_id, None)

    def on_answer(self, message: Inspected) -> None:
        """Wake the thread that waits for an answer; one that comes late changes nothing."""
        answer = self._pending.pop(message.inspect_id, None)
        if answer is not None:
            answer.set_result(message)

    def close(self, error: KVLinkError) -> None:
        """End the questions with this error, also later ones."""
        with self._lock:
            if self._error is None:
                self._error = type(error)(str(error))
            pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.set_error(type(error)(str(error)))

    def disconnect(self) -> None:
        """Send no more: the connection is gone, and its session need not be kept."""
        self._send = _ignore


def _ignore(message: Message) -> None:
    pass
