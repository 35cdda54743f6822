"""What a `get` gives: a cache that arrived, as views or copied out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from omni_kvlink.connectors.base import Delivery
from omni_kvlink.connectors.ledger import Ledger
from omni_kvlink.copier import Copier
from omni_kvlink.errors import ClosedError, SchemaError, WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.files import open_payload
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import TensorView, overlaps_itself

Payload: TypeAlias = KVCacheTransferData | KVCacheBundle
Verify: TypeAlias = Literal["auto", "full", "off"]


class Received:
    """A cache that arrived: `with` gives its data, and gives it back at the end.

    Attributes:
        data: readonly views of the link's memory.
        manifest: sizes, positions and digests.
        ledger: what the receipt of it cost on this side.
    """

    def __init__(
        self, data: Payload, delivery: Delivery, manifest: Manifest, ledger: Ledger, copier: Copier
    ):
        self.data = data
        self.manifest, self.ledger = manifest, ledger
        self._delivery, self._copier = delivery, copier

    @classmethod
    def open(
        cls, delivery: Delivery, copier: Copier, *, started: float, verify: Verify
    ) -> Received:
        """Check a delivery and make views of it; a bad one is rejected at its producer.

        Args:
            started: when the waiting began, on `time.perf_counter`'s clock.
        """
        ledger = Ledger()
        ledger.seconds["wait"] = time.perf_counter() - started
        try:
            check_verify(verify)
            with ledger.phase("view"):
                region = region_of(delivery)
                manifest = manifest_of(delivery.key, region.view(), region.nbytes)
                data = open_payload(manifest, region)
            ledger.nbytes, ledger.copies = manifest.nbytes, delivery.copies
            ledger.digests = "crc32c" if manifest.has_digests else "off"
            received = cls(data, delivery, manifest, ledger, copier)
            if verify == "full":
                received.verify()
        except BaseException as error:  # dropped in silence, it would count as read
            delivery.reject(str(error) or repr(error))
            raise
        return received

    def verify(self) -> None:
        """Check every byte against its digest, if there are digests.

        Raises:
            IntegrityError: these are not the bytes committed; the producer's receipt says so.
        """
        try:
            if self.manifest.has_digests:
                with self.ledger.phase("verify"):
                    self._copier.verify(self.manifest, region_of(self._delivery))
        except WireError as error:
            self._delivery.reject(str(error))
            raise

    def scatter(self, into: Payload | Sequence[TensorView]) -> None:
        """Copy everything out, each byte checked against its digest in the same pass.

        Args:
            into: tensors or pages of yours, in the order of `data.tensors()`; or a cache or
                bundle of yours that holds them, such as `PagedAdapter.export` makes of free blocks.

        Raises:
            SchemaError: a target is not what the payload is; nothing was written.
            IntegrityError: these are not the bytes committed; the targets are then worthless, and
                the producer's receipt says so.
        """
        places = into if isinstance(into, Sequence) else into.tensors()
        scatter(self._copier, self.manifest, self._delivery, places, self.ledger)

    def release(self) -> None:
        """Let go of the payload; tensors that are kept elsewhere keep its memory."""
        self.data.close()
        self._delivery.drop()

    def give_back(self) -> None:
        """Let go of a payload that was not used: it goes to another reader."""
        self.data.close()
        self._delivery.give_back()

    def __enter__(self) -> Payload:
        return self.data

    def __exit__(self, *exception: object) -> None:
        self.release()


def scatter(
    copier: Copier,
    manifest: Manifest,
    delivery: Delivery,
    places: Sequence[TensorView],
    ledger: Ledger,
) -> None:
    """Copy tensors of a delivery out; a wrong byte is the producer's to know, too."""
    started = time.perf_counter()
    _check_targets(manifest, region_of(delivery), places)
    try:
        copier.scatter(manifest, region_of(delivery), places)
    except WireError as error:
        delivery.reject(str(error))
        raise
    ledger.copies = delivery.copies + 1
    ledger.copier, ledger.instructions = copier.name, copier.features
    spent = ledger.seconds.get("scatter", 0.0)
    ledger.seconds["scatter"] = spent + time.perf_counter() - started


def _check_targets(manifest: Manifest, region: Region, places: Sequence[TensorView]) -> None:
    """Refuse what would be written twice, or lies in readonly memory: that ends a process."""
    taken: dict[tuple[torch.device, int], str] = {}
    for place, spec in zip(places, manifest.tensors, strict=False):
        memory = place.pool if isinstance(place, PagedTensor) else place
        if overlaps_itself(memory):
            raise SchemaError(f"{spec.where()}: a target with strides {memory.stride()} overlaps")
        if memory.is_cpu and region.address <= memory.data_ptr() < region.address + region.nbytes:
            raise SchemaError(f"{spec.where()}: the target lies in the payload itself")
        other = taken.setdefault((memory.device, memory.data_ptr()), spec.where())
        if other != spec.where():
            raise SchemaError(f"{spec.where()} has the same target as {other}")


def region_of(delivery: Delivery) -> Region:
    """Raises ClosedError if the payload was given back."""
    if delivery.region is None:
        raise ClosedError(
            f"payload {delivery.key!r} was given back; use it inside its `with` block"
        )
    return delivery.region


def manifest_of(key: str, header: bytes | memoryview, nbytes: int) -> Manifest:
    """The manifest of the payload that was asked for, and of no other."""
    manifest = Manifest.decode(header, nbytes)
    if manifest.request_id != key:
        raise WireError(f"asked for {key!r}, the payload says it is {manifest.request_id!r}")
    return manifest


def check_verify(verify: str) -> None:
    if verify not in ("auto", "full", "off"):
        raise ValueError(f"verify {verify!r}; wanted 'auto', 'full' or 'off'")
