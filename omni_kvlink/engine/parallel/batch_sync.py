"""`BatchSync`: keeps the ranks of a group at the same step of the same batch."""

from __future__ import annotations

import enum
import threading
import zlib
from typing import TYPE_CHECKING

import msgspec

from omni_kvlink.engine.errors import EngineDeadError, EngineError, RequestFailed
from omni_kvlink.engine.ipc.codec import pack_error, unpack_error
from omni_kvlink.engine.parallel.process_group import MAX_BROADCAST_NBYTES, ProcessGroup
from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_FAILED_RANK_TIMEOUT = 10.0
"""Seconds that a rank with an unexpected error waits for the others, which may be in a pass."""


class RankFailed(RequestFailed):
    """Another rank could not continue; its own error is in the request's result."""


class _Phase(enum.IntEnum):
    """Phases of a batch. A rank that fails goes to a later one, which is how the others know."""

    BEGIN = 0
    STEP = 1
    SETTLE = 2
    END = 3


class BatchSync:
    """Synchronizes the ranks of a group over one batch after the other.

    Every method but `abort`, `is_cancelled` and `is_aborted_here` must be called by all ranks, and
    blocks until they do; a single rank communicates with nobody. `abort` may be called from any
    thread, and reaches the ranks at different times; `is_cancelled` changes on all of them at the
    same step.
    """

    def __init__(self, process_group: ProcessGroup):
        self._process_group = process_group
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._aborted: set[str] = set()  # on this rank
        self._cancelled = self._aborted if process_group.is_alone else set[str]()  # on all ranks

    def begin(self, request_ids: Sequence[str]) -> None:
        """Begin a batch of these requests; EngineError if another rank began a different one."""
        with self._lock:
            self._running = list(request_ids)
            self._aborted.clear()
            self._cancelled.clear()
        checksum = zlib.crc32("\n".join(request_ids).encode())
        rows = self._process_group.all_gather([_Phase.BEGIN, len(request_ids), checksum])
        if any(row != rows[0] for row in rows):
            raise EngineError(f"the ranks were given different batches, here {list(request_ids)}")

    def abort(self, request_id: str) -> None:
        """Abort a running request, on all ranks from their next step on; ignore any other."""
        with self._lock:
            if request_id in self._running:
                self._aborted.add(request_id)

    def is_cancelled(self, request_id: str) -> bool:
        """Whether all ranks know that the request was aborted."""
        return request_id in self._cancelled

    def is_aborted_here(self, request_id: str) -> bool:
        """Whether this rank knows that the request was aborted, and must report it as an error."""
        return request_id in self._aborted

    def step(self, error: Exception | None = None, *, in_pass: bool = True) -> None:
        """Wait until all ranks are at this step; exchange failures and aborts.

        `error` says why this rank cannot continue, and is raised here; the others raise RankFailed.
        `in_pass`: the others may be in a pass that needs this rank, and never come here.
        """
        aborted = [request_id in self._aborted for request_id in self._running]
        try:
            errors = [error] if in_pass else []
            rows = self._gather(_Phase.STEP, [error is not None, *aborted], errors)
        except (RankFailed, EngineDeadError) as failure:
            raise error or failure from None
        if error is not None:
            raise error
        if any(row[0] for row in rows):
            raise RankFailed("another rank failed at this step")
        by_request = zip(self._running, *(row[1:] for row in rows), strict=True)
        self._cancelled.update(request_id for request_id, *flags in by_request if any(flags))

    def sync_errors(self, errors: Mapping[str, Exception]) -> dict[str, Exception]:
        """Exchange the errors of running requests; returns those of all ranks.

        A rank that failed may call this early; the others then raise RankFailed at their next step,
        and call this, too.
        """
        return self._synchronize(_Phase.SETTLE, errors)

    def end(self, errors: Mapping[str, Exception]) -> dict[str, Exception]:
        """End the batch: exchange its last errors, as `sync_errors` does."""
        merged = self._synchronize(_Phase.END, errors)
        with self._lock:
            self._running = []
        return merged

    def _synchronize(self, phase: _Phase, errors: Mapping[str, Exception]) -> dict[str, Exception]:
        if self._process_group.is_alone:
            return dict(errors)
        numbers = [_severity(errors.get(request_id)) for request_id in self._running]
        merged = {}
        try:
            rows = self._gather(phase, [0, *numbers], errors.values())
            for index, request_id in enumerate(self._running):
                severities = [row[1 + index] for row in rows]
                if any(severities):
                    sender = severities.index(max(severities))
                    merged[request_id] = self._broadcast(errors.get(request_id), sender)
        except EngineDeadError as error:
            return {request_id: errors.get(request_id, error) for request_id in self._running}
        return merged

    def _broadcast(self, error: Exception | None, sender: int) -> Exception:
        """The sender's error; a rank that has an error of its own keeps that."""
        message = self._process_group.broadcast_bytes(_encoded(error), sender)
        if error is not None and not isinstance(error, RankFailed):
            return error
        return unpack_error(msgspec.json.decode(message))

    def _gather(
        self, phase: _Phase, numbers: list[int], errors: Iterable[Exception | None]
    ) -> list[list[int]]:
        """Gather numbers when all ranks are in this phase; a rank in a later one has failed."""
        group = self._process_group
        is_shared = group.parallel.ranks_per_pass > 1
        timeout = _FAILED_RANK_TIMEOUT if is_shared and any(map(_is_unexpected, errors)) else None
        while True:
            rows = group.all_gather([phase, *numbers], timeout=timeout)
            if any(row[0] > phase for row in rows):
                raise RankFailed("another rank failed")
            if all(row[0] == phase for row in rows):
                return [row[1:] for row in rows]


def _is_unexpected(error: Exception | None) -> bool:
    """Whether the other ranks may not have the same error, and be in a pass."""
    if error is None or isinstance(error, RankFailed):
        return False
    return isinstance(error, RequestFailed) or not isinstance(error, KVLinkError)


def _severity(error: Exception | None) -> int:
    """2 for a rank's own error, 1 for the report of another rank's."""
    if error is None:
        return 0
    return 1 if isinstance(error, RankFailed) else 2


def _encoded(error: Exception | None) -> bytes:
    if error is None:
        return b""
    message = msgspec.json.encode(pack_error(error))
    if len(message) <= MAX_BROADCAST_NBYTES:
        return message
    short = {"kind": type(error).__name__, "text": str(error)[:600], "attributes": {}}
    return msgspec.json.encode(short)
