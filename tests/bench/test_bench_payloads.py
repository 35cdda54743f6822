"""The caches that are sent, and what they are compared with on arrival."""

from __future__ import annotations

import numpy as np
import pytest

from omni_kvlink import KVCacheBundle, KVCacheTransferData, PagedTensor
from omni_kvlink.bench.cases import BRANCHINGS, TENSOR_BRANCHINGS, TENSORS, cases
from omni_kvlink.bench.payloads import (
    Sources,
    found_in,
    make_bundle,
    make_sample,
    make_tensor_sample,
)
from omni_kvlink.bench.setups import Shape
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.views import dense

SHAPE = Shape(2, 5, 3, 8)


@pytest.mark.parametrize("heads", [3, 0])
@pytest.mark.parametrize("sources", ["contiguous", "strided"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_sample_is_of_its_shape(dtype: str, sources: Sources, heads: int) -> None:
    shape = Shape(2, 5, heads, 8, dtype)
    sample = make_sample("k", shape, np.random.default_rng(0), sources=sources)
    tensors = sample.cache.tensors()
    assert sum(tensor.nbytes for tensor in tensors) == shape.nbytes
    assert all(dense(t).is_contiguous() is (sources == "contiguous") for t in tensors)


def test_the_raw_bytes_are_those_of_the_tensors() -> None:
    sample = make_sample("k", SHAPE, np.random.default_rng(0), block_ids=(4, 2))
    assert sample.expected() == found_in(sample.cache)
    assert sample.expected(tokens=4)["digests"] != found_in(sample.cache)["digests"]


@pytest.mark.parametrize("heads", [3, 0])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_paged_sample_is_in_blocks_out_of_order(dtype: str, heads: int) -> None:
    shape = Shape(2, 100, heads, 8, dtype)
    sample = make_sample("k", shape, np.random.default_rng(0), sources="paged")
    views = sample.cache.tensors()
    assert all(isinstance(view, PagedTensor) for view in views)
    assert sum(view.nbytes for view in views) == shape.nbytes
    assert len(sample.cache.block_ids) == 7
    assert sample.cache.block_ids != sorted(sample.cache.block_ids)
    assert sample.cache.metadata.block_size == 16
    assert sample.expected() == found_in(sample.cache)


@pytest.mark.parametrize("sources", ["contiguous", "strided", "paged"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_nested_tensors_are_what_is_expected(dtype: str, sources: Sources) -> None:
    shape = Shape(2, 37, 3, 8, dtype)
    data, expected = make_tensor_sample("k", shape, np.random.default_rng(0), sources=sources)
    assert found_in(data) == expected
    assert any(isinstance(view, PagedTensor) for view in data.tensors()) is (sources == "paged")


def test_a_bundle_has_one_branch_with_bytes() -> None:
    sample = make_sample("k", SHAPE, np.random.default_rng(0))
    bundle = make_bundle(sample, 4, np.random.default_rng(1))
    assert list(bundle) == ["gen", "cfg_text", "cfg_img", "branch_3"]
    assert bundle.plan().nbytes < sample.shape.nbytes + 8192
    assert bundle.reused_nbytes == sample.shape.nbytes * (2 + 5 + 2) // 5


@pytest.mark.parametrize("quick", [False, True])
def test_every_kind_of_case_is_in_the_matrix(quick: bool) -> None:
    every_case = list(cases(quick=quick))
    chosen = [case for case in every_case if case.rows != TENSORS]
    tensors = [case for case in every_case if case.rows == TENSORS]
    assert {case.shape.dtype for case in tensors} == set(KV_DTYPES)
    assert {case.branching for case in tensors} == set(TENSOR_BRANCHINGS)
    assert {case.sources for case in tensors} == {"contiguous", "strided", "paged"}
    assert {case.shape.dtype for case in chosen} == set(KV_DTYPES)
    assert {case.branching for case in chosen} == set(BRANCHINGS)
    assert {case.shape.layout for case in chosen} == {"NHD", "ND"}
    assert {case.sources for case in chosen} == {"contiguous", "strided", "paged"}
    assert {1, 7, 255} <= {case.shape.tokens for case in chosen}
    assert [case.number for case in every_case] == list(range(len(every_case)))


def test_a_case_can_be_made_twice_alike() -> None:
    case = next(case for case in cases(quick=True) if case.branching == "mixed")
    (key, first, expected), (_, second, again) = case.make(), case.make()
    assert key == first.request_id
    assert isinstance(first, KVCacheBundle)
    assert isinstance(second, KVCacheBundle)
    assert first.difference(second) == ""
    assert expected == again
    assert isinstance(first["half"], KVCacheTransferData)
