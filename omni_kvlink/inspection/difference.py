"""`TensorDifference`: where two tensors of the same name differ, by token and element."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from omni_kvlink.inspection.payload_file import PayloadFile
from omni_kvlink.inspection.tensor_byte import TensorByte, index_of
from omni_kvlink.payload.dtypes import ITEMSIZE
from omni_kvlink.payload.header import TensorSpec
from omni_kvlink.payload.tensor_memory import tensor_view


@dataclasses.dataclass(frozen=True)
class Side:
    """A tensor of one of two files that are compared."""

    file: PayloadFile
    spec: TensorSpec

    def tensor(self) -> torch.Tensor:
        """The tensor, a readonly view of the file."""
        return tensor_view(self.file.region, self.spec, self.file.manifest.header_nbytes)

    def byte(self, index: tuple[int, ...], number: int) -> TensorByte:
        """Byte `number` of the element at an index of this tensor."""
        offset = 0
        for position, size in zip(index, self.spec.shape, strict=True):
            offset = offset * size + position
        return TensorByte(self.spec, offset * ITEMSIZE[self.spec.dtype] + number)

    def value(self, index: tuple[int, ...]) -> int | float | bool:
        """The element at an index."""
        element = self.tensor()[index]
        return (element.double() if element.is_floating_point() else element).item()


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """The elements in which two tensors differ, where both have some.

    Attributes:
        a, b: the two tensors.
        note: why they cannot be compared, or what one of them has alone; "" if nothing.
        shares: the part of each row's elements that differ, [rows] of float32, in both; empty if
            the tensors cannot be compared.
        elements: number of elements that differ.
        nbytes: number of bytes that differ; 0 between two dtypes.
        first: the first byte that differs, in `a`, and in `b`; None if none does.
        max_abs: the largest absolute difference of two values that are numbers, of floats.
        not_finite: elements that differ and are no finite number on one side at least.
    """

    a: Side
    b: Side
    note: str = ""
    shares: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    elements: int = 0
    nbytes: int = 0
    first: tuple[TensorByte, TensorByte] | None = None
    max_abs: float | None = None
    not_finite: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether both have the same elements, bit for bit, and neither has others."""
        return not self.note and self.elements == 0

    def text(self) -> list[str]:
        """The difference in words, a line each."""
        lines = [f"{self.a.spec.where()}: {self.note}"] if self.note else []
        if self.first is None:
            return lines
        byte, other = self.first
        ours, theirs = (side.value(byte.index) for side, byte in self._pairs())
        lines.append(
            f"{self.a.spec.where()}: first at {byte.element()}: byte {byte.offset} of the tensor, "
            f"{self._hex(self.a, byte)} in A, {self._hex(self.b, other)} in B; "
            f"value {ours:.9g} in A, {theirs:.9g} in B"
        )
        lines.append(f"{self.elements:,} of {self.total:,} elements differ{self._extent()}")
        return lines

    @property
    def total(self) -> int:
        """Elements that both have."""
        sizes = zip(self.a.spec.shape, self.b.spec.shape, strict=True)
        count = 1
        for in_a, in_b in sizes:
            count *= min(in_a, in_b)
        return count

    def to_dict(self) -> dict[str, Any]:
        """All but the shares, as JSON values."""
        first: dict[str, Any] | None = None
        if self.first is not None:
            in_a, in_b = (
                {
                    **byte.to_dict(),
                    "file_offset": side.file.offset_of(byte),
                    "byte": side.file.bytes_of(side.spec)[byte.offset],
                    "value": _as_json(side.value(byte.index)),
                }
                for side, byte in self._pairs()
            )
            first = {"a": in_a, "b": in_b}
        return {
            "tensor": self.a.spec.name,
            "note": self.note,
            "elements": self.elements,
            "bytes": self.nbytes,
            "first": first,
            "max_abs": self.max_abs,
            "not_finite": self.not_finite,
        }

    def _pairs(self) -> list[tuple[Side, TensorByte]]:
        assert self.first is not None
        return [(self.a, self.first[0]), (self.b, self.first[1])]

    def _extent(self) -> str:
        text = "" if self.max_abs is None else f", by {self.max_abs:.6g} at most"
        return text + (f"; {self.not_finite:,} are not finite" if self.not_finite else "")

    @staticmethod
    def _hex(side: Side, byte: TensorByte) -> str:
        return f"{side.file.bytes_of(side.spec)[byte.offset]:#04x}"


def compare_tensors(a: Side, b: Side) -> TensorDifference:
    """Compare two tensors where they overlap: elements with the same index."""
    if len(a.spec.shape) != len(b.spec.shape):
        note = f"{a.spec.dtype} {list(a.spec.shape)} in A, {b.spec.dtype} {list(b.spec.shape)} in B"
        return TensorDifference(a, b, f"{note}: not compared")
    overlap = tuple(slice(min(sizes)) for sizes in zip(a.spec.shape, b.spec.shape, strict=True))
    note = "" if a.spec.shape == b.spec.shape else _overlap_note(a, b)
    mine, theirs = (side.tensor()[overlap].contiguous() for side in (a, b))
    if a.spec.dtype != b.spec.dtype:
        note = "; ".join(filter(None, (f"{a.spec.dtype} in A, {b.spec.dtype} in B", note)))
        differs, nbytes = mine.double().ne(theirs.double()), 0
        differing = None
    else:
        if torch.equal(_raw(mine), _raw(theirs)):
            return TensorDifference(a, b, note, torch.zeros(mine.shape[0] if mine.shape else 1))
        differing = _raw(mine).ne(_raw(theirs))
        nbytes, differs = int(differing.sum()), differing.any(-1).view(mine.shape)
    elements = int(differs.sum())
    rows = mine.shape[0] if mine.shape else 1
    if not elements:
        return TensorDifference(a, b, note, torch.zeros(rows))
    shares = differs.view(rows, -1).float().mean(1)
    number = int(differs.flatten().byte().argmax())
    index = index_of(number, differs.shape)
    byte = 0 if differing is None else int(differing[number].byte().argmax())
    first = a.byte(index, byte), b.byte(index, byte)
    measured = _measure(mine[differs], theirs[differs])
    return TensorDifference(a, b, note, shares, elements, nbytes, first, *measured)


def _overlap_note(a: Side, b: Side) -> str:
    return f"{list(a.spec.shape)} in A, {list(b.spec.shape)} in B: compared where they overlap"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element of a contiguous tensor: [elements, bytes]."""
    return tensor.view(-1).view(torch.uint8).view(-1, tensor.itemsize)


def _measure(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[float | None, int]:
    """The largest absolute difference of floats, and the number of pairs that are not finite."""
    if not (mine.is_floating_point() or theirs.is_floating_point()):
        return None, 0
    a, b = mine.double(), theirs.double()
    finite = a.isfinite() & b.isfinite()
    largest = float((a - b).abs()[finite].max()) if bool(finite.any()) else None
    return largest, int((~finite).sum())


def _as_json(value: float) -> int | float | str | bool:
    """A value as JSON has it, which has no NaN."""
    return value if abs(value) <= 1.7976931348623157e308 else str(value)
