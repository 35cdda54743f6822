"""`PutStream`: a cache that is sent while it is being computed, layer by layer."""

from __future__ import annotations

import threading
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.errors import ClosedError, SchemaError
from omni_kvlink.link.end_metadata import encode_extra
from omni_kvlink.link.gather_queue import GatherQueue
from omni_kvlink.payload.views import check_view
from omni_kvlink.system import process
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.copier import StreamEvents
    from omni_kvlink.link.put_operation import CopiedPut
    from omni_kvlink.memory.region import Lease
    from omni_kvlink.payload.views import TensorView


class PutStream:
    """A cache that is sent while it is being computed; a context manager; thread-safe.

    Leaving the block commits it. An exception in the block, or a layer that was not written, fails
    the transfer: its readers raise TransferFailed, which names the layer. `receipt` is None before
    `commit`; in the `ledger`, `copy` is the sum over all layers.
    """

    def __init__(self, put: CopiedPut, lease: Lease):
        plan = self.manifest = put.plan
        self.ledger = put.ledger
        self.receipt: Receipt | None = None
        self._put = put
        self._missing = {(branch.name, layer): tensors for branch, layer, tensors in plan.layers()}
        self._digests = [spec.digest for spec in plan.tensors]
        self._lease: Lease | None = None
        self._process = process.current
        self._lock = threading.RLock()
        digests = self._digests  # the queue must not keep the stream, whose finalizer fails it

        def on_gathered(tensors: range, new: list[str]) -> None:
            digests[tensors.start : tensors.stop] = new
            put.announce(lease, tensors.start, new)

        self._on_gathered = on_gathered
        self._queue = GatherQueue(on_gathered)
        try:
            if not put.can_announce:
                raise SchemaError("a tensor of more than 10,000 MiB cannot be streamed: put it")
            put.begin(lease)
        except BaseException as error:
            lease.release()
            put.report(error)
            raise
        self._lease = lease

    def write_layer(
        self,
        layer: int,
        key: TensorView,
        value: TensorView | None = None,
        *,
        branch: str = "",
        after: StreamEvents | None = None,
    ) -> None:
        """Copy one layer and let the readers have it. Layers may come in any order.

        `layer` counts from 0. `key` and `value` are `[tokens, kv_heads, head_dim]`; in layout "ND",
        `key` alone is the latent `[tokens, latent_dim]`. `branch` names a cache of a bundle. A host
        tensor may be modified again when this returns. A device tensor is copied behind the work
        that the calling thread's current stream holds now, or behind `after`, which
        `KVProducer.record` returned for it, while the engine computes on: leave it until `commit`.

        SchemaError if it is not what the plan says, or was written before; nothing was sent then.
        TransferFailed if a reader ended or aborted the transfer.
        """
        self._check_process()
        with self._lock:
            lease, layer_key = self._open_lease(), self._find(branch, layer)
            tensors, started = self._missing[layer_key], time.perf_counter()
            part = self.manifest.part(tensors)
            given = [key] if value is None else [key, value]
            views = [check_view(view, f"layer {layer}") for view in given]
            fault_points.point("stream.layer")
            copied = self._put.copy_layer(lease, views, part, after)
            if isinstance(copied, list):
                self._on_gathered(tensors, copied)
            else:
                self._queue.add(tensors, copied)
            spent = self.ledger.seconds.get("copy", 0.0)
            self.ledger.seconds["copy"] = spent + time.perf_counter() - started
            del self._missing[layer_key]
            if observers.registered:
                producer = self._put.operation.producer
                observers.layer(producer, "written", started, layer_key, self.manifest)

    def commit(self) -> Receipt:
        """`finish` without metadata, unless that was called. The end of the block calls this."""
        self._check_process()
        with self._lock:
            return self.finish() if self.receipt is None else self.receipt

    def finish(self, extra: Mapping[str, Any] | None = None) -> Receipt:
        """Commit the payload, once every copy has ended, with the metadata that is known now.

        `extra` is a JSON object of at most 4,096 bytes, such as a first token and a reason to
        stop; every reader has it at its end, as `ReceivedStream.extra`.

        SchemaError if a layer is missing, or `extra` is no such object; the stream goes on then.
        TransferFailed if a reader ended or aborted the transfer. ClosedError if it was committed.
        """
        self._check_process()
        with self._lock:
            lease, about_end = self._open_lease(), encode_extra(extra)
            if self._missing:
                text, more = f"{self._first_missing()} was never written", len(self._missing) - 1
                self.fail(text)
                others = f", nor {more} others" if more else ""
                raise SchemaError(f"payload {self.manifest.request_id!r}: {text}{others}")
            try:
                self._queue.join()
            except BaseException as error:
                self.fail(f"a layer could not be copied: {error!r}")
                raise
            self._close()
            with lease:
                self.receipt = self._put.publish(lease, self._digests, about_end)
            return self.receipt

    def fail(self, reason: str) -> None:
        """Fail the transfer: its readers raise TransferFailed with this reason."""
        self._check_process()
        with self._lock:  # no layer is being written, so none lands in another payload's memory
            lease = self._lease
            if lease is not None:
                self._close()
                self._put.fail(lease, reason)

    def __enter__(self) -> PutStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: object
    ) -> None:
        if error is None:
            self.commit()
        elif self._process.is_current:  # in a forked child, the block ends with its own error
            where = f"{self._first_missing()} was not written" if self._missing else "at its end"
            self.fail(f"{where}: {error!r}")

    def __repr__(self) -> str:
        ended = "committed" if self.receipt is not None else "failed"
        state = ended if self._lease is None else f"{len(self._missing)} layers missing"
        return f"<PutStream {self.manifest.request_id!r}: {state}>"

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is not None and self._process.is_current:
            reason = "its producer never committed it"
            abort = partial(self._put.operation.producer.abort, lease, reason, deferred=True)
            self._queue.call_when_drained(abort)  # a late copy must not land in another payload
            name = self.manifest.request_id
            warnings.warn(f"stream {name!r} was not committed", ResourceWarning, stacklevel=2)

    def _check_process(self) -> None:
        self._process.check(f"stream {self.manifest.request_id!r}")

    def _close(self) -> None:
        self._queue.close()
        self._lease = None
        if self._put.allocation is not None:
            self._put.allocation.data.close()

    def _open_lease(self) -> Lease:
        if self._lease is None:
            raise ClosedError(f"stream {self.manifest.request_id!r} was committed or failed before")
        return self._lease

    def _find(self, branch: str, layer: int) -> tuple[str, int]:
        name = branch or self.manifest.branches[0].name
        if not branch and self.manifest.bundle:
            raise SchemaError("which branch of the bundle? write_layer(…, branch=name)")
        if (name, layer) not in self._missing:
            planned = {(each.name, number) for each, number, _ in self.manifest.layers()}
            if (name, layer) in planned:
                raise SchemaError(f"layer {layer} of branch {name!r} was written already")
            raise SchemaError(f"the plan has no layer {layer!r} of branch {name!r}")
        return name, layer

    def _first_missing(self) -> str:
        branch, layer = next(iter(self._missing))
        return f"layer {layer} of branch {branch!r}"
