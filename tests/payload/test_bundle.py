from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from omni_kvlink import (
    ClosedError,
    KVCacheBundle,
    KVCacheTransferData,
    KVMetadata,
    PrefixOf,
    SameAs,
    SchemaError,
)
from omni_kvlink.payload.format import MAX_BRANCHES
from omni_kvlink.payload.views import dense
from support.payloads import strategies
from support.payloads.random_caches import bits, cache, empty, written
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable


def about(tokens: int, **other: Any) -> KVMetadata:
    values: dict[str, Any] = {"kv_lens": (tokens,), "ropes": (1,), "num_layers": 2, **other}
    return KVMetadata(**values)


def bagel() -> KVCacheBundle:
    """As an image editor sends it: a prefix, a twin, and a branch without a token."""
    return KVCacheBundle(
        "r",
        {
            "cfg_text": PrefixOf("gen", 2, about(2)),
            "gen": cache(shape=(5, 2, 4), dtype="bfloat16", ropes=[3]),
            "cfg_img": cache(shape=(4, 2, 4), dtype="bfloat16", seed=100),
            "twin": SameAs("gen"),
            "other_twin": SameAs("gen", about(5, extra={"own": True})),
            "none": empty(),
        },
    )


@settings(max_examples=EXAMPLES * 40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.bundles())
def test_every_branch_survives_the_wire(bundle: KVCacheBundle) -> None:
    manifest, mapping = written(bundle)
    found = KVCacheBundle.from_region(manifest, mapping.region)
    assert found.difference(bundle) == bundle.difference(found) == ""
    for name in bundle:
        assert found[name].metadata == bundle[name].metadata
        assert [bits(t) for t in found[name].tensors()] == [bits(t) for t in bundle[name].tensors()]


def test_no_byte_is_sent_twice() -> None:
    bundle = bagel()
    gen, img = bundle["gen"], bundle["cfg_img"]
    own = sum(t.nbytes for t in gen.tensors() + img.tensors())
    manifest = bundle.plan()
    assert sum(spec.nbytes for spec in manifest.tensors) == own
    assert {spec.name.split(".")[0] for spec in manifest.tensors} == {"gen", "cfg_img"}
    assert bundle.reused_nbytes == 4 * (2 + 5 + 5) * 2 * 4 * 2


def test_a_prefix_is_a_view_of_its_source() -> None:
    bundle = bagel()
    for short, whole in zip(bundle["cfg_text"].tensors(), bundle["gen"].tensors(), strict=True):
        assert isinstance(short, torch.Tensor)
        assert isinstance(whole, torch.Tensor)
        assert short.data_ptr() == whole.data_ptr()
        assert bits(short) == bits(whole[:2])
    assert bundle["cfg_text"].metadata == about(2, dtype="bfloat16")


def test_a_twin_has_the_same_tensors_and_perhaps_its_own_metadata() -> None:
    bundle = bagel()
    for name in ("twin", "other_twin"):
        pairs = zip(bundle[name].tensors(), bundle["gen"].tensors(), strict=True)
        assert all(dense(a).data_ptr() == dense(b).data_ptr() for a, b in pairs)
    assert bundle["twin"].metadata == bundle["gen"].metadata
    assert bundle["other_twin"].metadata.extra == {"own": True}


def test_it_is_a_collection_of_branches() -> None:
    bundle = bagel()
    assert list(bundle) == ["cfg_text", "gen", "cfg_img", "twin", "other_twin", "none"]
    assert len(bundle) == 6
    assert isinstance(bundle.branches["twin"], SameAs)
    assert "gen" in repr(bundle)
    with pytest.raises(KeyError, match=r"nobody.*cfg_text, gen"):
        bundle["nobody"]


def make(**branches: Any) -> Callable[[], KVCacheBundle]:
    return lambda: KVCacheBundle("r", {"gen": cache(), **branches})


