"""Methods to move or read a payload's bytes, each proven to do so before it is timed."""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from omni_kvlink.bench.payloads import BLOCK, Shape, Sources, make_sample
from omni_kvlink.bench.plain import PlainCopy
from omni_kvlink.copier import Copier, NativeCopier
from omni_kvlink.errors import IntegrityError
from omni_kvlink.memory.region import Mapping, Region
from omni_kvlink.payload.views import TensorView, dense, same_bytes, tensor_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.schema import KVCacheTransferData

    MakeMapping = Callable[[str, int], Mapping]


class CopyMethod(ABC):
    """One method to move or read all bytes; `key` is for JSON documents, `what` for people."""

    def __init__(self, key: str, what: str):
        self.key, self.what = key, what

    @abstractmethod
    def run(self) -> object:
        """Move or read all bytes; the result is dropped after the clock has stopped."""

    @abstractmethod
    def moves_all_bytes(self) -> bool:
        """Run on blank memory; whether all bytes are there afterwards."""

    def seconds(self) -> float:
        """Run once; the seconds that it took."""
        start = time.perf_counter()
        kept = self.run()
        seconds = time.perf_counter() - start
        del kept
        return seconds


class PlainCopyMethod(CopyMethod):
    """The baseline: a plain copy of as many bytes."""

    def __init__(self, nbytes: int):
        self._plain = PlainCopy(nbytes)
        super().__init__("plain_copy", self._plain.name)

    def run(self) -> None:
        """Move all bytes once."""
        self._plain.copy()

    def moves_all_bytes(self) -> bool:
        """Run on blank memory, and compare."""
        self._plain.target.fill(0)
        self.run()
        return np.array_equal(self._plain.source, self._plain.target)


class TorchCopyMethod(CopyMethod):
    """`Tensor.copy_`, tensor by tensor."""

    def __init__(self, key: str, what: str, sources: Sequence[torch.Tensor]):
        super().__init__(key, what)
        self._sources = sources
        self._targets = [torch.zeros_like(source) for source in sources]

    def run(self) -> None:
        """Move all bytes once."""
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)

    def moves_all_bytes(self) -> bool:
        """Run on blank memory, and compare."""
        _blank(self._targets)
        self.run()
        return all(map(same_bytes, self._sources, self._targets))


class StagedPayload:
    """A payload's plan, the memory of its bytes, and the tensors that they are copied from."""

    def __init__(self, sources: Sequence[TensorView], manifest: Manifest, region: Region):
        self.sources, self.manifest, self.region = sources, manifest, region

    @classmethod
    def of(cls, cache: KVCacheTransferData) -> StagedPayload:
        """Plan a cache, with digests, in shared memory of its own."""
        plan = cache.plan()
        return cls(cache.tensors(), plan, Mapping.shared("kvlink-bench", plan.nbytes).region)

    def tensors(self) -> list[torch.Tensor]:
        """Views of the memory."""
        specs, at = self.manifest.tensors, self.manifest.header_nbytes
        return [tensor_view(self.region, spec, at) for spec in specs]

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors have the bytes of the sources."""
        return all(same_bytes(dense(s), t) for s, t in zip(self.sources, tensors, strict=True))

    def commit(self, copier: Copier) -> None:
        """Copy the bytes, and add their digests to the plan."""
        digests = copier.gather(self.sources, self.manifest, self.region)
        self.manifest = self.manifest.with_digests(digests)


class CopierMethod(CopyMethod):
    """A method of a copier, on a payload."""

    def __init__(self, key: str, what: str, copier: Copier, payload: StagedPayload):
        super().__init__(key, what)
        self._copier, self._payload = copier, payload


class GatherMethod(CopierMethod):
    """The copy of a `put`, into memory that was used before."""

    def run(self) -> object:
        """Copy into the payload's memory."""
        one = self._payload
        return self._copier.gather(one.sources, one.manifest, one.region)

    def moves_all_bytes(self) -> bool:
        """Run on blank memory, and compare."""
        _blank(self._payload.tensors())
        self.run()
        return self._payload.holds(self._payload.tensors())


