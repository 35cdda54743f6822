"""`Comparison`: two payload files beside each other, branch by branch, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.inspection.difference import Side, TensorDifference, compare_tensors
from omni_kvlink.payload.branches import Branch, tensor_names
from omni_kvlink.payload.header import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.inspection.payload_file import PayloadFile

_COMPARED = (
    "kv_lens",
    "ropes",
    "num_layers",
    "layout",
    "block_size",
    "image_shape",
    "extra",
    "shard",
)
"""Fields of a branch that say more than its tensors do; the others follow from those."""


class Comparison:
    """The differences of the payloads of two files.

    A branch that reuses another one's bytes is compared by the bytes that it stands for. Request id
    and producer are of the transfer: a difference there is noted, and does not count.

    Attributes:
        notes: what differs in the transfer, or the way in which a branch was declared.
        complaints: what differs besides the tensors.
        branches: the differences of the tensors that both have, by branch, equal ones among them.
    """

    def __init__(self, a: PayloadFile, b: PayloadFile, step: Callable[[], object]):
        self.a, self.b = a, b
        self.notes, self.complaints = list[str](), list[str]()
        self.branches: dict[str, list[TensorDifference]] = {}
        for name in ("request_id", "producer"):
            self._compare(self.notes, name, getattr(a.manifest, name), getattr(b.manifest, name))
        mine, theirs = (
            {branch.name: branch for branch in file.manifest.branches} for file in (a, b)
        )
        for name, branch in mine.items():
            if name not in theirs:
                self.complaints.append(f"branch {name!r} is in A alone")
                continue
            self._compare_fields(branch, theirs[name])
            self.branches[name] = list(self._compare_tensors(branch, theirs[name], step))
        self.complaints += [f"branch {name!r} is in B alone" for name in theirs if name not in mine]

    @property
    def is_equal(self) -> bool:
        """Whether both have the same caches and tensors, bit for bit."""
        differences = [difference for branch in self.branches.values() for difference in branch]
        return not self.complaints and all(difference.is_equal for difference in differences)

    @property
    def first(self) -> TensorDifference | None:
        """The first tensor with an element that differs."""
        differences = (difference for branch in self.branches.values() for difference in branch)
        return next((difference for difference in differences if difference.elements), None)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values; of the tensors those that differ."""
        return {
            "a": self.a.path,
            "b": self.b.path,
            "equal": self.is_equal,
            "notes": self.notes,
            "complaints": self.complaints,
            "branches": {
                name: [
                    difference.to_dict() for difference in differences if not difference.is_equal
                ]
                for name, differences in self.branches.items()
            },
        }

    @staticmethod
    def _compare(lines: list[str], name: str, in_a: object, in_b: object) -> None:
        if in_a != in_b:
            lines.append(f"{name}: {in_a!r:.100} in A, {in_b!r:.100} in B")

    def _compare_fields(self, mine: Branch, theirs: Branch) -> None:
        for field in _COMPARED:
            in_a, in_b = (_plain(getattr(branch, field)) for branch in (mine, theirs))
            self._compare(self.complaints, f"branch {mine.name!r}, {field}", in_a, in_b)
        in_a, in_b = (_plain(branch.reuse) for branch in (mine, theirs))
        self._compare(self.notes, f"branch {mine.name!r}, reuse", in_a, in_b)

    def _compare_tensors(
        self, mine: Branch, theirs: Branch, step: Callable[[], object]
    ) -> Iterator[TensorDifference]:
        unmatched = {spec.name: spec for spec in _tensors_of(self.b, theirs)}
        lone = list[TensorSpec]()
        for spec in _tensors_of(self.a, mine):
            other = unmatched.pop(spec.name, None)
            if other is None:
                lone.append(spec)
            else:
                yield compare_tensors(Side(self.a, spec), Side(self.b, other))
            step()
        for specs, file in ((lone, "A"), (list(unmatched.values()), "B")):
            if specs:
                tail = f" and {len(specs) - 1} tensors behind it" if len(specs) > 1 else ""
                self.complaints.append(f"{specs[0].where()}{tail}: in {file} alone")


def _plain(value: object) -> object:
    """A field as JSON has it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _tensors_of(file: PayloadFile, branch: Branch) -> Iterator[TensorSpec]:
    """The tensors that a branch stands for, by its own name."""
    manifest, reuse = file.manifest, branch.reuse
    if reuse is None:
        yield from manifest.tensors_of(branch)
        return
    source = next(owner for owner in manifest.branches if owner.name == reuse.of)
    names = tensor_names(msgspec.structs.replace(branch, reuse=None))
    for name, spec in zip(names, manifest.tensors_of(source), strict=True):
        part = spec if reuse.tokens is None else spec.rows(range(reuse.tokens))
        yield msgspec.structs.replace(part, name=name)
