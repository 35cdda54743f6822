"""The limits of this machine's memory: methods to copy as many bytes, timed in turn."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omni_kvlink._native import host
from omni_kvlink.bench.machine import torch_threads
from omni_kvlink.bench.payloads import Sources, make_sample
from omni_kvlink.bench.placements import Placements, measure_placements
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.result import Result
from omni_kvlink.bench.setups import BLOCK, CopySetup, Shape
from omni_kvlink.bench.stats import Timings
from omni_kvlink.cli.terminal import Progress, progress, table
from omni_kvlink.copier import Copier, NativeCopier
from omni_kvlink.errors import IntegrityError
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.tensor_memory import tensor_view
from omni_kvlink.payload.views import TensorView, dense, same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.schema import KVCacheTransferData

    MakeMapping = Callable[[str, int], Mapping]

PLAIN = "plain_copy"


class CopyMethod:
    """One method to move or read all bytes; `key` names it in JSON, `text` for people.

    `copy`, of a copier or, without one, of None, fills the targets with the bytes of the sources.
    """

    def __init__(
        self,
        key: str,
        text: str,
        copy: Callable[[Any], object],
        sources: Sequence[TensorView] = (),
        targets: Sequence[torch.Tensor] = (),
        copier: Any = None,
    ):
        self.key, self.text = key, text
        self._copy, self._copier, self._sources, self._targets = copy, copier, sources, targets

    def run(self) -> object:
        """Move or read all bytes; the result is dropped after the clock has stopped."""
        return self._copy(self._copier)

    def moves_all_bytes(self) -> bool:
        """Run on blank memory; whether all bytes are there afterwards."""
        for target in self._targets:
            target.view(torch.uint8).zero_()
        self.run()
        return self.holds(self._targets)

    def holds(self, targets: Sequence[torch.Tensor]) -> bool:
        """Whether tensors have the bytes of the sources."""
        pairs = zip(self._sources, targets, strict=True)
        return all(same_bytes(dense(source), target) for source, target in pairs)

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
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        step = 512 << 10

        def copy_steps(_: object) -> None:
            for start in range(0, nbytes, step):
                np.copyto(target[start : start + step], source[start : start + step])

        methods = {
            "numpy.copyto": lambda _: np.copyto(target, source),
            "memmove": lambda _: ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes),
            "numpy.copyto in steps of 512 KiB": copy_steps,
        }
        tensors = [torch.from_numpy(source)], [torch.from_numpy(target)]
        super().__init__(PLAIN, "", copy_steps, *tensors)
        best = {}
        for name, self._copy in methods.items():
            best[name] = min(self.seconds() for _ in range(3))
        self.text = min(best, key=lambda name: best[name])
        self._copy = methods[self.text]


class StagedPayload:
    """A payload's plan, the memory of its bytes, and the tensors that they are copied from."""

    def __init__(self, cache: KVCacheTransferData, region: Region | None = None, **plan: Any):
        self.sources, self.manifest = cache.tensors(), cache.plan(**plan)
        self.layers, self.metadata = cache.layer_blocks, cache.metadata
        memory = region or Mapping.shared("kvlink-bench", self.manifest.nbytes).region
        self.region = memory

    def tensors(self, region: Region | None = None) -> list[torch.Tensor]:
        """Views of the memory, or of another one with the same bytes."""
        specs, base = self.manifest.tensors, self.manifest.header_nbytes
        return [tensor_view(region or self.region, spec, base) for spec in specs]

    def gather(self, copier: Copier, region: Region | None = None) -> list[str]:
        """Copy the bytes there; their digests."""
        return copier.gather(self.sources, self.manifest, region or self.region)

    def commit(self, copier: Copier) -> None:
        """Copy the bytes, and add their digests to the plan."""
        self.manifest = self.manifest.with_digests(self.gather(copier))


class _VerifyMethod(CopyMethod):
    """Reads all bytes and compares digests; `targets` are the tensors that it reads."""

    def moves_all_bytes(self) -> bool:
        """Whether it reads to the end: it must see one bit of the last byte."""
        self.run()
        last = self._targets[-1].view(torch.uint8).view(-1)
        last[-1] ^= 1
        try:
            self.run()
        except IntegrityError:
            return True
        finally:
            last[-1] ^= 1
        return False


class FirstTouchMethod(CopyMethod):
    """A gather into new memory, whose making is timed too; unmapping it is not."""

    def __init__(
        self, key: str, text: str, copier: Copier, payload: StagedPayload, make: MakeMapping
    ):
        super().__init__(key, text, payload.gather, payload.sources, (), copier)
        self._payload, self._make = payload, make

    def run(self) -> Mapping:
        """Copy into new memory."""
        mapping = self._make("kvlink-bench", self._payload.region.nbytes)
        self._payload.gather(self._copier, mapping.region)
        return mapping

    def moves_all_bytes(self) -> bool:
        """Run, and compare."""
        mapping = self.run()
        return self.holds(self._payload.tensors(mapping.region))