@pytest.mark.parametrize(
    ("build", "texts"),
    [
        (lambda: KVCacheBundle("r", {}), ["0 branches"]),
        (lambda: KVCacheBundle("q", {"gen": cache("r")}), ["gen", "'r'", "'q'"]),
        (lambda: KVCacheBundle("r", {f"b{n}": empty() for n in range(MAX_BRANCHES + 1)}),
         [str(MAX_BRANCHES + 1), str(MAX_BRANCHES)]),
        (make(b=PrefixOf("gone", 2, about(2))), ["'b'", "'gone'", "no tensors of its own"]),
        (make(b=SameAs("gone")), ["'b'", "'gone'", "no tensors of its own"]),
        (make(b=SameAs("b")), ["'b'", "no tensors of its own"]),
        (make(b=SameAs("gen"), c=SameAs("b")), ["'c'", "'b'", "no tensors of its own"]),
        (make(b=PrefixOf("gen", 4, about(4))), ["'b'", "4 tokens", "'gen' (3 tokens)"]),
        (make(b=PrefixOf("gen", 0, about(0))), ["'b'", "0 tokens"]),
        (make(b=PrefixOf("gen", -1, about(2))), ["'b'", "-1 tokens"]),
        (make(b=PrefixOf("gen", 2, about(3))), ["'b'", "2 tokens", "its own length is 3"]),
        (make(b=SameAs("gen", about(2))), ["'b'", "3 tokens", "its own length is 2"]),
        (make(b=PrefixOf("gen", 2, about(2, num_layers=3))), ["'b'", "num_layers", "3", "2"]),
        (make(b=PrefixOf("gen", 2, about(2, dtype="int8"))), ["'b'", "dtype", "int8", "float32"]),
        (make(b=PrefixOf("gen", 2, about(2, layout="ND"))), ["'b'", "layout", "ND", "NHD"]),
        (make(b=empty(), c=SameAs("b")), ["'c'", "0 tokens"]),
        (make(b={"branch": "gen"}), ["'b'", "dict", "PrefixOf"]),
        (make(b=None), ["'b'", "NoneType"]),
        (make(b=PrefixOf("gen", 2, {"kv_lens": [2]})), ["'b'", "KVMetadata"]),  # type: ignore[arg-type]
        (make(b=PrefixOf("gen", 2, None)), ["'b'", "KVMetadata"]),  # type: ignore[arg-type]
        (lambda: KVCacheBundle("r", {1: cache()}), ["name", "int"]),  # type: ignore[dict-item]
        *((make(**{name: cache()}), ["name", "64"])
          for name in ("", "a.b", "a/b", "pad", "é", "a" * 65, "1a")),
    ],
)  # fmt: skip
def test_a_wrong_one_cannot_exist(build: Callable[[], Any], texts: list[str]) -> None:
    with pytest.raises(SchemaError) as caught:
        build()
    assert all(word in str(caught.value) for word in texts), str(caught.value)


def replaced(**branches: Any) -> KVCacheBundle:
    return KVCacheBundle("r", {**bagel().branches, **branches})


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        (replaced(cfg_text=PrefixOf("gen", 3, about(3))), ["'cfg_text'", "tokens=2", "tokens=3"]),
        (replaced(cfg_text=PrefixOf("cfg_img", 2, about(2))), ["'cfg_text'", "'cfg_img'"]),
        (replaced(cfg_text=PrefixOf("gen", 2, about(2, ropes=(9,)))), ["'cfg_text'", "metadata"]),
        (replaced(cfg_img=cache(shape=(4, 2, 4), dtype="bfloat16")), ["'cfg_img'", "layer 0, K"]),
        (replaced(twin=SameAs("gen", about(5))), ["'twin'", "metadata"]),
        (replaced(twin=bagel()["gen"]), ["'twin'", "None"]),
        (replaced(more=empty()), ["here", "there", "more"]),
        (KVCacheBundle("r", dict(reversed(bagel().branches.items()))), ["here", "there"]),
    ],
)
def test_difference_names_the_branch(other: KVCacheBundle, texts: list[str]) -> None:
    found = bagel().difference(other)
    assert all(word in found for word in texts), found
    assert bagel().difference(bagel()) == ""


def test_one_cache_and_a_bundle_are_not_taken_for_each_other() -> None:
    manifest, mapping = written(bagel())
    with pytest.raises(SchemaError, match="KVCacheBundle"):
        KVCacheTransferData.from_region(manifest, mapping.region)
    manifest, mapping = written(cache())
    with pytest.raises(SchemaError, match="KVCacheTransferData"):
        KVCacheBundle.from_region(manifest, mapping.region)


def test_closed_is_closed() -> None:
    bundle = bagel()
    kept = bundle["cfg_text"]
    bundle.close()
    for name in ("gen", "cfg_text", "twin"):
        with pytest.raises(ClosedError):
            bundle[name].tensors()
    assert kept.tensors()[0].shape == (2, 2, 4)


def test_the_layers_of_the_only_cache() -> None:
    alone = KVCacheBundle("r", {"gen": cache("r")})
    assert alone.layer_blocks is alone["gen"].layer_blocks
    several = KVCacheBundle("r", {"gen": cache("r"), "text": cache("r")})
    with pytest.raises(AttributeError, match=r"2 caches: choose bundle\['gen'\].layer_blocks or"):
        several.layer_blocks  # noqa: B018
    assert not hasattr(several, "layer_blocks")