class ScatterMethod(CopierMethod):
    """The copy out of a payload into tensors, digests checked on the way."""

    def __init__(self, key: str, what: str, copier: Copier, payload: StagedPayload):
        super().__init__(key, what, copier, payload)
        self._targets = [torch.zeros_like(tensor) for tensor in payload.tensors()]

    def run(self) -> None:
        """Copy out of the payload."""
        self._copier.scatter(self._payload.manifest, self._payload.region, self._targets)

    def moves_all_bytes(self) -> bool:
        """Run on blank memory, and compare."""
        _blank(self._targets)
        self.run()
        return self._payload.holds(self._targets)


class VerifyMethod(CopierMethod):
    """Reads all bytes and compares digests."""

    def run(self) -> None:
        """Read all bytes once."""
        self._copier.verify(self._payload.manifest, self._payload.region)

    def moves_all_bytes(self) -> bool:
        """Whether it reads to the end: it must see one bit of the last byte."""
        self.run()
        last = self._payload.tensors()[-1].view(torch.uint8).view(-1)
        last[-1] ^= 1
        try:
            self.run()
        except IntegrityError:
            return True
        finally:
            last[-1] ^= 1
        return False


class FirstTouchMethod(CopierMethod):
    """A gather into new memory, whose making is timed too; unmapping it is not."""

    def __init__(
        self, key: str, what: str, copier: Copier, payload: StagedPayload, make: MakeMapping
    ):
        super().__init__(key, what, copier, payload)
        self._make = make

    def run(self) -> Mapping:
        """Copy into new memory."""
        one = self._payload
        mapping = self._make("kvlink-bench", one.region.nbytes)
        self._copier.gather(one.sources, one.manifest, mapping.region)
        return mapping

    def moves_all_bytes(self) -> bool:
        """Run, and compare."""
        one, mapping = self._payload, self.run()
        return one.holds(StagedPayload(one.sources, one.manifest, mapping.region).tensors())


def make_copy_methods(shape: Shape, *, threads: int) -> list[CopyMethod]:
    """Every method; the first is the baseline.

    About ten times the bytes of the shape are allocated; `threads` are torch's, for the text.
    """
    cores = len(os.sched_getaffinity(0))
    one, auto, all_cores = NativeCopier(threads=1), NativeCopier(), NativeCopier(threads=cores)
    cache = _cache(shape, "contiguous")
    payload, committed = StagedPayload.of(cache), StagedPayload.of(cache)
    paged = StagedPayload.of(_cache(shape, "paged"))
    without = cache.plan(digests=False)
    bare = StagedPayload(payload.sources, without, payload.region)  # the same warm memory
    committed.commit(one)
    tensors = [dense(source) for source in payload.sources]
    return [
        PlainCopyMethod(shape.nbytes),
        TorchCopyMethod("torch_copy", f"Tensor.copy_, torch threads {threads}", tensors),
        GatherMethod("gather_bare", "a put's copy, no digests", one, bare),
        GatherMethod("gather", "the same with digests", one, payload),
        GatherMethod("gather_auto_bare", "as many threads as a put takes", auto, bare),
        GatherMethod("gather_auto", "the same with digests", auto, payload),
        GatherMethod(
            "gather_all_cores", f"a thread on each of {cores} cores, digests", all_cores, payload
        ),
        GatherMethod("gather_paged", f"random blocks of {BLOCK}, digests", one, paged),
        ScatterMethod("scatter", "out of a payload, digests checked", one, committed),
        VerifyMethod("verify", "only read, digests checked", one, committed),
        FirstTouchMethod("first_touch", "gather into a new memory file", one, payload, _untouched),
        FirstTouchMethod("populated", "the same, populated before", one, payload, Mapping.shared),
    ]


def _cache(shape: Shape, sources: Sources) -> KVCacheTransferData:
    return make_sample("copy", shape, np.random.default_rng(0), sources=sources).cache


def _untouched(name: str, nbytes: int) -> Mapping:
    """Make a memory file without pages: each is made when the copy reaches it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return Mapping(mmap.mmap(fd, nbytes), nbytes, fd=fd)


def _blank(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).zero_()
