"""`TensorTransferData`: named tensors, nested, of every dtype and shape, bit-exact."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_kvlink import ClosedError, IntegrityError, PrefixOf, SameAs, SchemaError
from omni_kvlink.payload.bundle import KVCacheBundle, open_payload
from omni_kvlink.payload.dtypes import DTYPES
from omni_kvlink.payload.format import KV_VERSION, MAX_DEPTH, MAX_TENSORS
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_data import TensorTransferData
from support.payloads import strategies
from support.payloads.random_caches import bits, cache, noise, written
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
shapes: st.SearchStrategy[list[int]] = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, shape and bits, sometimes strided."""
    shape = draw(shapes)
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    tensor = tensor_of(shape, dtype, draw(st.integers(0, 999)))
    is_strided = draw(st.booleans())
    return tensor.transpose(0, -1) if shape and is_strided else tensor


trees = st.recursive(
    tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def data(draw: st.DrawFn) -> TensorTransferData:
    """Nested tensors and metadata."""
    tree = draw(st.dictionaries(keys, trees, max_size=4))
    return TensorTransferData(draw(strategies.request_ids), tree, draw(strategies.extras))


def tensor_of(shape: list[int], dtype: str, seed: int = 0) -> torch.Tensor:
    if dtype == "bool":  # its bytes are 0 or 1
        return (noise(seed, shape, "uint8") if math.prod(shape) else torch.empty(shape)) > 7
    if not math.prod(shape):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return noise(seed, shape, dtype)


def example(request_id: str = "r") -> TensorTransferData:
    return TensorTransferData(
        request_id,
        {
            "hidden": [tensor_of([3, 4], "bfloat16"), {"a/b~": tensor_of([5], "int64", 1)}],
            "scale": torch.tensor(0.5, dtype=torch.float64),
            "mask": torch.tensor([True, False]),
            "none": torch.empty(0, 3),
            "empty": {"list": [], "dict": {}},
        },
        {"step": 3, "names": ["x", None]},
    )


def received(payload: TensorTransferData | KVCacheBundle) -> Any:
    manifest, mapping = written(payload)
    return open_payload(manifest, mapping.region)


@settings(max_examples=EXAMPLES * 150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data())
def test_any_tree_arrives_as_it_was(payload: TensorTransferData) -> None:
    manifest, mapping = written(payload)
    assert Manifest.decode(mapping.region.view()) == manifest
    found = open_payload(manifest, mapping.region)
    assert isinstance(found, TensorTransferData)
    assert found.difference(payload) == "" == payload.difference(found)
    assert [bits(a) for a in found.tensors()] == [bits(b) for b in payload.tensors()]


@settings(max_examples=EXAMPLES * 25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data())
def test_save_and_load(tmp_path: Path, payload: TensorTransferData) -> None:
    payload.save(tmp_path / "t.safetensors")
    assert TensorTransferData.load(tmp_path / "t.safetensors").difference(payload) == ""
    stock = safetensors.torch.load_file(tmp_path / "t.safetensors")
    named = {name: tensor for name, tensor in stock.items() if not name.startswith("pad.")}
    expected = {
        spec.name: tensor
        for spec, tensor in zip(payload.plan().tensors, payload.tensors(), strict=True)
    }
    assert {name: bits(tensor) for name, tensor in named.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [[], [0], [3, 0, 2], [1], [5, 3], [2] * 8])
def test_every_dtype_and_shape(dtype: str, shape: list[int]) -> None:
    payload = TensorTransferData("r", {"t": tensor_of(shape, dtype)})
    found = received(payload)["t"]
    assert (found.dtype, list(found.shape)) == (getattr(torch, dtype), shape)
    assert bits(found) == bits(payload["t"])


def test_views_share_the_payload_and_outlive_it() -> None:
    manifest, mapping = written(example())
    found = TensorTransferData.from_region(manifest, mapping.region)
    kept = found["hidden"][0]
    at = kept.data_ptr() - mapping.region.address
    assert at == manifest.header_nbytes + manifest.tensors[0].start
    found.close()
    del mapping
    assert bits(kept) == bits(example()["hidden"][0])


def test_structure_and_metadata_are_restored() -> None:
    found = received(example())
    assert list(found) == ["hidden", "scale", "mask", "none", "empty"]
    assert len(found) == 5
    assert found["empty"] == {"list": [], "dict": {}}
    assert found.metadata == {"step": 3, "names": ["x", None]}
    assert found["scale"].shape == ()
    with pytest.raises(KeyError, match="'other'; this payload has hidden, scale"):
        found["other"]


def test_a_tuple_becomes_a_list() -> None:
    payload = TensorTransferData("r", {"t": (torch.ones(1), (torch.zeros(2),))})
    assert isinstance(payload["t"], list)
    assert isinstance(payload["t"][1], list)
    assert received(payload).difference(payload) == ""


def test_the_given_dict_may_change_afterwards() -> None:
    given_tree, metadata = {"a": [torch.ones(2)]}, {"n": [1]}
    payload = TensorTransferData("r", given_tree, metadata)
    given_tree["a"].append(torch.ones(3))
    metadata["n"].append(2)
    assert len(payload.tensors()) == 1
    assert payload.metadata == {"n": [1]}


def test_no_tensors_but_metadata() -> None:
    payload = TensorTransferData("r", {}, {"only": True})
    manifest, _ = written(payload)
    assert manifest.nbytes == manifest.header_nbytes
    assert received(payload).metadata == {"only": True}


def test_a_paged_tensor_may_stand_for_a_tensor() -> None:
    pool = tensor_of([4, 2, 3], "int64")
    paged = PagedTensor(pool, BlockTable.of_blocks([2, 0], block_size=2, tokens=3))
    found = received(TensorTransferData("r", {"p": paged}))["p"]
    assert bits(found) == bits(torch.cat([pool[2], pool[0]])[:3])


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    return tree


def deep(levels: int) -> dict[str, Any]:
    """A tree of that many levels of dicts, a tensor in the last."""
    tree: Any = torch.ones(1)
    for _ in range(levels):
        tree = {"d": tree}
    return tree  # type: ignore[no-any-return]


def nested_lists(levels: int) -> dict[str, Any]:
    value: list[Any] = []
    for _ in range(levels - 2):
        value = [value]
    return {"x": value}


WRONG: list[tuple[str, Any, Any, str]] = [
    ("no dict", [torch.ones(1)], None, "tensors: a list, wanted a dict"),
    ("a number", {"a": [torch.ones(1), 7]}, None, "tensor 'a/1' is a int"),
    ("none", {"a": {"b": None}}, None, "tensor 'a/b' is a NoneType"),
    ("a key that is no string", {"a": {7: torch.ones(1)}}, None, "key 'a/7' is no string"),
    ("a surrogate", {"\ud800": torch.ones(1)}, None, "is no string of Unicode"),
    ("complex", {"a": torch.ones(1, dtype=torch.complex64)}, None, "'a': dtype torch.complex64"),
    ("sparse", {"a": torch.eye(2).to_sparse()}, None, "'a' is a torch.sparse"),
    ("9 dimensions", {"a": torch.ones([1] * 9)}, None, "'a' has 9 dimensions"),
    ("a cycle", cyclic(), None, "nested deeper"),
    ("too deep", deep(MAX_DEPTH + 1), None, "nested deeper"),
    ("too many", {"a": [torch.ones(1)] * (MAX_TENSORS + 1)}, None, "more than 4096"),
    ("metadata NaN", {}, {"x": float("nan")}, "metadata"),
    ("metadata tuple", {}, {"x": (1, 2)}, "metadata"),
    ("metadata keys", {}, {1: 2}, "metadata"),
    ("metadata an object", {}, {"x": object()}, "metadata"),
    ("metadata a list", {}, [1], "metadata: a list"),
    ("metadata too deep", {}, nested_lists(MAX_DEPTH + 1), "nested deeper"),
]


@pytest.mark.parametrize(
    ("tree", "metadata", "text"), [pytest.param(*rest, id=name) for name, *rest in WRONG]
)
def test_a_wrong_one_cannot_be_constructed(tree: Any, metadata: Any, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        TensorTransferData("r", tree, metadata)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_deepest_one_is_sent() -> None:
    payload = TensorTransferData("r", deep(MAX_DEPTH), nested_lists(MAX_DEPTH))
    assert received(payload).difference(payload) == ""


@pytest.mark.parametrize("request_id", ["", "r" * 1025, "\ud800", 7])
def test_a_wrong_request_id_is_refused(request_id: Any) -> None:
    with pytest.raises(SchemaError, match="request_id"):
        TensorTransferData(request_id, {})


def test_a_header_that_grows_too_large_is_refused() -> None:
    payload = TensorTransferData("r", {"k" * 200_000 * n: torch.ones(1) for n in range(1, 4)})
    with pytest.raises(SchemaError, match="header of"):
        payload.plan()


def test_closed_is_closed() -> None:
    payload = example()
    payload.close()
    payload.close()
    with pytest.raises(ClosedError, match="released"):
        payload.tensors()
    assert "released" in repr(payload)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t["hidden"][0].view(torch.uint8)[0, 0].bitwise_xor_(1), "tensor 'hidden/0'"),
        (lambda t: t["hidden"].append(torch.ones(1)), "tensors: "),
        (lambda t: t.update(mask=torch.tensor([1, 0], dtype=torch.uint8)), "tensor 'mask'"),
        (lambda t: t.update(scale=torch.tensor([0.5], dtype=torch.float64)), "tensor 'scale'"),
        (lambda t: t.update({"none": t.pop("none")}), "tensors: "),
    ],
)
def test_a_difference_is_named(change: Any, text: str) -> None:
    one, other = example(), example()
    change(other.tree)
    assert one.difference(other).startswith(text)
    other = TensorTransferData("r", one.tree, {"step": 4})
    assert one.difference(other).startswith("metadata: ")


