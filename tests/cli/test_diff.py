"""`kvlink diff`: the first byte, the picture, the largest difference; what cannot be compared."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVCacheBundle, PrefixOf, SameAs, TensorTransferData
from omni_kvlink.cli.commands import run
from omni_kvlink.payload.dtypes import ITEMSIZE
from support.payloads.payload_files import flip, saved
from support.payloads.random_caches import DTYPES, cache
from support.payloads.small_payloads import bundle, nested

if TYPE_CHECKING:
    from pathlib import Path

    from omni_kvlink.payload.bundle import Payload

Captured = pytest.CaptureFixture[str]


def diff(folder: Path, capsys: Captured, a: Payload, b: Payload) -> tuple[int, str, dict[str, Any]]:
    """Exit status, text with single spaces, and document of the comparison."""
    paths = [str(folder / name) for name in "ab"]
    for path, data in zip(paths, (a, b), strict=True):
        data.save(path)
    status = run(["diff", *paths])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= max(80, len(paths[0]) + 3)
    assert run(["diff", "--json", *paths]) == status
    return status, text, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("make", [cache, bundle, nested])
def test_equal_payloads_are_equal(make: Any, tmp_path: Path, capsys: Captured) -> None:
    status, text, document = diff(tmp_path, capsys, make("a"), make("b"))
    assert status == 0
    assert "equal" in text
    assert "request_id: 'a' in A, 'b' in B" in text
    assert document["equal"] is True


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_byte_is_named_in_each_dtype(
    dtype: str, tmp_path: Path, capsys: Captured
) -> None:
    paths = a, b = tmp_path / "a", tmp_path / "b"
    for path in paths:
        manifest = saved(cache(shape=(50, 4, 8), dtype=dtype), path)
    spec, choose = manifest.tensors[3], random.Random(dtype)
    offset = choose.randrange(spec.nbytes)
    flip(b, manifest.header_nbytes + spec.start + offset, 0x42)
    assert run(["diff", str(a), str(b)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    element = offset // ITEMSIZE[spec.dtype]
    token, head, dim = element // 32, element // 8 % 4, element % 8
    where = f"layer 1, V: first at token {token}, head {head}, dim {dim}: byte {offset}"
    assert where in text
    assert "1 of 1,600 elements differ" in text
    assert run(["diff", "--json", str(a), str(b)]) == 1
    [found] = json.loads(capsys.readouterr().out)["branches"]["kv"]
    here, there = found["first"]["a"], found["first"]["b"]
    assert here["file_offset"] == there["file_offset"]
    assert here["byte"] ^ there["byte"] == 0x42
    assert a.read_bytes()[here["file_offset"]] == here["byte"]


def test_the_picture_shows_layers_and_tokens(tmp_path: Path, capsys: Captured) -> None:
    a, b = cache(layers=6, shape=(40, 2, 4)), cache(layers=6, shape=(40, 2, 4))
    b.layer_blocks["value_cache"][3][10:12] = 0  # type: ignore[index]
    b.layer_blocks["value_cache"][3][20, 0, 0] = 7  # type: ignore[index]
    _, text, _ = diff(tmp_path, capsys, a, b)
    [row] = [line for line in text.splitlines() if line.startswith("  3 V ")]
    assert row == "  3 V " + "." * 10 + "@@" + "." * 8 + "#" + "." * 19
    assert "0 K to 3 K: equal" in text
    assert "4 K to 5 V: equal" in text
    assert "tokens 0 to 39, a character is a token" in text


def test_the_largest_difference_is_of_finite_values(tmp_path: Path, capsys: Captured) -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    b = torch.tensor([1.0, 2.5, float("nan"), 7.0], dtype=torch.bfloat16)
    parts = (TensorTransferData("r", {"x": tensor}) for tensor in (a, b))
    status, text, document = diff(tmp_path, capsys, *parts)
    assert status == 1
    assert "3 of 4 elements differ, by 3 at most; 1 are not finite" in text
    [found] = document["branches"]["tensors"]
    assert (found["max_abs"], found["not_finite"], found["first"]["a"]["index"]) == (3.0, 1, [1])
    assert found["first"]["b"]["value"] == 2.5


def test_zeros_of_two_signs_differ(tmp_path: Path, capsys: Captured) -> None:
    parts = (TensorTransferData("r", {"x": torch.tensor(value)}) for value in (0.0, -0.0))
    status, text, _ = diff(tmp_path, capsys, *parts)
    assert status == 1
    assert "0x00 in A, 0x80 in B; value 0 in A, -0 in B" in " ".join(text.split())


def test_unequal_lengths_are_compared_where_they_overlap(tmp_path: Path, capsys: Captured) -> None:
    long, short = cache(shape=(9, 2, 4)), cache(shape=(6, 2, 4))
    for part in ("key_cache", "value_cache"):
        for mine, theirs in zip(long.layer_blocks[part], short.layer_blocks[part], strict=True):
            theirs.copy_(mine[:6])  # type: ignore[union-attr, index]
    status, text, document = diff(tmp_path, capsys, long, short)
    assert status == 1
    assert "[9, 2, 4] in A, [6, 2, 4] in B: compared where they overlap" in " ".join(text.split())
    assert "kv_lens: [9] in A, [6] in B" in text
    assert all(one["elements"] == 0 for one in document["branches"]["kv"])


def test_layouts_dtypes_and_layers_that_differ_are_said(tmp_path: Path, capsys: Captured) -> None:
    status, text, _ = diff(tmp_path, capsys, cache(), cache(shape=(3, 8)))
    assert status == 1
    assert "layout: 'NHD' in A, 'ND' in B" in text
    assert "layer 0, K and 3 tensors behind it: in A alone" in " ".join(text.split())
    _, text, _ = diff(tmp_path, capsys, cache(), cache(dtype="float16"))
    assert "F32 in A, F16 in B" in text
    _, text, _ = diff(tmp_path, capsys, cache(layers=2), cache(layers=3))
    assert "layer 2, K and 1 tensors behind it: in B alone" in " ".join(text.split())


def test_ranks_that_differ_are_not_compared(tmp_path: Path, capsys: Captured) -> None:
    parts = (TensorTransferData("r", {"x": torch.ones(shape)}) for shape in ((2, 3), (6,)))
    status, text, _ = diff(tmp_path, capsys, *parts)
    assert status == 1
    assert "F32 [2, 3] in A, F32 [6] in B: not compared" in " ".join(text.split())


def test_a_reused_branch_is_compared_by_its_bytes(tmp_path: Path, capsys: Captured) -> None:
    whole = cache(shape=(5, 2, 4))
    metadata = cache(shape=(3, 2, 4)).metadata
    part = whole.first_tokens(3, metadata)
    a = KVCacheBundle("r", {"gen": whole, "cfg": PrefixOf("gen", 3, metadata), "x": SameAs("gen")})
    b = KVCacheBundle("r", {"gen": whole, "cfg": part, "x": whole})
    status, text, _ = diff(tmp_path, capsys, a, b)
    assert status == 0
    assert "reuse" in text
    other = cache(shape=(3, 2, 4), seed=9)
    status, text, _ = diff(tmp_path, capsys, a, KVCacheBundle("r", {**b.branches, "cfg": other}))
    assert status == 1
    assert "cfg: 4 of 4 tensors differ" in text
    assert "gen: 4 tensors, equal" in text


def test_branches_of_one_side_are_said(tmp_path: Path, capsys: Captured) -> None:
    tree = TensorTransferData("r", {"x": torch.ones(0, 4), "y": torch.ones(())})
    status, text, document = diff(tmp_path, capsys, tree, cache())
    assert status == 1
    assert document["complaints"] == ["branch 'tensors' is in A alone", "branch 'kv' is in B alone"]
    status, text, _ = diff(tmp_path, capsys, tree, tree)
    assert (status, "2 tensors, equal" in text) == (0, True)


def test_a_directory_or_a_missing_file_gives_one_line(tmp_path: Path, capsys: Captured) -> None:
    cache().save(tmp_path / "a")
    for path in (tmp_path, tmp_path / "none"):
        assert run(["diff", str(tmp_path / "a"), str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
