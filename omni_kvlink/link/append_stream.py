"""`AppendStream`: the sending end of an append stream, chunk by chunk."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    SchemaError,
    TransferTimeout,
    format_seconds,
)
from omni_kvlink.link.put_operation import PutOperation
from omni_kvlink.payload.append_stream import StreamPosition
from omni_kvlink.payload.chunk_requests import PackedRequests
from omni_kvlink.system import process
from omni_kvlink.system.waits import Deadline, check_timeout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link.put_operation import CopiedPut
    from omni_kvlink.memory.region import Lease
    from omni_kvlink.payload.append_stream import StreamSpec


class AppendStream:
    """An append stream, from `KVProducer.open_stream`; a context manager; thread-safe.

    Leaving the block commits it. An exception in the block fails it: its readers raise
    TransferFailed, also in the middle. `receipt` is None before `commit`; the `ledger` adds up what
    all appends cost.
    """

    def __init__(self, spec: StreamSpec, head: CopiedPut, lease: Lease, *, window: int):
        self.request_id, self.ledger = head.plan.request_id, head.ledger
        self.receipt: Receipt | None = None
        self._spec, self._head = spec, head
        self._position = StreamPosition()
        self._process = process.current
        # Chunks follow one another. An RLock, for interrupts: see docs/threads.md.
        self._appending = threading.RLock()
        self._lock = threading.Lock()  # held while the head is written, committed or aborted
        self._lease: Lease | None = None
        try:
            producer, readers = head.operation.producer, head.operation.readers
            producer.begin(lease, head.plan.encode(), readers=readers, window=window)
        except BaseException as error:
            lease.release()
            head.report(error)
            raise
        self._lease = lease

    @property
    def count(self) -> int:
        """The number of chunks that were appended."""
        return self._position.number

    def append(
        self,
        tensors: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        timeout: float = 10.0,
    ) -> int:
        """Copy the tensors of the next chunk and let the readers have it; return its number.

        The tensors are as the stream's spec says, of any length in the dimension that grows, and
        may be modified again when this returns. `metadata` is JSON, for this chunk alone. Blocks
        while a reader has not released the oldest of `window` chunks, memory is missing, or another
        thread appends.

        Raises:
            CapacityError: that took longer than `timeout` seconds; nothing was sent, try again.
            TransferTimeout: mapping memory or copying took longer; the same holds.
            SchemaError: the tensors are not as the spec says; nothing was sent.
            TransferFailed: the stream was aborted, or a reader rejected a chunk.
            ClosedError: the stream was committed or failed before.
        """
        return self._append_in_turn(tensors, metadata, None, timeout)

    def append_requests(
        self,
        requests: Mapping[str, int],
        tensors: Mapping[str, Any],
        *,
        ended: Iterable[str] = (),
        failed: Mapping[str, str] | None = None,
        timeout: float = 10.0,
    ) -> int:
        """Append what one step has computed for many requests; return the chunk's number.

        For an engine whose requests advance together, and have the same readers: one chunk carries
        what all of them have new, for the cost of one. A reader takes it apart with
        `ReceivedChunk.requests`. All else is as for `append`.

        Args:
            requests: for each request, in the order in which they lie in the tensors, its number of
                elements in the dimension that grows, such as its tokens; also 0.
            tensors: as the stream's spec says, the requests one behind the other.
            ended: requests that have no chunks after this one.
            failed: requests that failed, each with the reason: the others go on.
            timeout: seconds to wait, as for `append`.

        Raises:
            SchemaError: also if the sizes do not add up to that of each tensor, or a request id is
                no string of 1 to 1,024 characters; nothing was sent.
        """
        packed = PackedRequests.of(self._spec.dim, requests, ended, failed)
        return self._append_in_turn(tensors, None, packed, timeout)

    def commit(self) -> Receipt:
        """End the stream; its readers learn how many chunks there are. The block's end calls this.

        TransferFailed if the stream was aborted, or a reader rejected a chunk.
        """
        self._check_process()
        with self._appending, self._lock:
            if self.receipt is not None:
                return self.receipt
            lease, head = self._open_lease(), self._head
            self._lease = None
            with lease:
                views = self._spec.head(self._position.encode()).tensors()
                digests = head.operation.copier.gather(views, head.plan, lease.region)
                nbytes = head.ledger.nbytes
                self.receipt = head.publish(lease, digests)
                head.ledger.nbytes += nbytes
            return self.receipt

    def fail(self, reason: str) -> None:
        """Fail the stream: its readers raise TransferFailed with this reason; idempotent.

        An `append` that runs in another thread is waited for: it raises TransferFailed.
        """
        self._check_process()
        self._abort(reason)
        with self._appending:
            pass

    def __enter__(self) -> AppendStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: object
    ) -> None:
        if not self._process.is_current:
            return  # in a forked child, the block ends with its own error
        if error is not None:
            self.fail(f"after {self.count} chunks: {error!r}")
        else:
            self.commit()

    def __repr__(self) -> str:
        ended = "committed" if self.receipt is not None else "failed"
        state = ended if self._lease is None else "open"
        return f"<AppendStream {self.request_id!r}: {self.count} chunks, {state}>"

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is not None and self._process.is_current:
            reason = "its producer never committed it"
            self._head.operation.producer.abort(lease, reason, deferred=True)
            text = f"stream {self.request_id!r} was not committed"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _append_in_turn(
        self,
        tensors: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        requests: PackedRequests | None,
        timeout: float,
    ) -> int:
        self._check_process()
        limit = check_timeout(timeout)
        deadline = Deadline(limit)
        try:
            if not self._appending.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
                raise CapacityError(
                    f"stream {self.request_id!r}: another append did not end "
                    f"within {format_seconds(timeout)}"
                )
            return self._append(tensors, metadata, requests, deadline)
        finally:
            with contextlib.suppress(RuntimeError):  # another thread appends
                self._appending.release()

    def _append(
        self,
        tensors: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        requests: PackedRequests | None,
        deadline: Deadline,
    ) -> int:
        lease, head, started = self._open_lease(), self._head, time.perf_counter()
        try:
            chunk = self._spec.chunk(tensors, metadata, self._position, requests)
            of_head = head.operation
            parts = of_head.producer, of_head.copier, deadline, 1, float("inf"), of_head.digests
            operation = PutOperation(*parts)
            put = operation.prepare(chunk, stream=lease)
            operation.run([put])
            self._position = self._position.after(put.header)
        except (CapacityError, SchemaError, TransferTimeout):
            raise
        except BaseException as error:
            # Whether the chunk was sent is not known: an interrupt comes at any line.
            self._abort(f"chunk {self._position.number} was not appended: {error!r}")
            raise
        total, seconds = self.ledger, time.perf_counter() - started
        total.nbytes += put.ledger.nbytes
        total.copies |= put.ledger.copies
        total.seconds["append"] = total.seconds.get("append", 0.0) + seconds
        return self._position.number - 1

    def _abort(self, reason: str) -> None:
        with self._lock:
            lease, self._lease = self._lease, None
            if lease is not None:
                self._head.fail(lease, reason)

    def _check_process(self) -> None:
        self._process.check(f"stream {self.request_id!r}")

    def _open_lease(self) -> Lease:
        if self._lease is None:
            raise ClosedError(f"stream {self.request_id!r} was committed or failed before")
        return self._lease