def test_signed_zeros_and_nans_are_distinguished() -> None:
    one = TensorTransferData("r", {"t": torch.tensor([0.0])})
    assert one.difference(TensorTransferData("r", {"t": torch.tensor([-0.0])})) == "tensor 't'"
    nan = TensorTransferData("r", {"t": torch.tensor([float("nan")])})
    assert received(nan).difference(nan) == ""


def test_blank_plans_what_is_put_later() -> None:
    metas = {"a": torch.empty(3, 4, device="meta"), "b": [torch.empty(2, dtype=torch.int64)]}
    blank = TensorTransferData.blank("r", metas)
    real = TensorTransferData("r", {"a": torch.ones(3, 4), "b": [torch.ones(2).long()]})
    assert blank.plan() == real.plan()
    assert all(isinstance(t, torch.Tensor) and t.is_meta for t in blank.tensors())
    smaller = TensorTransferData("r", {"a": torch.ones(1, 4), "b": [torch.ones(2).long()]})
    plan = smaller.plan(capacity=blank.plan().as_capacity())
    assert [spec.nbytes for spec in plan.tensors] == [16, 16]
    with pytest.raises(SchemaError, match="branch 'tensors', tensor 'a': 64 bytes, allocated"):
        TensorTransferData("r", {"a": torch.ones(4, 4)}).plan(capacity=blank.plan().as_capacity())
    with pytest.raises(SchemaError, match="'tensors/z'"):
        TensorTransferData("r", {"z": torch.ones(1)}).plan(capacity=blank.plan().as_capacity())


