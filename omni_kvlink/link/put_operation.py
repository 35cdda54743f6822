"""A payload on its way out: the one copy, the header, the commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from omni_kvlink.connectors.base import Producer, Receipt
from omni_kvlink.connectors.ledger import Ledger
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.copier import Copier, GatherHandle
from omni_kvlink.errors import SchemaError
from omni_kvlink.memory.region import Lease
from omni_kvlink.payload.branch import DTYPES
from omni_kvlink.payload.dtypes import dtype_name
from omni_kvlink.payload.manifest import Manifest, TensorSpec
from omni_kvlink.payload.views import TensorView

MAX_DIGITS = 80_000
"""Of one announcement, so that it fits into a message: 10,000 MiB."""
STEP = 8 << 20
"""Bytes of tensors after which a reader elsewhere first hears that there is something to fetch."""


class PutOperation:
    """How one payload is put: who carries it, where its tensors go, who may have it."""

    def __init__(
        self,
        producer: Producer,
        plan: Manifest,
        copier: Copier,
        ledger: Ledger,
        *,
        readers: int,
        ttl: float,
    ):
        self.producer, self.plan, self.ledger = producer, plan, ledger
        self._copier, self._readers, self._ttl = copier, readers, ttl

    @property
    def has_waiting_reader(self) -> bool:
        """Whether a reader could fetch the first tensors while the last are being copied."""
        plan = self.plan
        is_large = plan.nbytes > 2 * STEP
        return is_large and can_announce(plan) and self.producer.has_waiting_reader(plan.request_id)

    def now(self, lease: Lease, places: Sequence[TensorView], *, early: bool = False) -> Receipt:
        """Copy what is not in its place yet, and commit; early: bytes leave in the meantime."""
        with lease:
            fault_points.point("put.reserved")
            with self.ledger.phase("copy"):
                gather_into = self._land_in_steps if early else self.gather_into
                digests, copied = gather_into(lease, places, self.plan)
                self.ledger.copies = int(copied)
            fault_points.point("put.copied")
            return self.publish(lease, digests)

    def later(self, lease: Lease, places: Sequence[TensorView]) -> Receipt:
        """The same in a thread; what goes wrong there, the receipt says."""
        receipt = self.producer.receipt(lease, self.ledger)
        try:
            threading.Thread(target=self._try, args=(lease, places), daemon=True).start()
        except BaseException:
            lease.release()
            raise
        return receipt

    def begin(self, lease: Lease) -> None:
        """Announce it, before it is written."""
        self.producer.begin(lease, self.plan.encode(), readers=self._readers)

    def announce(self, lease: Lease, first: int, digests: Sequence[str]) -> None:
        """The tensors from number `first` on are in the payload."""
        if sum(map(len, digests)) <= MAX_DIGITS:
            self.producer.announce(lease, first, tuple(map(bytes.fromhex, digests)))
            return
        for tensor, digest in enumerate(digests, first):
            self.producer.announce(lease, tensor, (bytes.fromhex(digest),))

    def gather_into(
        self, lease: Lease, places: Sequence[TensorView], plan: Manifest
    ) -> tuple[list[str], bool]:
        """Bring tensors of the plan to their places; see `gather_into`."""
        return gather_into(self._copier, places, plan, lease)

    def begin_land(
        self, lease: Lease, places: Sequence[TensorView], plan: Manifest
    ) -> GatherHandle:
        """Begin to copy device tensors to their places."""
        return self._copier.begin_gather(places, plan, lease.region)

    def publish(self, lease: Lease, digests: Sequence[str], *, until: float = 0.0) -> Receipt:
        """Write the header, whose digests are known now, and commit; `until`: see `Producer`."""
        with self.ledger.phase("publish"):
            header = self.plan.with_digests(digests).encode()
            lease.region.view()[: len(header)] = header
            fault_points.point("put.encoded")
            self.ledger.nbytes = self.plan.nbytes
            return self.producer.publish(
                lease, readers=self._readers, ttl=self._ttl, ledger=self.ledger, until=until
            )

    def _land_in_steps(
        self, lease: Lease, places: Sequence[TensorView], plan: Manifest
    ) -> tuple[list[str], bool]:
        """The same as `gather_into`, telling readers of every step."""
        self.begin(lease)
        digests, copied = list[str](), False
        for step in steps(plan):
            part = places[step.start : step.stop]
            found, is_copied = self.gather_into(lease, part, plan.part(step))
            self.announce(lease, step.start, found)
            digests += found
            copied |= is_copied
        return digests, copied

    def _try(self, lease: Lease, places: Sequence[TensorView]) -> None:
        """Not `now`: it gives the lease back, and then nobody can say why."""
        with lease:
            try:
                digests, copied = self.gather_into(lease, places, self.plan)
                self.ledger.copies = int(copied)
                self.publish(lease, digests)
            except Exception as error:
                self.producer.give_up(lease, f"it could not be committed: {error!r}")


def can_announce(plan: Manifest) -> bool:
    """Whether the digests of each tensor fit into a message."""
    return all(len(spec.digest) <= MAX_DIGITS for spec in plan.tensors)


def steps(plan: Manifest) -> Iterator[range]:
    """The tensors in their order, as many at a time as make a step.

    Each is twice as long as the one before: copying is faster than sending, and words cost, too.
    """
    step, first, nbytes = STEP, 0, 0
    for number, spec in enumerate(plan.tensors):
        nbytes += spec.nbytes
        if nbytes >= step:
            yield range(first, number + 1)
            step, first, nbytes = 2 * step, number + 1, 0
    if first < len(plan.tensors):
        yield range(first, len(plan.tensors))


def gather_into(
    copier: Copier, places: Sequence[TensorView], plan: Manifest, lease: Lease
) -> tuple[list[str], bool]:
    """Bring tensors to their places in a payload; those that lie there already are not copied.

    Returns:
        The digest of each, and whether any was copied.

    Raises:
        SchemaError: a source is not what the plan says, or lies in another tensor's place.
    """
    if len(places) != len(plan.tensors):
        raise SchemaError(f"{len(places)} tensors, the plan has {len(plan.tensors)}")
    region, pairs = lease.region, list(zip(places, plan.tensors, strict=True))
    there = [_lies_at(place, spec, plan, lease) for place, spec in pairs]
    if not any(there):
        return copier.gather(places, plan, region), bool(places)
    digests = dict.fromkeys((spec.name for spec in plan.tensors), "")
    ready = [spec for spec, is_there in zip(plan.tensors, there, strict=True) if is_there]
    rest = [pair for pair, is_there in zip(pairs, there, strict=True) if not is_there]
    if rest:
        specs = [spec for _, spec in rest]
        found = copier.gather([place for place, _ in rest], plan.only(specs), region)
        digests.update(zip((spec.name for spec in specs), found, strict=True))
    if plan.has_digests:
        found = copier.digest(plan.only(ready), region)
        digests.update(zip((spec.name for spec in ready), found, strict=True))
    return list(digests.values()), bool(rest)


def _lies_at(place: TensorView, spec: TensorSpec, plan: Manifest, lease: Lease) -> bool:
    if not isinstance(place, torch.Tensor) or not place.is_cpu or place.is_neg():
        return False
    at = place.data_ptr() - lease.region.address
    if at == plan.header_nbytes + spec.start and place.is_contiguous():
        # Else it is nothing that the plan knows, and the copier says so.
        return tuple(place.shape) == spec.shape and DTYPES[dtype_name(place.dtype)] == spec.dtype
    if 0 <= at < lease.capacity:
        raise SchemaError(
            f"{spec.where()} lies in the payload's memory, but not contiguous at its own place"
        )
    return False
