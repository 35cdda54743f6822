"""The limits of this machine's memory: methods to copy as many bytes, timed in turn."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import random
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omni_kvlink._native import host
from omni_kvlink.bench.machine import torch_threads
from omni_kvlink.bench.payloads import Sources, make_sample
from omni_kvlink.bench.report import BenchError, Progress, progress, table, wrapped
from omni_kvlink.bench.setups import BLOCK, CopySetup, Shape
from omni_kvlink.bench.stats import Timings
from omni_kvlink.copier import Copier, NativeCopier
from omni_kvlink.errors import IntegrityError
from omni_kvlink.memory.region import Mapping, Region
from omni_kvlink.payload.views import TensorView, dense, same_bytes, tensor_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.schema import KVCacheTransferData

    MakeMapping = Callable[[str, int], Mapping]

PLAIN = "plain_copy"


class CopyMethod(ABC):
    """One method to move or read all bytes; `key` names it in JSON, `text` for people."""

    def __init__(self, key: str, text: str):
        self.key, self.text = key, text

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


class PlainCopy(CopyMethod):
    """The plain copy, with which all is compared: one thread, two warm buffers of `nbytes` bytes.

    It is the fastest of three methods, chosen once on this machine; `text` names it.
    """

    def __init__(self, nbytes: int):
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        methods = {
            "numpy.copyto": self._copyto,
            "memmove": self._memmove,
            "numpy.copyto in steps of 512 KiB": self._steps,
        }
        best = {}
        for name, self._copy in methods.items():
            best[name] = min(self.seconds() for _ in range(3))
        super().__init__("plain_copy", min(best, key=lambda name: best[name]))
        self._copy = methods[self.text]

    def run(self) -> None:
        """Copy once."""
        self._copy()

    def moves_all_bytes(self) -> bool:
        """Run on blank memory, and compare."""
        self._target.fill(0)
        self.run()
        return np.array_equal(self._source, self._target)

    def _copyto(self) -> None:
        np.copyto(self._target, self._source)

    def _memmove(self) -> None:
        ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, self._source.nbytes)

    def _steps(self) -> None:
        step = 512 << 10
        for start in range(0, len(self._source), step):
            np.copyto(self._target[start : start + step], self._source[start : start + step])


class _TorchCopyMethod(CopyMethod):
    """`Tensor.copy_`, tensor by tensor."""

    def __init__(self, key: str, text: str, sources: Sequence[torch.Tensor]):
        super().__init__(key, text)
        self._sources = sources
        self._targets = [torch.zeros_like(source) for source in sources]

    def run(self) -> None:
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)

    def moves_all_bytes(self) -> bool:
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
        specs, base = self.manifest.tensors, self.manifest.header_nbytes
        return [tensor_view(self.region, spec, base) for spec in specs]

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors have the bytes of the sources."""
        return all(same_bytes(dense(s), t) for s, t in zip(self.sources, tensors, strict=True))

    def commit(self, copier: Copier) -> None:
        """Copy the bytes, and add their digests to the plan."""
        digests = copier.gather(self.sources, self.manifest, self.region)
        self.manifest = self.manifest.with_digests(digests)


class _CopierMethod(CopyMethod):
    """A method of a copier, on a payload."""

    def __init__(self, key: str, text: str, copier: Copier, payload: StagedPayload):
        super().__init__(key, text)
        self._copier, self._payload = copier, payload


class _GatherMethod(_CopierMethod):
    """The copy of a `put`, into memory that was used before."""

    def run(self) -> object:
        payload = self._payload
        return self._copier.gather(payload.sources, payload.manifest, payload.region)

    def moves_all_bytes(self) -> bool:
        _blank(self._payload.tensors())
        self.run()
        return self._payload.holds(self._payload.tensors())


class _ScatterMethod(_CopierMethod):
    """The copy out of a payload into tensors, digests checked on the way."""

    def __init__(self, key: str, text: str, copier: Copier, payload: StagedPayload):
        super().__init__(key, text, copier, payload)
        self._targets = [torch.zeros_like(tensor) for tensor in payload.tensors()]

    def run(self) -> None:
        self._copier.scatter(self._payload.manifest, self._payload.region, self._targets)

    def moves_all_bytes(self) -> bool:
        _blank(self._targets)
        self.run()
        return self._payload.holds(self._targets)


class _VerifyMethod(_CopierMethod):
    """Reads all bytes and compares digests."""

    def run(self) -> None:
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


class FirstTouchMethod(_CopierMethod):
    """A gather into new memory, whose making is timed too; unmapping it is not."""

    def __init__(
        self, key: str, text: str, copier: Copier, payload: StagedPayload, make: MakeMapping
    ):
        super().__init__(key, text, copier, payload)
        self._make = make

    def run(self) -> Mapping:
        """Copy into new memory."""
        payload = self._payload
        mapping = self._make("kvlink-bench", payload.region.nbytes)
        self._copier.gather(payload.sources, payload.manifest, mapping.region)
        return mapping

    def moves_all_bytes(self) -> bool:
        """Run, and compare."""
        payload, mapping = self._payload, self.run()
        copied = StagedPayload(payload.sources, payload.manifest, mapping.region)
        return payload.holds(copied.tensors())