def make_copy_methods(shape: Shape, *, threads: int) -> list[CopyMethod]:
    """Every method; the first is the baseline.

    About ten times the bytes of the shape are allocated; `threads` are torch's, for the text.
    """
    cores = len(os.sched_getaffinity(0))
    single, auto, all_cores = NativeCopier(threads=1), NativeCopier(), NativeCopier(threads=cores)
    cache = _cache(shape, "contiguous")
    payload, committed = StagedPayload(cache), StagedPayload(cache)
    paged = StagedPayload(_cache(shape, "paged"))
    bare = StagedPayload(cache, payload.region, digests=False)  # the same warm memory
    committed.commit(single)
    sources, read = [dense(source) for source in payload.sources], committed.tensors()
    copied, scattered = ([torch.zeros_like(one) for one in tensors] for tensors in (sources, read))

    def copy_tensors(_: object) -> None:
        for source, target in zip(sources, copied, strict=True):
            target.copy_(source)

    def gather(key: str, text: str, copier: Copier, staged: StagedPayload) -> CopyMethod:
        return CopyMethod(key, text, staged.gather, staged.sources, staged.tensors(), copier)

    def scatter(copier: Copier) -> None:
        copier.scatter(committed.manifest, committed.region, scattered)

    def verify(copier: Copier) -> None:
        copier.verify(committed.manifest, committed.region)

    torch_text, all_text = f"torch threads {threads}", f"a thread on each of {cores} cores, digests"
    out_text, read_text = "out of a payload, digests checked", "only read, digests checked"
    fresh_text = "gather into a new memory file"
    return [
        PlainCopy(shape.nbytes),
        CopyMethod("torch_copy", f"Tensor.copy_, {torch_text}", copy_tensors, sources, copied),
        gather("gather_bare", "a put's copy, no digests", single, bare),
        gather("gather", "the same with digests", single, payload),
        gather("gather_auto_bare", "as many threads as a put takes", auto, bare),
        gather("gather_auto", "the same with digests", auto, payload),
        gather("gather_all_cores", all_text, all_cores, payload),
        gather("gather_paged", f"random blocks of {BLOCK}, digests", single, paged),
        CopyMethod("scatter", out_text, scatter, read, scattered, single),
        _VerifyMethod("verify", read_text, verify, read, read, single),
        FirstTouchMethod("first_touch", fresh_text, single, payload, _untouched),
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


def measure(setup: CopySetup, progress: Progress = progress) -> Result:
    """Prove every method, then time each once a round; then `measure_placements`.

    The instruction set of the setup remains selected. It raises `BenchError` for a method that
    does not move all bytes, `NativeError` without a compiled library or this instruction set, and
    `CapacityError` if the memory is too small.
    """
    host.select(setup.features)
    with torch_threads(setup.threads), progress("rounds", setup.rounds) as step:
        methods = make_copy_methods(setup.shape, threads=setup.threads)
        for method in methods:
            if not method.moves_all_bytes():
                raise BenchError(f"{method.key}: not all bytes are there")
        times = Timings({method.key: [] for method in methods})
        chance = random.Random(0)  # the order changes from round to round
        for _ in range(setup.rounds):
            for method in chance.sample(methods, len(methods)):
                times[method.key].append(method.seconds())
            step()
        texts = {method.key: method.text for method in methods}
        del methods, method  # their memory
        placements = measure_placements(quick=setup.quick, progress=progress)
    return _result(setup, times, texts, placements)


def _result(
    setup: CopySetup, times: Timings, texts: dict[str, str], placements: Placements
) -> Result:
    cost = 100 * (times.ratio_of("gather", "gather_bare") - 1)
    cells, figures, rates = [], {}, {}
    for key, text in texts.items():
        summary, ratio = times.milliseconds(key), times.ratio_of(key, PLAIN)
        name = key.replace("_", " ")
        rates[name] = rate = 1e-6 * setup.shape.nbytes / summary.p50  # gigabytes a second
        spread = f"{summary.p50:.3g} [{summary.min:.3g}..{summary.max:.3g}]"
        cells.append([name, spread, f"{rate:.2f}", f"{ratio:.2f}", text])
        figures[key] = {
            "what": text,
            "milliseconds": summary,
            "gigabytes_per_second": round(rate, 3),
            "ratio": round(ratio, 4),
            "ratio_by_round": times.ratio_by_round(key, PLAIN),
        }
    features = host.features()
    return Result(
        figures={
            "payload_bytes": setup.shape.nbytes,
            "instructions": features,
            "plain_copy": texts[PLAIN],
            "rounds": setup.rounds,
            "rows": figures,
            "digests_cost_percent": round(cost, 3),
            "placements": placements.figures(),
        },
        head=[
            ("payload", setup.shape.text),
            ("copier", f"native, {features}; one thread unless a row says more"),
            ("rounds", f"{setup.rounds}; each row once in each, in random order"),
        ],
        tables="\n\n".join(
            [table(["", "ms p50 [min..max]", "GB/s", "× plain", "what"], cells), placements.table()]
        ),
        lines=[("digests", f"{cost:+.1f} % of one thread's gather"), *placements.lines()],
        bars=placements.bars(),
        drawn=(rates, "GB/s"),
    )
