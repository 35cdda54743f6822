"""What append streams send: heads, chunks and ends, and what is refused as one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from omni_kvlink import ClosedError, IntegrityError, SchemaError, TensorTransferData, WireError
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.append_stream import (
    StreamPosition,
    StreamSpec,
    check_chunk,
    open_chunk,
    read_end,
    read_head,
    tensors_of_chunk,
)
from omni_kvlink.payload.chunk_requests import ChunkRequests, PackedRequests, read_sizes
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
    data, requests = open_chunk(manifest, region)
    assert requests is None
    rest, following = tensors_of_chunk(manifest), check_chunk(manifest, region, SECOND)
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
    assert check_chunk(manifest, region, begun) == following


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
        data, _ = open_chunk(manifest, region)
        assert data.difference(TensorTransferData("g", tensors)) == ""
        position = check_chunk(manifest, region, position)
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


def packed(sizes: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(sizes)), dtype=torch.uint8)


def with_requests(requests: torch.Tensor, tensors: dict[str, Any] | None = None) -> Written:
    data = {"a": torch.ones(3, 4, 2)} if tensors is None else tensors
    return tree({"data": data, "requests": requests, "position": FIRST.encode()})


def test_a_chunk_of_many_requests_is_taken_apart() -> None:
    tensors: dict[str, Any] = {
        "a": torch.randn(3, 6, 2),
        "b": [torch.arange(12, dtype=torch.int8).view(2, 6)],
    }
    both = StreamSpec("g", tensors, 1, None)
    requests = PackedRequests.of(1, {"x": 1, "y": 0, "z": 5}, ["x"], {"y": "no memory"})
    manifest, region = written(both.chunk(tensors, None, SECOND, requests))
    data, sizes = open_chunk(manifest, region)
    assert data.difference(TensorTransferData("g", tensors)) == ""
    assert sizes is not None
    found = ChunkRequests(sizes, data)
    assert (list(found), len(found), "y" in found, "w" in found) == (
        ["x", "y", "z"],
        3,
        True,
        False,
    )
    assert (found.ended, found.failed) == (("x",), {"y": "no memory"})
    for key, columns in (("x", slice(0, 1)), ("y", slice(1, 1)), ("z", slice(1, 6))):
        part = TensorTransferData("r", found[key])
        rows = {"a": tensors["a"][:, columns], "b": [tensors["b"][0][:, columns]]}
        assert part.difference(TensorTransferData("r", rows)) == ""
    rest, following = tensors_of_chunk(manifest), check_chunk(manifest, region, SECOND)
    assert [each.name for each in rest.tensors] == ["tensors/data/a", "tensors/data/b/0"]
    assert following == SECOND.after(region.read(0, manifest.header_nbytes))
    found.failed.clear()
    again = ChunkRequests(sizes, data)
    assert again.failed == {"y": "no memory"}, "what a caller changes is its own"
    data.close()
    with pytest.raises(ClosedError):
        ChunkRequests(sizes, data)
    assert again["z"]["b"][0].tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]


def test_the_requests_of_the_step_before_make_the_same_payload() -> None:
    flat = StreamSpec("g", {"a": torch.empty(0, 3), "b": torch.empty(0)}, 0, None)
    first, swapped, longer = {"x": 1, "y": 2}, {"y": 1, "x": 2}, {"x": 2, "y": 2}
    for requests in (first, first, None, first, swapped, swapped, {"y": 2, "x": 1}, longer, first):
        rows = sum((requests or first).values())
        tensors = {"a": torch.randn(rows, 3), "b": torch.randn(rows)}
        packed_now = None if requests is None else PackedRequests.of(0, requests)
        manifest, region = written(flat.chunk(tensors, None, FIRST, packed_now))
        whole: dict[str, Any] = {"data": tensors, "position": FIRST.encode()}
        if requests is not None:
            sizes: tuple[object, ...] = (0, list(requests), list(requests.values()), (), {})
            whole = {"data": tensors, "requests": packed(sizes), "position": FIRST.encode()}
        expected, other = tree(whole)
        assert manifest == expected
        assert region.read(0, region.nbytes) == other.read(0, other.nbytes)


def test_no_requests_have_no_rows() -> None:
    data = {"a": torch.empty(3, 0, 2), "b": [torch.empty(0, 0, dtype=torch.int8)]}
    chunk = spec().chunk(data, None, FIRST, PackedRequests.of(1, {}, ended=["x"]))
    opened, sizes = open_chunk(*written(chunk))
    assert sizes is not None
    found = ChunkRequests(sizes, opened)
    assert (dict(found), found.ended) == ({}, ("x",))


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ({"x": 3, "y": 2}, "has 4 rows in dimension 0, the requests have 5"),
        ({}, "the requests have 0"),
        ({"x": -1, "y": 5}, ">= 0"),
        ({"x": 4.0}, "wanted int"),
        ({"x": True, "y": 3}, "wanted int"),
        ({"x": [4]}, "wanted int"),
        ({"": 4}, "length >= 1"),
        ({"x" * 1025: 4}, "length <= 1024"),
        ({7: 4}, "`str`"),
        ({"\ud800": 4}, "surrogates"),
        ([("x", 4)], "a list, wanted a dict"),
    ],
)
def test_requests_that_a_reader_would_refuse_are_not_sent(
    is_repeated: bool, requests: Any, message: str
) -> None:
    flat, tensors = StreamSpec("g", {"a": torch.empty(0, 3)}, 0, None), {"a": torch.ones(4, 3)}
    if is_repeated:
        for _ in range(3):
            flat.chunk(tensors, None, FIRST, PackedRequests.of(0, {"x": 1, "y": 3}))
    with pytest.raises(SchemaError, match=message):
        flat.chunk(tensors, None, FIRST, PackedRequests.of(0, requests))


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"ended": "abc"}, "ended='abc'"),
        ({"ended": [1]}, "`str`"),
        ({"ended": 1}, "iterable"),
        ({"failed": {"x": 1}}, "reason 1, wanted str"),
        ({"failed": {"": "y"}}, "length >= 1"),
        ({"failed": "x"}, "dictionary update sequence"),
    ],
)
def test_endings_that_a_reader_would_refuse_are_not_sent(
    about: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        PackedRequests.of(0, {"x": 4}, **about)


def test_a_reason_is_cut() -> None:
    made = PackedRequests.of(0, {}, failed={"x": 5000 * "y", "z": "no file \udcff"})
    assert made.sizes.failed == {"x": 4096 * "y", "z": "no file \\udcff"}


def test_sizes_of_many_requests_are_not_remembered() -> None:
    many = {f"request-{number:04d}": 1 for number in range(5000)}
    made = PackedRequests.of(0, many)
    raw = made.packed.numpy().tobytes()
    assert len(raw) > 64 << 10
    assert read_sizes(raw) is not read_sizes(raw)
    assert read_sizes(raw) == made.sizes


@pytest.mark.parametrize(
    "payload",
    [
        with_requests(torch.ones(4)),
        with_requests(torch.ones(4, 1, dtype=torch.uint8)),
        with_requests(torch.empty(0, dtype=torch.uint8)),
        with_requests(packed((1, ["x"], [4], [], {})), {}),
        with_requests({}, {"a": torch.ones(3, 4, 2), "b": packed((1, ["x"], [4]))}),  # type: ignore[arg-type]
        with_requests({"a": packed((1, ["x"], [4]))}),  # type: ignore[arg-type]
        with_requests(packed(None)),
        with_requests(packed({"dim": 1})),
        with_requests(packed((1, ["x"], [5]))),
        with_requests(packed((3, ["x"], [4]))),
        with_requests(packed((-4, ["x"], [4]))),
        with_requests(packed((1, ["x", "x"], [2, 2]))),
        with_requests(packed((1, ["x", "y"], [4]))),
        with_requests(packed((1, ["x"], [2, 2]))),
        with_requests(packed((1, ["x", "y"], [5, -1]))),
        with_requests(packed((1, ["x"], [4], ["x"], {}, 1))),
        with_requests(packed((1, [""], [4]))),
        tree({"requests": packed((1, ["x"], [4])), "data": {}, "position": FIRST.encode()}),
    ],
)
def test_what_are_no_requests_is_refused(payload: Written) -> None:
    with pytest.raises(WireError):
        open_chunk(*payload)


@pytest.mark.parametrize("size", [0, 1, 7, 64])
def test_bytes_that_are_no_requests_are_refused(size: int) -> None:
    with pytest.raises(WireError, match="the requests of a chunk"):
        read_sizes(b"\x93" * size)