def make_copy_methods(shape: Shape, *, threads: int) -> list[CopyMethod]:
    """Every method; the first is the baseline.

    About ten times the bytes of the shape are allocated; `threads` are torch's, for the text.
    """
    cores = len(os.sched_getaffinity(0))
    single, auto, all_cores = NativeCopier(threads=1), NativeCopier(), NativeCopier(threads=cores)
    cache = _cache(shape, "contiguous")
    payload, committed = StagedPayload.of(cache), StagedPayload.of(cache)
    paged = StagedPayload.of(_cache(shape, "paged"))
    bare_plan = cache.plan(digests=False)
    bare = StagedPayload(payload.sources, bare_plan, payload.region)  # the same warm memory
    committed.commit(single)
    tensors = [dense(source) for source in payload.sources]
    return [
        PlainCopy(shape.nbytes),
        _TorchCopyMethod("torch_copy", f"Tensor.copy_, torch threads {threads}", tensors),
        _GatherMethod("gather_bare", "a put's copy, no digests", single, bare),
        _GatherMethod("gather", "the same with digests", single, payload),
        _GatherMethod("gather_auto_bare", "as many threads as a put takes", auto, bare),
        _GatherMethod("gather_auto", "the same with digests", auto, payload),
        _GatherMethod(
            "gather_all_cores", f"a thread on each of {cores} cores, digests", all_cores, payload
        ),
        _GatherMethod("gather_paged", f"random blocks of {BLOCK}, digests", single, paged),
        _ScatterMethod("scatter", "out of a payload, digests checked", single, committed),
        _VerifyMethod("verify", "only read, digests checked", single, committed),
        FirstTouchMethod(
            "first_touch", "gather into a new memory file", single, payload, _untouched
        ),
        FirstTouchMethod(
            "populated", "the same, populated before", single, payload, Mapping.shared
        ),
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


@dataclasses.dataclass(frozen=True)
class CopyResult(Timings):
    """All methods of one run by their keys, and what each is, for people."""

    setup: CopySetup
    features: str
    texts: dict[str, str]

    def rate(self, key: str) -> float:
        """Gigabytes of tensors a second, by the median."""
        return 1e-6 * self.setup.shape.nbytes / self.milliseconds(key).p50

    @property
    def digests_cost(self) -> float:
        """Percent that digests add to one thread's gather."""
        return 100 * (self.ratio_of("gather", "gather_bare") - 1)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        rows = {
            key: {
                "what": text,
                "milliseconds": self.milliseconds(key).to_dict(),
                "gigabytes_per_second": round(self.rate(key), 3),
                "ratio": round(self.ratio_of(key, PLAIN), 4),
                "ratio_by_round": self.ratio_by_round(key, PLAIN).to_dict(),
            }
            for key, text in self.texts.items()
        }
        return {
            "payload_bytes": self.setup.shape.nbytes,
            "instructions": self.features,
            "plain_copy": self.texts[PLAIN],
            "rounds": self.setup.rounds,
            "rows": rows,
            "digests_cost_percent": round(self.digests_cost, 3),
        }

    def text(self) -> str:
        """Everything that was measured, as wide as the terminal at most."""
        head = ["", "ms p50 [min..max]", "GB/s", "× plain", "what"]
        rows = [self._cells(key) for key in self.texts]
        lines = [
            wrapped("payload", self.setup.shape.text),
            wrapped("copier", f"native, {self.features}; one thread unless a row says more"),
            wrapped("rounds", f"{self.setup.rounds}; each row once in each, in random order"),
        ]
        cost = wrapped("digests", f"{self.digests_cost:+.1f} % of one thread's gather")
        return "\n\n".join(["\n".join(lines), table(head, rows), cost])

    def drawn(self) -> tuple[list[tuple[str, float]], str]:
        """The bars to draw, and their unit."""
        return [(key.replace("_", " "), self.rate(key)) for key in self.texts], "GB/s"

    def _cells(self, key: str) -> list[str]:
        summary = self.milliseconds(key)
        times = f"{summary.p50:.3g} [{summary.min:.3g}..{summary.max:.3g}]"
        ratio = f"{self.ratio_of(key, PLAIN):.2f}"
        return [key.replace("_", " "), times, f"{self.rate(key):.2f}", ratio, self.texts[key]]


def measure(setup: CopySetup, progress: Progress = progress) -> CopyResult:
    """Prove every method, then time each once a round.

    It raises `BenchError` for a method that does not move all bytes, `NativeError` without a
    compiled library, and `CapacityError` if the memory is too small.
    """
    with torch_threads(setup.threads), progress("rounds", setup.rounds) as step:
        methods = make_copy_methods(setup.shape, threads=setup.threads)
        for method in methods:
            if not method.moves_all_bytes():
                raise BenchError(f"{method.key}: not all bytes are there")
        seconds: dict[str, list[float]] = {method.key: [] for method in methods}
        chance = random.Random(0)  # the order changes from round to round
        for _ in range(setup.rounds):
            for method in chance.sample(methods, len(methods)):
                seconds[method.key].append(method.seconds())
            step()
    texts = {method.key: method.text for method in methods}
    return CopyResult(seconds, setup, host.features(), texts)
