"""A payload that is sent from the caller's own tensors: no copy, and no memory but a header's."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch

from omni_kvlink.connectors.base import Receipt
from omni_kvlink.errors import SchemaError
from omni_kvlink.link.put_operation import PutOperation, can_announce, steps
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.manifest import TensorSpec
from omni_kvlink.payload.views import TensorView


class DirectPutOperation(PutOperation):
    """A rendezvous: it is over when every reader was sent the tensors."""

    def meet(self, places: Sequence[TensorView], *, timeout: float) -> Receipt:
        """Announce tensors as soon as they are digested; commit when nobody needs them any more.

        Raises:
            SchemaError: they cannot be sent as they lie; says what helps.
            TransferTimeout: not every reader took them in time.
        """
        until, plan = time.monotonic() + timeout, self.plan
        tensors = self._borrow(places)
        with self.ledger.phase("reserve"):
            header = plan.header_nbytes
            lease = self.producer.reserve(plan.request_id, header, timeout=timeout, draft=header)
        with lease:
            starts = [header + spec.start for spec in plan.tensors]
            self.producer.begin_direct(
                lease,
                plan.encode(),
                list(zip(starts, tensors, strict=True)),
                nbytes=plan.nbytes,
                readers=self._readers,
            )
            with self.ledger.phase("digest"):
                digests = list[str]()
                for step in steps(plan):
                    found = [self._digest(plan.tensors[n], tensors[n]) for n in step]
                    self.announce(lease, step.start, found)
                    digests += found
            return self.publish(lease, digests, until=until)

    def _digest(self, spec: TensorSpec, tensor: Region) -> str:
        if not spec.digest:
            return ""
        alone = msgspec.structs.replace(spec, start=0, stop=spec.nbytes)
        whole = self.plan.only([alone])
        whole = msgspec.structs.replace(whole, header_nbytes=0, nbytes=spec.nbytes)
        return self._copier.digest(whole, tensor)[0]

    def _borrow(self, places: Sequence[TensorView]) -> list[Region]:
        """The memory of tensors that can be sent as they lie, when their bytes are there."""
        if not can_announce(self.plan):
            raise SchemaError("direct=True: a tensor is too long to be announced; leave it out")
        regions = list[Region]()
        for place, spec in zip(places, self.plan.tensors, strict=True):
            device = device_of(place)
            why_not = _refusal(place, spec) or self.producer.refuses(device)
            if why_not:
                raise SchemaError(f"direct=True, {spec.where()}: {why_not}")
            assert isinstance(place, torch.Tensor)
            regions.append(Region(place.data_ptr(), spec.nbytes, place, device=device))
        for gpu in {place.device for place in places if place.device.type == "cuda"}:
            torch.cuda.current_stream(gpu).synchronize()
        return regions


def device_of(place: TensorView) -> str:
    return str(place.device)


def _refusal(place: TensorView, spec: TensorSpec) -> str:
    if not isinstance(place, torch.Tensor) or not place.is_contiguous() or place.is_neg():
        return "it does not lie in one piece; without direct=True it is copied into one"
    if spec.digest and device_of(place) != "cpu":
        return f"no digests are computed on {device_of(place)}; put it with digests=False"
    return ""
