"""Copies of as many bytes from and to tensors that lie differently: the CPU of each.

A processor may be slow for some distances between source and target, or for short rows.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omni_kvlink.bench.payloads import make_metadata, torch_dtype
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.setups import BLOCK, Shape
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli.terminal import Progress, table
from omni_kvlink.copier import Copier, NativeCopier
from omni_kvlink.memory.mapping import PAGE, Mapping
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.tensor_memory import tensor_view
from omni_kvlink.payload.views import TensorView, dense, same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.bench.result import Bars, Lines
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

    Lay = Callable[[Shape, int], TensorView]
    """Makes a tensor of a shape that will lie at this address in a payload."""

DIRECTIONS = ("gather", "scatter")
DISTANCES = {"0": 0, "64": 64, "equal": None, "equal + 64": 64, "equal + 2048": 2048}
"""The first byte of a tensor in its page: so many bytes, or so many behind the payload's."""
NBYTES = 224 << 20
"""Bytes of a payload: so many that the calls for its tensors, up to 256, do not count."""
_GB = 1e9


class PlacedCopy:
    """A payload and tensors with its bytes: `gather` copies them in, `scatter` back.

    All have their bytes in the same `region`, so that a scatter follows its own gather.
    """

    def __init__(self, group: str, name: str, shape: Shape, lay: Lay, region: Region):
        self.group, self.name, self.region = group, name, region
        self.seconds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        plain = torch.zeros(shape.tokens, *shape.row, dtype=torch_dtype(shape.dtype))
        self.manifest = self._plan(shape, [plain] * (len(shape.parts) * shape.layers))
        data = region.address + self.manifest.header_nbytes
        self.tensors = [lay(shape, data + spec.start) for spec in self.manifest.tensors]
        rng = np.random.default_rng(0)
        for tensor in self.tensors:
            memory = _memory(tensor)
            memory.copy_(torch.from_numpy(rng.integers(0, 256, tuple(memory.shape), np.uint8)))

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return sum(spec.nbytes for spec in self.manifest.tensors)

    def cost(self, direction: str) -> Summary:
        """CPU seconds of a gigabyte."""
        return Summary.of([seconds / self.nbytes * _GB for seconds in self.seconds[direction]])

    def gather(self, copier: Copier) -> list[str]:
        """Copy the tensors into the payload; their digests."""
        return copier.gather(self.tensors, self.manifest, self.region)

    def scatter(self, copier: Copier) -> None:
        """Copy the payload into the tensors; IntegrityError if a digest differs."""
        copier.scatter(self.manifest, self.region, self.tensors)

    def prove(self, copier: Copier) -> None:
        """Copy in both directions, each onto blank memory; BenchError if a byte is not there."""
        region = self.region.view()[: self.manifest.nbytes]
        np.frombuffer(region, np.uint8)[:] = 0
        before = [dense(tensor).clone() for tensor in self.tensors]
        self.manifest = self.manifest.with_digests(self.gather(copier))
        base = self.manifest.header_nbytes
        packed = [tensor_view(self.region, spec, base) for spec in self.manifest.tensors]
        self._compare("gather", before, packed)
        for tensor in self.tensors:
            _memory(tensor).zero_()
        self.scatter(copier)
        self._compare("scatter", before, self.tensors)

    def time(self, copier: Copier) -> None:
        """Copy once in each direction, and note the CPU seconds."""
        for direction, copy in zip(DIRECTIONS, (self.gather, self.scatter), strict=True):
            start = time.thread_time()
            copy(copier)
            self.seconds[direction].append(time.thread_time() - start)

    def _plan(self, shape: Shape, tensors: list[torch.Tensor]) -> Manifest:
        metadata = make_metadata(shape, shape.tokens, np.random.default_rng(0))
        parts = {part: tensors[index :: len(shape.parts)] for index, part in enumerate(shape.parts)}
        return KVCacheTransferData("copy", parts, (), metadata).plan()

    def _compare(
        self, direction: str, before: Sequence[TensorView], after: Sequence[TensorView]
    ) -> None:
        if not all(map(same_bytes, before, after)):
            raise BenchError(f"{direction} of {self.group}, {self.name}: not all bytes are there")


def _memory(tensor: TensorView) -> torch.Tensor:
    """The bytes of a tensor, or of the pool that it lies in."""
    return (tensor.pool if isinstance(tensor, PagedTensor) else tensor).view(torch.uint8)


# ---- how tensors lie


def at(name: str) -> Lay:
    """One of `DISTANCES`."""

    def lay(shape: Shape, address: int) -> torch.Tensor:
        nbytes, distance = shape.tokens * shape.row_nbytes, DISTANCES[name] or 0
        memory = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
        offset = distance + (address if name.startswith("equal") else 0)
        start = (offset - memory.data_ptr()) % PAGE
        flat = memory[start : start + nbytes].view(torch_dtype(shape.dtype))
        return flat.view(shape.tokens, *shape.row)

    return lay


def between(before: int, after: int) -> Lay:
    """Rows amid longer ones: so many elements lie before and after each."""

    def lay(shape: Shape, _: int) -> torch.Tensor:
        width = before + shape.head_dim + after
        wide = torch.empty(shape.tokens, width, dtype=torch_dtype(shape.dtype))
        return wide[:, before : before + shape.head_dim]

    return lay


