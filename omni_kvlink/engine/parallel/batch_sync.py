"""What ranks that compute together must agree on, or one waits for what another never does."""

from __future__ import annotations

import enum
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from omni_kvlink.engine.errors import EngineDeadError, EngineError, RequestFailed
from omni_kvlink.engine.ipc.codec import pack_error, unpack_error
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.errors import KVLinkError

_PATIENCE = 10.0
"""Seconds in which a rank that broke down is joined by the others, unless they are in a sum."""


class RankFailed(RequestFailed):
    """Another rank could not go on; its own error follows."""


class _Meeting(enum.IntEnum):
    """Where a rank is. Who failed is further on than the others, who come after when they hear."""

    BEGIN = 0
    STEP = 1
    SETTLE = 2
    END = 3


class BatchSync:
    """One batch after the other, on every rank of a group; alone, it agrees with itself.

    `abort` may be called from any thread, and reaches the ranks at different moments; what
    `is_cancelled` says changes on all of them at once.
    """

    def __init__(self, mates: ProcessGroup):
        self._mates = mates
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._heard: set[str] = set()
        self._agreed = self._heard if mates.is_alone else set[str]()

    def begin(self, request_ids: Sequence[str]) -> None:
        """These run now.

        Raises:
            EngineError: another rank was told of other requests.
            EngineDeadError: another rank is gone.
        """
        with self._lock:
            self._running = list(request_ids)
            self._heard.clear()
            self._agreed.clear()
        mark = zlib.crc32("\n".join(request_ids).encode())
        rows = self._mates.gather([_Meeting.BEGIN, len(request_ids), mark])
        if any(row != rows[0] for row in rows):
            raise EngineError(f"the ranks were told different batches, here {list(request_ids)}")

    def abort(self, request_id: str) -> None:
        """A running request shall end; of others this knows nothing."""
        with self._lock:
            if request_id in self._running:
                self._heard.add(request_id)

    def is_cancelled(self, request_id: str) -> bool:
        """Whether all ranks have heard of it."""
        return request_id in self._agreed

    def has_heard(self, request_id: str) -> bool:
        """Whether this rank has: to be settled as an error."""
        return request_id in self._heard

    def step(self, error: Exception | None = None) -> None:
        """All ranks are at the same step, and none has failed; who is cancelled is agreed.

        Raises:
            error: what was given.
            RankFailed: another rank failed.
            EngineDeadError: another rank is gone.
        """
        cancelled = [request_id in self._heard for request_id in self._running]
        try:
            rows = self._meet(_Meeting.STEP, [error is not None, *cancelled], [error])
        except (RankFailed, EngineDeadError) as others:
            raise error or others from None
        if error is not None:
            raise error
        if any(row[0] for row in rows):
            raise RankFailed("another rank failed at this step")
        heard = zip(self._running, zip(*(row[1:] for row in rows), strict=True), strict=True)
        self._agreed.update(request_id for request_id, flags in heard if any(flags))

    def settle(self, errors: Mapping[str, Exception]) -> dict[str, Exception]:
        """The errors of some running requests, on whichever rank they are.

        A rank that failed may call this early: the others end what they do, and come.
        """
        return self._share(_Meeting.SETTLE, errors)

    def end(self, errors: Mapping[str, Exception]) -> dict[str, Exception]:
        """The batch is over; its last errors, of all ranks."""
        found = self._share(_Meeting.END, errors)
        with self._lock:
            self._running = []
        return found

    def _share(self, where: _Meeting, errors: Mapping[str, Exception]) -> dict[str, Exception]:
        if self._mates.is_alone:
            return dict(errors)
        flags = [_flag(errors.get(request_id)) for request_id in self._running]
        try:
            rows = self._meet(where, [0, *flags], errors.values())
            found = {}
            for at, request_id in enumerate(self._running):
                said = [row[1 + at] for row in rows]
                if any(said):
                    sender = said.index(2 if 2 in said else 1)
                    found[request_id] = self._told(errors.get(request_id), sender)
        except EngineDeadError as error:
            return {request_id: errors.get(request_id, error) for request_id in self._running}
        return found

    def _told(self, own: Exception | None, sender: int) -> Exception:
        """One rank's error, on all; whoever has one of its own keeps that."""
        letter = self._mates.tell(_written(own), sender)
        if own is not None and not isinstance(own, RankFailed):
            return own
        return unpack_error(msgspec.json.decode(letter))

    def _meet(
        self, where: _Meeting, numbers: list[int], errors: Iterable[Exception | None]
    ) -> list[list[int]]:
        """Numbers of all ranks, when all are here; who has gone on already has failed."""
        has_sums = self._mates.parallel.tensor_parallel_size > 1
        patience = _PATIENCE if has_sums and any(map(_is_unforeseen, errors)) else None
        while True:
            rows = self._mates.gather([where, *numbers], patience=patience)
            if any(row[0] > where for row in rows):
                raise RankFailed("another rank failed")
            if all(row[0] == where for row in rows):
                return [row[1:] for row in rows]


def _is_unforeseen(error: Exception | None) -> bool:
    """Whether it may be this rank's alone, amid what all compute."""
    if error is None or isinstance(error, RankFailed):
        return False
    return isinstance(error, RequestFailed) or not isinstance(error, KVLinkError)


def _flag(error: Exception | None) -> int:
    """2 for a rank's own error, 1 for what it heard of another."""
    if error is None:
        return 0
    return 1 if isinstance(error, RankFailed) else 2


def _written(error: Exception | None) -> bytes:
    if error is None:
        return b""
    letter = msgspec.json.encode(pack_error(error))
    if len(letter) <= 8000:
        return letter
    return msgspec.json.encode(
        {"kind": type(error).__name__, "text": str(error)[:600], "facts": {}}
    )
