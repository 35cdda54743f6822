"""NaiveCache to and from transfer data; references in a bundle only where the bytes agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_kvlink import PrefixOf, SameAs, SchemaError
from omni_kvlink.adapters import BagelAdapter, pack_generator, unpack_generator
from omni_kvlink.models.bagel import BagelContext, NaiveCache
from omni_kvlink.models.bagel.cache import layer_tensors
from omni_kvlink.payload.views import same_bytes
from omni_kvlink.testing import check_adapter

LAYERS, HEADS, DIM = 3, 2, 8


def naive(tokens: int, *, kind: type = dict, seed: int = 0) -> Any:
    """A cache of random bytes, NaN patterns included."""
    generator = torch.Generator().manual_seed(seed)

    def layers() -> Any:
        shape = (tokens, HEADS, DIM * 2)
        made = [
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(
                torch.bfloat16
            )
            for _ in range(LAYERS)
        ]
        return dict(enumerate(made)) if kind is dict else made

    return SimpleNamespace(key_cache=layers(), value_cache=layers())


def context(cache: Any, tokens: int, rope: int | None = None) -> BagelContext:
    return BagelContext([tokens], [tokens if rope is None else rope], cache)


def first(cache: Any, tokens: int) -> NaiveCache:
    """An earlier snapshot of a cache: equal bytes in memory of their own."""
    head = NaiveCache(LAYERS)
    for layer in range(LAYERS):
        head.key_cache[layer] = cache.key_cache[layer][:tokens].clone()
        head.value_cache[layer] = cache.value_cache[layer][:tokens].clone()
    return head


def empty() -> BagelContext:
    return BagelContext.empty(LAYERS)


@pytest.mark.parametrize("kind", [dict, list])
def test_export_and_load_without_a_copy(kind: type[dict[int, Any]] | type[list[Any]]) -> None:
    cache = naive(5, kind=kind)
    metadata = {"kv_lens": [5], "ropes": [3]}
    data = BagelAdapter().export(cache, request_id="r", metadata=metadata)
    assert data.metadata.num_layers == LAYERS
    assert data.metadata.ropes == (3,)
    for layer, tensor in enumerate(data.layer_blocks["value_cache"]):
        assert tensor is cache.value_cache[layer]
    target = naive(1, kind=kind, seed=9)
    assert BagelAdapter().load(data, target) is target
    assert type(target.key_cache) is kind
    for layer in range(LAYERS):
        assert target.key_cache[layer] is cache.key_cache[layer]


def test_layers_are_taken_by_number_not_by_the_dicts_order() -> None:
    cache = naive(5)
    cache.key_cache = dict(reversed(cache.key_cache.items()))
    data = BagelAdapter().export(cache, request_id="r", metadata={"kv_lens": [5], "ropes": [5]})
    assert data.layer_blocks["key_cache"][0] is cache.key_cache[0]


def test_a_missing_layer_is_named() -> None:
    cache = naive(5)
    cache.value_cache[1] = None
    with pytest.raises(SchemaError, match="layer 1, V"):
        BagelAdapter().export(cache, request_id="r", metadata={"kv_lens": [5], "ropes": [5]})
    del cache.value_cache[1]
    with pytest.raises(SchemaError, match="V: the cache has layers"):
        BagelAdapter().export(cache, request_id="r", metadata={"kv_lens": [5], "ropes": [5]})


def test_a_target_of_another_size_is_refused() -> None:
    data = BagelAdapter().export(naive(5), request_id="r", metadata={"kv_lens": [5], "ropes": [5]})
    with pytest.raises(SchemaError, match="4 layers"):
        BagelAdapter().load(data, NaiveCache(4))


def test_text_to_image_sends_gen_once() -> None:
    cache = naive(7)
    contexts = {
        "gen": context(cache, 7),
        "cfg_text": empty(),
        "cfg_img": context(first(cache, 7), 7),
    }
    bundle = BagelAdapter().export_contexts(contexts, request_id="r", image_shape=(64, 32))
    assert isinstance(bundle.branches["cfg_img"], SameAs)
    assert bundle["cfg_text"].is_empty
    sent = sum(spec.nbytes for spec in bundle.plan().tensors)
    assert sent == 2 * LAYERS * 7 * HEADS * DIM * 2
    assert bundle["cfg_img"].metadata.image_shape == (64, 32)


def test_an_edits_text_branch_is_a_prefix_with_positions_of_its_own() -> None:
    cache = naive(9)
    contexts = {
        "gen": context(cache, 9, rope=5),
        "cfg_text": context(first(cache, 6), 6, rope=2),
        "cfg_img": context(naive(3, seed=1), 3),
    }
    bundle = BagelAdapter().export_contexts(contexts, request_id="r")
    reference = bundle.branches["cfg_text"]
    assert isinstance(reference, PrefixOf)
    assert reference.tokens == 6
    loaded = BagelAdapter().load_contexts(bundle, NaiveCache)
    assert loaded["cfg_text"]["ropes"] == [2]
    assert loaded["gen"]["ropes"] == [5]
    for name, original in contexts.items():
        cache_in, cache_out = original.past_key_values, loaded[name]["past_key_values"]
        for layer in range(LAYERS):
            pair = layer_tensors(cache_in, layer)
            assert pair is not None
            assert same_bytes(pair[0], cache_out.key_cache[layer])
            assert same_bytes(pair[1], cache_out.value_cache[layer])


def test_views_of_the_same_memory_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, head = naive(7), NaiveCache(LAYERS)
    for layer in range(LAYERS):
        head.key_cache[layer] = cache.key_cache[layer][:4]
        head.value_cache[layer] = cache.value_cache[layer][:4]
    contexts = {
        "gen": context(cache, 7),
        "cfg_text": context(head, 4),
        "cfg_img": context(cache, 7).snapshot(),
    }
    monkeypatch.setattr("omni_kvlink.adapters.bagel.same_bytes", lambda *_: 1 / 0)
    bundle = BagelAdapter().export_contexts(contexts, request_id="r")
    kinds = [type(bundle.branches[name]) for name in ("cfg_text", "cfg_img")]
    assert kinds == [PrefixOf, SameAs]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("part", ["key_cache", "value_cache"])
def test_a_branch_with_a_different_bit_is_sent_itself(layer: int, part: str) -> None:
    cache = naive(7)
    other = first(cache, 7)
    getattr(other, part)[layer].view(torch.uint8)[6, 1, 3] ^= 1
    contexts = {"gen": context(cache, 7), "cfg_img": context(other, 7)}
    bundle = BagelAdapter().export_contexts(contexts, request_id="r")
    assert not isinstance(bundle.branches["cfg_img"], SameAs | PrefixOf)
    sent = bundle["cfg_img"].layer_blocks[part][layer]
    assert sent is not None
    assert same_bytes(sent, getattr(other, part)[layer])


def test_contexts_may_be_dicts_and_gen_must_be_there() -> None:
    cache = naive(4)
    as_dict = {"kv_lens": [4], "ropes": [4], "past_key_values": cache}
    bundle = BagelAdapter().export_contexts({"gen": as_dict}, request_id="r", extra={"a": [1]})
    assert bundle["gen"].metadata.extra == {"a": [1]}
    with pytest.raises(SchemaError, match="gen"):
        BagelAdapter().export_contexts({"cfg_text": as_dict}, request_id="r")


def test_a_generator_is_restored() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.randn(17, generator=generator)
    copy = unpack_generator(pack_generator(generator))
    assert torch.equal(torch.randn(9, generator=copy), torch.randn(9, generator=generator))


def test_the_kit_accepts_it() -> None:
    """Also as targets of a `get`, in memory of the cache's own."""
    adapter = BagelAdapter()
    check_adapter(adapter, lambda keys, values: SimpleNamespace(key_cache=keys, value_cache=values))
