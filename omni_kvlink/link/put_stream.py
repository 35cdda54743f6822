"""A payload that is sent while it is being made, layer by layer."""

from __future__ import annotations

import threading
import time
import warnings
from functools import partial
from types import TracebackType

from omni_kvlink.connectors.base import Receipt
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.errors import ClosedError, SchemaError
from omni_kvlink.link.gather_queue import GatherQueue
from omni_kvlink.link.put_operation import MAX_DIGITS, PutOperation, can_announce
from omni_kvlink.link.received import Payload
from omni_kvlink.memory.region import Lease
from omni_kvlink.payload.branch import Branch
from omni_kvlink.payload.views import TensorView


class PutStream:
    """A payload that is sent while it is being made; a context manager.

    Leaving the block commits it. An error in the block, or a layer that was not written, fails the
    transfer: its readers get TransferFailed, which names the layer.

    Attributes:
        manifest: the plan.
        receipt: what `commit` gave; None before.
        ledger: of the receipt; `copy` is the sum over all layers.
    """

    def __init__(self, sending: PutOperation, lease: Lease, lent: Payload | None):
        plan = self.manifest = sending.plan
        self.ledger = sending.ledger
        self.receipt: Receipt | None = None
        self._sending, self._lent = sending, lent
        self._missing = {(branch.name, layer): tensors for branch, layer, tensors in plan.layers()}
        self._digests = [spec.digest for spec in plan.tensors]
        self._lease: Lease | None = None
        if not can_announce(plan):
            lease.release()
            limit = MAX_DIGITS // 8
            raise SchemaError(f"a tensor of more than {limit} MiB cannot be streamed: put it")
        self._lock = threading.RLock()
        self._landings = GatherQueue(partial(_landed, self._digests, sending, lease))
        try:
            sending.begin(lease)
        except BaseException:
            lease.release()
            raise
        self._lease = lease

    def write_layer(
        self, layer: int, key: TensorView, value: TensorView | None = None, *, branch: str = ""
    ) -> None:
        """Copy one layer, and let its readers have it. Layers may come in any order.

        A host tensor is free again when this returns. A device tensor is copied behind what its
        stream holds now, while the engine computes on: it must stay as it is until `commit`.

        Args:
            key: `[tokens, kv_heads, head_dim]`; in layout "ND" the latent `[tokens, latent_dim]`.
            value: as `key`; None in layout "ND".
            branch: which cache of a bundle; may be left out of a single cache.

        Raises:
            SchemaError: not what the plan says, or written before; nothing was sent.
            TransferFailed: the transfer was ended by a reader, or aborted.
        """
        with self._lock:
            self._write(self._find(branch, layer), [key] if value is None else [key, value])

    def commit(self) -> Receipt:
        """The payload is whole. The block's end calls this.

        Raises:
            SchemaError: a layer is missing; the transfer has failed.
            TransferFailed: the transfer was ended by a reader, or aborted.
        """
        with self._lock:
            if self.receipt is None:
                self.receipt = self._commit()
            return self.receipt

    def fail(self, reason: str) -> None:
        """End it: whoever reads it gets TransferFailed with this reason."""
        with self._lock:  # a layer that is being written would land in another payload's memory
            lease = self._lease
            if lease is not None:
                self._end()
                self._sending.producer.give_up(lease, reason)

    def __enter__(self) -> PutStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None:
            self.commit()
        else:
            where = f"{self._first_missing()} was not written" if self._missing else "at its end"
            self.fail(f"{where}: {error!r}")

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is not None:
            self._landings.settle()  # else a late copy would land in another payload
            self._sending.producer.give_up(lease, "its producer forgot it", soon=True)
            name = self.manifest.request_id
            warnings.warn(f"stream {name!r} was not ended", ResourceWarning, stacklevel=2)

    def _write(self, where: tuple[str, int], places: list[TensorView]) -> None:
        lease, tensors = self._open_lease(), self._missing[where]
        part, started = self.manifest.part(tensors), time.perf_counter()
        fault_points.point("stream.layer")
        if any(map(is_on_device, places)):
            self._landings.add(tensors, self._sending.begin_land(lease, places, part))
            self.ledger.copies = 1
        else:
            digests, copied = self._sending.gather_into(lease, places, part)
            self.ledger.copies |= copied
            _landed(self._digests, self._sending, lease, tensors, digests)
        spent = self.ledger.seconds.get("copy", 0.0)
        self.ledger.seconds["copy"] = spent + time.perf_counter() - started
        del self._missing[where]

    def _commit(self) -> Receipt:
        lease = self._open_lease()
        if self._missing:
            self.fail(f"{self._first_missing()} was never written")
            raise SchemaError(
                f"payload {self.manifest.request_id!r}: {self._first_missing()} and "
                f"{len(self._missing) - 1} more were never written"
            )
        self._join()
        self._end()
        with lease:
            return self._sending.publish(lease, self._digests)

    def _join(self) -> None:
        try:
            self._landings.join()
        except BaseException as error:
            self.fail(f"a layer did not land: {error!r}")
            raise

    def _end(self) -> None:
        self._landings.close()
        self._lease = None
        if self._lent is not None:
            self._lent.close()

    def _open_lease(self) -> Lease:
        if self._lease is None:
            raise ClosedError(f"stream {self.manifest.request_id!r} has ended")
        return self._lease

    def _find(self, branch: str, layer: int) -> tuple[str, int]:
        name = branch or self.manifest.branches[0].name
        if not branch and self.manifest.bundle:
            raise SchemaError("which branch of the bundle? write_layer(…, branch=name)")
        if (name, layer) not in self._missing:
            known: list[Branch] = [b for b in self.manifest.branches if b.name == name]
            if known and known[0].carries_tensors and 0 <= layer < known[0].num_layers:
                raise SchemaError(f"layer {layer} of branch {name!r} was written already")
            raise SchemaError(f"the plan has no layer {layer} of branch {name!r}")
        return name, layer

    def _first_missing(self) -> str:
        branch, layer = next(iter(self._missing))
        return f"layer {layer} of branch {branch!r}"


def is_on_device(place: TensorView) -> bool:
    """Whether copying it can go on by itself."""
    return place.device.type != "cpu"


def _landed(
    kept: list[str], sending: PutOperation, lease: Lease, tensors: range, digests: list[str]
) -> None:
    """Tensors are in the payload: note their digests, and let readers have them."""
    kept[tensors.start : tensors.stop] = digests
    sending.announce(lease, tensors.start, digests)
