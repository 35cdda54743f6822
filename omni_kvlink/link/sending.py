"""A payload on its way out: the one copy, the header, the commit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch

from .. import _faults
from ..connectors.base import Producer, Receipt
from ..copier import Copier
from ..errors import ClosedError, SchemaError
from ..ledger import Ledger
from ..memory import Lease, Region
from ..places import Place
from ..wire import Manifest, TensorSpec


class Sending:
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
        self._producer, self._plan, self._copier = producer, plan, copier
        self._ledger, self._readers, self._ttl = ledger, readers, ttl

    def now(self, lease: Lease, places: Sequence[Place]) -> Receipt:
        """Copy what is not in its place yet, and commit."""
        with lease:
            _faults.point("put.reserved")
            with self._ledger.phase("copy"):
                digests, copied = land(self._copier, places, self._plan, lease.region)
                self._ledger.copies = int(copied)
            _faults.point("put.copied")
            return self.publish(lease, digests)

    def later(self, lease: Lease, places: Sequence[Place]) -> Receipt:
        """The same in a thread; what goes wrong there, the receipt says."""
        receipt = self._producer.receipt(lease, self._ledger)
        threading.Thread(target=self._try, args=(lease, places), daemon=True).start()
        return receipt

    def begin(self, lease: Lease) -> None:
        """Announce it, before it is written."""
        self._producer.begin(lease, self._plan.encode(), readers=self._readers)

    def publish(self, lease: Lease, digests: Sequence[str]) -> Receipt:
        """Write the header, whose digests are known now, and commit."""
        with self._ledger.phase("publish"):
            header = self._plan.with_digests(digests).encode()
            lease.region.view()[: len(header)] = header
            _faults.point("put.encoded")
            self._ledger.nbytes = self._plan.nbytes
            return self._producer.publish(
                lease, readers=self._readers, ttl=self._ttl, ledger=self._ledger
            )

    def _try(self, lease: Lease, places: Sequence[Place]) -> None:
        try:
            self.now(lease, places)
        except Exception as error:
            with contextlib.suppress(ClosedError):  # then every receipt says so
                self._producer.fail(self._plan.request_id, f"it could not be committed: {error!r}")


def land(
    copier: Copier, places: Sequence[Place], plan: Manifest, region: Region
) -> tuple[list[str], bool]:
    """Bring tensors to their places in a payload; those that lie there already are not copied.

    Returns:
        The digest of each, and whether any was copied.

    Raises:
        SchemaError: a source is not what the plan says, or lies in another tensor's place.
    """
    if len(places) != len(plan.tensors):
        raise SchemaError(f"{len(places)} tensors, the plan has {len(plan.tensors)}")
    pairs = list(zip(places, plan.tensors, strict=True))
    there = [_lies_at(place, spec, plan, region) for place, spec in pairs]
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


def _lies_at(place: Place, spec: TensorSpec, plan: Manifest, region: Region) -> bool:
    if not isinstance(place, torch.Tensor) or not place.is_cpu or place.is_neg():
        return False
    at = place.data_ptr() - region.address
    if at == plan.header_nbytes + spec.start and place.is_contiguous():
        return tuple(place.shape) == spec.shape
    if 0 <= at < region.nbytes:
        raise SchemaError(
            f"{spec.where()} lies in the payload's memory, but not contiguous at its own place"
        )
    return False
