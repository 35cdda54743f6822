"""The commit word of a slot: set after the payload is written, for its own epoch only."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVLink, KVProducer
from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.protocol.messages import SLOT, holds
from omni_kvlink.connectors.registry import backend
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.region import Region
from omni_kvlink.testing.caches import Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView

pytestmark = pytest.mark.usefixtures("leaves_nothing")
_numbers = itertools.count()


class Watching(TorchCopier):
    """A copier that records whether any epoch was committed while the payload was written."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.slots: list[Region] = []

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        slot = Region(region.address - SLOT, SLOT + region.nbytes, region.owner)
        self.seen += [holds(slot, epoch, manifest.nbytes, committed=True) for epoch in range(20)]
        self.slots.append(slot)
        return super().gather(sources, manifest, region, **options)


def test_commit_word_comes_last() -> None:
    """Also in a slot that was used before, by a payload of the same size."""
    url, copier = f"slots-{next(_numbers)}", Watching()
    end = backend("inproc").serve(url, Options(quota=1 << 20, inline=0))
    with (
        KVProducer(f"inproc://{url}", end, copier=copier, digests=True) as producer,
        KVLink.connect(f"inproc://{url}", timeout=1) as reader,
    ):
        for turn in range(5):
            receipt = producer.put(Recipe("k", seed=turn).make())
            nbytes = receipt.ledger.nbytes
            slot = copier.slots.pop()
            committed = [epoch for epoch in range(20) if holds(slot, epoch, nbytes, committed=True)]
            assert len(committed) == 1
            assert not holds(slot, committed[0], nbytes + 1, committed=False)
            with reader.get("k", timeout=60):
                pass
            receipt.wait(timeout=60)
        assert not any(copier.seen)
