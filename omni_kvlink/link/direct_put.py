"""`DirectPut`: sends a payload from the caller's tensors; its header lies in the link's memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import torch

from omni_kvlink.errors import SchemaError, TransferTimeout
from omni_kvlink.link.put_operation import CopiedPut, announcement_steps
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.tensor_memory import address_of
from omni_kvlink.payload.views import aliases, check_view_fits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.protocol.transfer import Ledger
    from omni_kvlink.link.put_operation import PutOperation
    from omni_kvlink.memory.region import Lease
    from omni_kvlink.payload.manifest import Manifest, TensorSpec
    from omni_kvlink.payload.views import TensorView


class DirectPut(CopiedPut):
    """A payload whose tensors are sent from where they lie; publishing it waits for its readers."""

    def __init__(
        self, operation: PutOperation, plan: Manifest, views: Sequence[TensorView], ledger: Ledger
    ):
        super().__init__(operation, plan, views, ledger)
        self._regions = self._find_regions()
        self.nbytes = self.draft = plan.header_nbytes

    def fill(self, lease: Lease) -> None:
        """Offer the tensors, and announce each once its digest is known; then write the header."""
        plan, producer = self.plan, self.operation.producer
        starts = [plan.header_nbytes + spec.start for spec in plan.tensors]
        producer.begin(
            lease,
            plan.encode(),
            readers=self.operation.readers,
            tensors=list(zip(starts, self._regions, strict=True)),
            nbytes=plan.nbytes,
        )
        started, digests = time.perf_counter(), list[str]()
        for step in announcement_steps(plan):
            new = [self._digest(plan.tensors[n], self._regions[n]) for n in step]
            self.announce(lease, step.start, new)
            digests += new
        self.ledger.seconds["digest"] = time.perf_counter() - started
        self.write_header(lease, digests)

    def _digest(self, spec: TensorSpec, tensor: Region) -> str:
        if not spec.digest:
            return ""
        alone = self.plan.only([msgspec.structs.replace(spec, start=0, stop=spec.nbytes)])
        payload = msgspec.structs.replace(alone, header_nbytes=0, nbytes=spec.nbytes)
        copier, deadline = self.operation.copier, self.operation.deadline
        try:
            return copier.digest(payload, tensor, deadline=deadline.work)[0]
        except TransferTimeout as error:
            raise deadline.passed(self.key, error.phase) from None

    def _find_regions(self) -> list[Region]:
        """Return the memory of the tensors, once all work queued on their devices is done."""
        if not self.can_announce:
            raise SchemaError("direct=True: a tensor is too long to be announced; leave it out")
        regions = list[Region]()
        for view, spec in zip(aliases(self.views), self.plan.tensors, strict=True):
            device = device_of(view)
            refusal = self._refusal(view, spec) or self.operation.producer.direct_refusal(device)
            if refusal:
                raise SchemaError(f"direct=True, {spec.where()}: {refusal}")
            assert isinstance(view, torch.Tensor)
            check_view_fits(view, spec)
            address = address_of(view, spec.where)
            regions.append(Region(address, spec.nbytes, view, device=device))
        for gpu in {view.device for view in self.views if view.device.type == "cuda"}:
            torch.cuda.current_stream(gpu).synchronize()
        return regions

    def _refusal(self, view: TensorView, spec: TensorSpec) -> str:
        """Return why a tensor cannot be sent as it lies, with the cure; "" if it can."""
        if not isinstance(view, torch.Tensor) or not view.is_contiguous() or view.is_neg():
            return "it does not lie in one piece; without direct=True it is copied into one"
        device, copier = device_of(view), self.operation.copier
        if spec.digest and device != "cpu" and not copier.uses_device_memory:
            cure = "use copier='pinned', or put it with digests=False"
            return f"copier {copier.name!r} computes no digests on {device}; {cure}"
        return ""


def device_of(view: TensorView) -> str:
    """Return the device as connectors name it, such as "cpu" or "cuda:0"."""
    return str(view.device)