def test_a_plan_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="tensor 'a' has no bytes"):
        TensorTransferData.blank("r", {"a": torch.ones(3)}).save(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_each_tensor_is_a_layer_of_a_stream() -> None:
    layers = example().plan().layers()
    assert [(branch.name, layer, tuple(numbers)) for branch, layer, numbers in layers] == [
        ("tensors", number, (number,)) for number in range(5)
    ]


def test_a_flipped_bit_is_located(tmp_path: Path) -> None:
    example().save(tmp_path / "t")
    payload = bytearray((tmp_path / "t").read_bytes())
    manifest = Manifest.decode(bytes(payload))
    payload[manifest.header_nbytes + manifest.tensors[1].start] ^= 1
    (tmp_path / "t").write_bytes(payload)
    with pytest.raises(IntegrityError, match="branch 'tensors', tensor 'hidden/1/a~1b~0'"):
        TensorTransferData.load(tmp_path / "t")


def test_the_other_kinds_are_named(tmp_path: Path) -> None:
    example().save(tmp_path / "t")
    cache().save(tmp_path / "c")
    with pytest.raises(SchemaError, match=r"holds a TensorTransferData: TensorTransferData\.load"):
        KVCacheTransferData.load(tmp_path / "t")
    with pytest.raises(SchemaError, match=r"holds a TensorTransferData: TensorTransferData\.load"):
        KVCacheBundle.load(tmp_path / "t")
    with pytest.raises(SchemaError, match=r"holds a KVCacheTransferData"):
        TensorTransferData.load(tmp_path / "c")


def test_a_cache_alone_keeps_its_version() -> None:
    assert b'\\"version\\":[1,0]' in cache().plan().encode()
    assert b'\\"version\\":[1,1]' in example().plan().encode()
    assert KV_VERSION == (1, 0)


# ---- bundles of both kinds


def mixed() -> KVCacheBundle:
    prefix = PrefixOf("gen", 2, KVMetadata((2,), (1,), 2))
    return KVCacheBundle(
        "r", {"hidden": example(), "gen": cache(), "cfg": prefix, "twin": SameAs("gen")}
    )


def test_a_bundle_holds_both_kinds(tmp_path: Path) -> None:
    bundle = mixed()
    found = received(bundle)
    assert found.difference(bundle) == ""
    assert list(found.branches) == ["hidden", "gen", "cfg", "twin"]
    assert list(found) == ["gen", "cfg", "twin"]
    assert len(found) == 3
    assert found.tensor_data["hidden"].difference(example()) == ""
    assert found["gen"].difference(cache()) == ""
    with pytest.raises(KeyError, match="tensor_data"):
        found["hidden"]
    bundle.save(tmp_path / "b")
    assert KVCacheBundle.load(tmp_path / "b").difference(bundle) == ""
    found.close()
    with pytest.raises(ClosedError):
        found.tensors()


def test_a_bundle_differs_by_its_tensors() -> None:
    other = mixed()
    other.tensor_data["hidden"]["mask"][0] = False
    assert mixed().difference(other) == "branch 'hidden', tensor 'mask'"
    swapped = KVCacheBundle("r", {**mixed().branches, "hidden": cache()})
    assert mixed().difference(swapped).startswith("branch 'hidden': ")


def test_only_caches_are_reused() -> None:
    with pytest.raises(SchemaError, match="'hidden'"):
        KVCacheBundle("r", {"hidden": example(), "twin": SameAs("hidden")})
    with pytest.raises(SchemaError, match="request 'q'"):
        KVCacheBundle("r", {"hidden": example("q")})
