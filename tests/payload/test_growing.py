"""What streams that grow send: heads, chunks and ends, and what is refused as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_kvlink import IntegrityError, SchemaError, TensorTransferData, WireError
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.growing import (
    StreamPosition,
    StreamSpec,
    check_chunk,
    open_chunk,
    read_end,
    read_head,
)
from omni_kvlink.payload.manifest import Manifest

Written = tuple[Manifest, Region]
FIRST = StreamPosition()
SECOND = FIRST.after(b"header")


def written(data: TensorTransferData) -> Written:
    """The payload as a reader has it."""
    plan = data.plan()
    region = Region.private(plan.nbytes)
    region.write(0, plan.encode(TorchCopier().gather(data.tensors(), plan, region)))
    return Manifest.decode(region.view(), region.nbytes), region


def tree(tensors: dict[str, Any], metadata: dict[str, Any] | None = None) -> Written:
    return written(TensorTransferData("g", tensors, metadata))


def spec() -> StreamSpec:
    tensors = {"a": torch.empty(3, 5, 2), "b": [torch.empty(0, 7, dtype=torch.int8)]}
    return StreamSpec("g", tensors, 1, {"rate": 8})


def test_a_head_is_read() -> None:
    head = read_head(*written(spec().head(FIRST.encode())))
    assert (head.dim, head.metadata) == (1, {"rate": 8})
    assert head.spec["a"].shape == (3, 0, 2)
    assert head.spec["b"][0].shape == (0, 0)
    assert head.spec["b"][0].dtype == torch.int8


def test_a_chunk_is_read_once_and_in_its_place() -> None:
    tensors: dict[str, Any] = {"a": torch.randn(3, 4, 2), "b": [torch.ones(0, 1, dtype=torch.int8)]}
    manifest, region = written(spec().chunk(tensors, {"step": 1}, SECOND))
    data = open_chunk(manifest, region)
    rest, following = check_chunk(manifest, region, SECOND)
    assert torch.equal(data["a"], tensors["a"])
    assert data.metadata == {"step": 1}
    assert [each.name for each in rest.tensors] == ["tensors/data/a", "tensors/data/b/0"]
    assert following == SECOND.after(region.read(0, manifest.header_nbytes))
    assert following.number == 2
    for position, message in (
        (FIRST, "chunk 1 came instead of chunk 0"),
        (following, "chunk 1 came instead of chunk 2"),
        (FIRST.after(b"another"), "the chunks before 1 are not those appended"),
    ):
        with pytest.raises(IntegrityError, match=message):
            check_chunk(manifest, region, position)
    begun = StreamPosition(1, None)
    assert check_chunk(manifest, region, begun)[1] == following


@pytest.mark.parametrize(
    ("position", "count"),
    [(SECOND, 1), (StreamPosition(1, None), 1), (StreamPosition(5, None), 1)],
    ids=["all", "from the end on", "from behind the end on"],
)
def test_an_end_is_read(position: StreamPosition, count: int) -> None:
    assert read_end(*written(spec().head(SECOND.encode())), position) == count


@pytest.mark.parametrize(
    "position", [FIRST, SECOND.after(b""), FIRST.after(b"x"), StreamPosition(0, None)]
)
def test_an_end_of_other_chunks_is_refused(position: StreamPosition) -> None:
    with pytest.raises(IntegrityError):
        read_end(*written(spec().head(SECOND.encode())), position)


@pytest.mark.parametrize(
    "payload",
    [
        tree({"a": torch.ones(2)}),
        tree({"spec": {}, "end": torch.ones(24)}, {"dim": 0, "metadata": {}}),
        tree({"spec": {}, "end": FIRST.encode()[:-1]}, {"dim": 0, "metadata": {}}),
        tree({"spec": FIRST.encode(), "end": FIRST.encode()}, {"dim": 0, "metadata": {}}),
        tree({"end": FIRST.encode(), "spec": {}}, {"dim": 0, "metadata": {}}),
        tree({"spec": {}, "end": FIRST.encode()}, {"dim": "0", "metadata": {}}),
        tree({"spec": {}, "end": FIRST.encode()}, {"dim": 0, "metadata": []}),
        tree({"spec": {}, "end": FIRST.encode()}, {"dim": 0}),
    ],
)
def test_what_is_no_head_is_refused(payload: Written) -> None:
    with pytest.raises(WireError, match="'g'"):
        read_head(*payload)


@pytest.mark.parametrize(
    "payload",
    [
        tree({"data": {}}),
        tree({"data": {}, "position": torch.ones(24)}),
        tree({"data": [], "position": FIRST.encode()}),
        tree({"data": {}, "position": FIRST.encode(), "more": torch.ones(1)}),
    ],
)
def test_what_is_no_chunk_is_refused(payload: Written) -> None:
    with pytest.raises(WireError, match="'g'"):
        open_chunk(*payload)


def test_a_spec_has_tensors_that_grow() -> None:
    for tensors, dim, message in (
        ({}, 0, "no tensors"),
        ({"a": torch.tensor(1)}, 0, "'a'.*no dimension 0"),
        ({"a": torch.ones(2, 2), "b": {"c": torch.ones(2)}}, 1, "'b/c'.*no dimension 1"),
        ({"a": torch.ones(2)}, -2, "no dimension -2"),
    ):
        with pytest.raises(SchemaError, match=message):
            StreamSpec("g", tensors, dim, None)
    with pytest.raises(SchemaError, match="metadata"):
        StreamSpec("g", {"a": torch.ones(2)}, 0, [1])  # type: ignore[arg-type]
    assert StreamSpec("g", {"a": torch.ones(2)}, -1, None).dim == -1


def test_a_chunk_like_the_one_before_is_the_same_payload() -> None:
    flat = StreamSpec("g", {"a": torch.empty(0, 3), "b~/": torch.empty(0)}, 0, None)
    position = FIRST
    for rows in (2, 2, 2, 5, 5, 2):
        tensors = {"a": torch.randn(rows, 3), "b~/": torch.randn(rows)}
        manifest, region = written(flat.chunk(tensors, None, position))
        whole = {"data": tensors, "position": position.encode()}
        expected, other = tree(whole)
        assert manifest == expected
        assert region.read(0, region.nbytes) == other.read(0, other.nbytes)
        assert open_chunk(manifest, region).difference(TensorTransferData("g", tensors)) == ""
        _, position = check_chunk(manifest, region, position)
    assert position.number == 6


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "0 tensors; the spec has 1"),
        ({"a": torch.ones(2, 3, dtype=torch.int8)}, "tensor 'a' of torch.int8"),
        ({"a": torch.ones(2, 4)}, "tensor 'a' of torch.float32"),
        ({"b": torch.ones(2, 3)}, "tensor 'b'"),
        ({"a": torch.ones(2, 3).to_sparse()}, "tensor 'data/a'"),
        ({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, "2 tensors; the spec has 1"),
        ({"a": [torch.ones(2, 3)]}, "tensor 'a/0'"),
    ],
)
def test_another_chunk_after_like_ones_is_refused(
    count: int, change: dict[str, Any], message: str
) -> None:
    flat = StreamSpec("g", {"a": torch.empty(0, 3)}, 0, None)
    for _ in range(count):
        flat.chunk({"a": torch.ones(2, 3)}, None, FIRST)
    with pytest.raises(SchemaError, match=message):
        flat.chunk(change, None, FIRST)
    flat.chunk({"a": torch.ones(2, 3)}, None, FIRST)
