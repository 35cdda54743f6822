"""The ways to move or read a payload's bytes, each proven to do so before it is timed."""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from omni_kvlink.bench.payloads import BLOCK, Shape, Sources, make_sample
from omni_kvlink.bench.plain import PlainCopy
from omni_kvlink.copier import Copier, NativeCopier
from omni_kvlink.errors import IntegrityError
from omni_kvlink.memory.region import Mapping, Region
from omni_kvlink.payload.dtypes import tensor_view
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.schema import KVCacheTransferData, same_bytes
from omni_kvlink.payload.views import TensorView, dense


class Way(ABC):
    """One way.

    Attributes:
        key: its name in documents.
        what: for people.
    """

    def __init__(self, key: str, what: str):
        self.key, self.what = key, what

    @abstractmethod
    def run(self) -> object:
        """Once through all bytes. What it returns is dropped when the clock has stopped."""

    @abstractmethod
    def is_true(self) -> bool:
        """Run on blank memory, and look whether all bytes are there."""

    def seconds(self) -> float:
        start = time.perf_counter()
        kept = self.run()
        took = time.perf_counter() - start
        del kept
        return took


class Plain(Way):
    """The yardstick."""

    def __init__(self, nbytes: int):
        self._plain = PlainCopy(nbytes)
        super().__init__("plain_copy", self._plain.name)

    def run(self) -> object:
        self._plain.copy()
        return None

    def is_true(self) -> bool:
        self._plain.target.fill(0)
        self.run()
        return np.array_equal(self._plain.source, self._plain.target)


class TorchCopy(Way):
    """`Tensor.copy_`, tensor by tensor."""

    def __init__(self, key: str, what: str, sources: Sequence[torch.Tensor]):
        super().__init__(key, what)
        self._sources = sources
        self._targets = [torch.zeros_like(source) for source in sources]

    def run(self) -> object:
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)
        return None

    def is_true(self) -> bool:
        _blank(self._targets)
        self.run()
        return all(map(same_bytes, self._sources, self._targets))


class Payload:
    """A plan, its memory, and the tensors it is made of."""

    def __init__(self, sources: Sequence[TensorView], manifest: Manifest, region: Region):
        self.sources, self.manifest, self.region = sources, manifest, region

    @classmethod
    def of(cls, cache: KVCacheTransferData) -> Payload:
        """In shared memory of its own, with digests."""
        plan = cache.plan()
        return cls(cache.tensors(), plan, Mapping.shared("kvlink-bench", plan.nbytes).region)

    def tensors(self) -> list[torch.Tensor]:
        """What lies in the memory now."""
        specs, at = self.manifest.tensors, self.manifest.header_nbytes
        return [tensor_view(self.region, spec, at) for spec in specs]

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the source's bytes."""
        return all(same_bytes(dense(s), t) for s, t in zip(self.sources, tensors, strict=True))

    def commit(self, copier: Copier) -> None:
        """Bring the bytes, and note their digests."""
        digests = copier.gather(self.sources, self.manifest, self.region)
        self.manifest = self.manifest.with_digests(digests)


class Gather(Way):
    """The copy of a `put`, into memory that was used before."""

    def __init__(self, key: str, what: str, copier: Copier, payload: Payload):
        super().__init__(key, what)
        self._copier, self._payload = copier, payload

    def run(self) -> object:
        one = self._payload
        return self._copier.gather(one.sources, one.manifest, one.region)

    def is_true(self) -> bool:
        _blank(self._payload.tensors())
        self.run()
        return self._payload.holds(self._payload.tensors())


class Scatter(Way):
    """Out of a payload into tensors, digests checked on the way."""

    def __init__(self, key: str, what: str, copier: Copier, payload: Payload):
        super().__init__(key, what)
        self._copier, self._payload = copier, payload
        self._targets = [torch.zeros_like(tensor) for tensor in payload.tensors()]

    def run(self) -> object:
        one = self._payload
        self._copier.scatter(one.manifest, one.region, self._targets)
        return None

    def is_true(self) -> bool:
        _blank(self._targets)
        self.run()
        return self._payload.holds(self._targets)


class Verify(Way):
    """Reads all bytes and compares digests."""

    def __init__(self, key: str, what: str, copier: Copier, payload: Payload):
        super().__init__(key, what)
        self._copier, self._payload = copier, payload

    def run(self) -> object:
        self._copier.verify(self._payload.manifest, self._payload.region)
        return None

    def is_true(self) -> bool:
        """Reads to the end: sees one bit of the last byte."""
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


class FirstTouch(Way):
    """A gather into memory nobody has used, whose making is timed too, its end not."""

    def __init__(
        self,
        key: str,
        what: str,
        copier: Copier,
        payload: Payload,
        make: Callable[[str, int], Mapping],
    ):
        super().__init__(key, what)
        self._copier, self._payload, self._make = copier, payload, make

    def run(self) -> Mapping:
        one = self._payload
        mapping = self._make("kvlink-bench", one.region.nbytes)
        self._copier.gather(one.sources, one.manifest, mapping.region)
        return mapping

    def is_true(self) -> bool:
        one, mapping = self._payload, self.run()
        return one.holds(Payload(one.sources, one.manifest, mapping.region).tensors())


def make_ways(shape: Shape, *, threads: int) -> list[Way]:
    """All of them; the first is the yardstick.

    Args:
        threads: of torch, to be told to the reader.

    Raises:
        NativeError: there is no compiled library.
        CapacityError: about ten times the payload do not fit into memory.
    """
    cores = len(os.sched_getaffinity(0))
    one, auto, all_cores = NativeCopier(threads=1), NativeCopier(), NativeCopier(threads=cores)
    cache = _cache(shape, "contiguous")
    payload, committed = Payload.of(cache), Payload.of(cache)
    paged = Payload.of(_cache(shape, "paged"))
    bare = Payload(payload.sources, cache.plan(digests=False), payload.region)  # as warm as that
    committed.commit(one)
    tensors = [dense(source) for source in payload.sources]
    return [
        Plain(shape.nbytes),
        TorchCopy("torch_copy", f"Tensor.copy_, torch threads {threads}", tensors),
        Gather("gather_bare", "a put's copy, no digests", one, bare),
        Gather("gather", "the same with digests", one, payload),
        Gather("gather_auto_bare", "as many threads as a put takes", auto, bare),
        Gather("gather_auto", "the same with digests", auto, payload),
        Gather(
            "gather_all_cores", f"a thread on each of {cores} cores, digests", all_cores, payload
        ),
        Gather("gather_paged", f"random blocks of {BLOCK}, digests", one, paged),
        Scatter("scatter", "out of a payload, digests checked", one, committed),
        Verify("verify", "only read, digests checked", one, committed),
        FirstTouch("first_touch", "gather into a new memory file", one, payload, _untouched),
        FirstTouch("populated", "the same, populated before", one, payload, Mapping.shared),
    ]


def _cache(shape: Shape, sources: Sources) -> KVCacheTransferData:
    return make_sample("copy", shape, np.random.default_rng(0), sources=sources).cache


def _untouched(name: str, nbytes: int) -> Mapping:
    """A memory file as it comes: each page is made when the copy reaches it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return Mapping(mmap.mmap(fd, nbytes), nbytes, fd=fd)


def _blank(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).zero_()