def in_blocks(by_head: bool) -> Lay:
    """Blocks in random order: token by token (NHD), or head by head (HND)."""

    def lay(shape: Shape, _: int) -> PagedTensor:
        count = -(-shape.tokens // BLOCK)
        order = np.random.default_rng(0).permutation(count)
        inner = (*shape.row[:-1], BLOCK) if by_head else (BLOCK, *shape.row[:-1])
        pool = torch.empty(count, *inner, shape.head_dim, dtype=torch_dtype(shape.dtype))
        placements = BlockTable.of_blocks(order.tolist(), block_size=BLOCK, tokens=shape.tokens)
        return PagedTensor(pool.transpose(1, 2) if by_head else pool, placements)

    return lay


def _cases(quick: bool) -> list[tuple[str, str, Shape, Lay]]:
    """The group, the name, the shape and the place of each copy."""
    cases: list[tuple[str, str, Shape, Lay]] = []

    def shape(layers: int, heads: int, head_nbytes: int) -> Shape:
        one = layers * (2 if heads else 1) * max(heads, 1) * head_nbytes
        return Shape(layers, max(1, NBYTES // one), heads, head_nbytes // 2)

    for layers in (1, 112) if quick else (1, 28, 96, 112, 128):
        dense = shape(layers, 4, 256)
        cases.extend((f"{layers} layers", name, dense, at(name)) for name in DISTANCES)
    for row in (128, 132) if quick else (64, 128, 132, 256, 512):
        for order in ("NHD", "HND"):
            lay = in_blocks(order == "HND")
            cases.append((order, f"{row} bytes", shape(28, 4, row), lay))
    cases += [
        ("MLA", "128 bytes, in blocks", shape(28, 0, 128), in_blocks(False)),
        ("MLA", "1152 bytes, in blocks", shape(28, 0, 1152), in_blocks(False)),
        ("MLA", "1152 bytes, in rows of 1280", shape(28, 0, 1152), between(0, 64)),
        ("parts", "1024 bytes of rows of 1152", shape(28, 0, 1024), between(0, 64)),
        ("parts", "128 bytes of rows of 1152", shape(28, 0, 128), between(512, 0)),
    ]
    for power in (6, 12) if quick else (6, 8, 10, 12, 14, 16, 18, 20):
        row = 1 << power
        cases.append(("rows", f"{row} bytes, 128 between", shape(28, 0, row), between(0, 64)))
    return cases


# ---- the measurement


@dataclasses.dataclass(frozen=True)
class Placements:
    """The copies that were timed."""

    copies: list[PlacedCopy]

    def figures(self) -> dict[str, Any]:
        """CPU seconds of a gigabyte, by group, name and direction."""
        found: dict[str, Any] = {}
        for copy in self.copies:
            found.setdefault(copy.group, {})[copy.name] = {
                direction: copy.cost(direction) for direction in DIRECTIONS
            }
        return found

    def table(self) -> str:
        """The figures, for people."""
        rows = [
            [
                f"{copy.group}, {copy.name}",
                *(_cell(copy.cost(direction)) for direction in DIRECTIONS),
            ]
            for copy in self.copies
        ]
        return table(["CPU s/GB", *DIRECTIONS], rows) if rows else ""

    def lines(self) -> Lines:
        """The worst beside the best copy."""
        lines: Lines = []
        for direction in DIRECTIONS if self.copies else ():
            ordered = sorted(self._of("layers"), key=lambda copy: copy.cost(direction).p50)
            best, worst = (f"{copy.group}, {copy.name}" for copy in (ordered[0], ordered[-1]))
            costs = [copy.cost(direction).p50 for copy in ordered]
            text = f"best {costs[0]:.4f} ({best}), worst {costs[-1]:.4f} ({worst})"
            lines.append((direction, f"offsets and layers: {text}"))
        return lines

    def bars(self) -> Bars:
        """The most that the worst may cost, by the best."""
        for direction in DIRECTIONS if self.copies else ():
            dense = self._costs("layers", direction)
            yield f"{direction}, worst by best offset", max(dense) / min(dense), 1.2
            pairs = zip(self._costs("HND", direction), self._costs("NHD", direction), strict=True)
            yield f"{direction}, HND by NHD", max(hnd / nhd for hnd, nhd in pairs), 1.25
            yield f"{direction}, MLA by best", max(self._costs("MLA", direction)) / min(dense), 1.3

    def _of(self, group: str) -> list[PlacedCopy]:
        return [copy for copy in self.copies if copy.group.endswith(group)]

    def _costs(self, group: str, direction: str) -> list[float]:
        return [copy.cost(direction).p50 for copy in self._of(group)]


def _cell(cost: Summary) -> str:
    return f"{cost.p50:.4f} [{cost.min:.4f}..{cost.max:.4f}]"


def measure_placements(*, quick: bool, progress: Progress) -> Placements:
    """Prove every copy, then time each; one thread.

    It raises `BenchError` for a copy that leaves a byte out, and `NativeError` without a compiled
    library. A gigabyte and a half is allocated.
    """
    copier, chance = NativeCopier(threads=1), random.Random(0)
    region = Mapping.shared("kvlink-bench", NBYTES + (4 << 20)).region
    groups: dict[str, list[tuple[str, str, Shape, Lay]]] = {}
    for case in _cases(quick):
        groups.setdefault(case[0], []).append(case)
    done: list[PlacedCopy] = []
    with progress("placements", len(groups)) as step:
        for cases in groups.values():
            copies = [PlacedCopy(*case, region) for case in cases]
            for copy in copies:
                copy.prove(copier)
            for _ in range(3 if quick else 9):
                for copy in chance.sample(copies, len(copies)):
                    copy.time(copier)
            for copy in copies:
                copy.tensors = []  # the next group needs the memory
            done += copies
            step()
    return Placements(done)
