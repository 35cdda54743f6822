"""DynamicCache to and from transfer data, against the transformers that is installed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVMetadata, PagedTensor, SchemaError
from omni_kvlink.adapters import DynamicCacheAdapter, make_cache
from omni_kvlink.payload.views import dense, same_bytes
from omni_kvlink.testing import check_adapter
from support.doc_blocks import blocks, execute

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-hf"
)

LAYERS, HEADS, DIM, WINDOW = 4, 2, 8, 8
ADAPTER = DynamicCacheAdapter()
HAS_LAYERS = hasattr(transformers.DynamicCache(), "layers")
sliding = pytest.mark.skipif(not HAS_LAYERS, reason="this DynamicCache keeps all tokens")


def config(kinds: str) -> Any:
    """Of a model whose layers are (f)ull or (s)liding."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    return transformers.Qwen2Config(
        num_hidden_layers=len(kinds),
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=[names[kind] for kind in kinds],
    )


def filled(
    tokens: int, *, kinds: str = "ffff", batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A cache that was updated as a model does: a prompt, then token by token."""
    cache = make_cache(config(kinds))
    generator = torch.Generator().manual_seed(tokens)
    for step in (tokens - 3, 1, 1, 1):
        for layer in range(len(kinds)):
            # As projections give it: [batch, tokens, heads, dim], transposed.
            parts = torch.randn(2, batch, step, HEADS, DIM, generator=generator).to(dtype)
            cache.update(parts[0].transpose(1, 2), parts[1].transpose(1, 2), layer)
    return cache


def layers(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def go_on(cache: Any, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What attention sees of each layer at the next token."""
    generator = torch.Generator().manual_seed(seed)
    (batch, heads, _, dim), dtype = layers(cache)[0][0].shape, layers(cache)[0][0].dtype
    seen = []
    for layer in range(len(layers(cache))):
        parts = torch.randn(2, batch, heads, 1, dim, generator=generator).to(dtype)
        seen.append(cache.update(parts[0], parts[1], layer))
    return seen


def assert_goes_on_alike(cache: Any, other: Any) -> None:
    """The same K and V, the same lengths, now and for some tokens more."""
    for step in range(WINDOW + 2):
        for layer in range(len(layers(cache))):
            assert cache.get_seq_length(layer) == other.get_seq_length(layer)
        for see in (lambda cache, step=step: go_on(cache, step), layers):
            for mine, theirs in zip(see(cache), see(other), strict=True):
                assert all(same_bytes(a, b) for a, b in zip(mine, theirs, strict=True))


def made_of(keys: list[torch.Tensor | None], values: list[torch.Tensor | None]) -> Any:
    """For `check_adapter`: a cache of these very tensors."""
    cache = make_cache()
    for layer, parts in enumerate(zip(keys, values, strict=True)):
        shaped = [None if part is None else part.transpose(0, 1)[None] for part in parts]
        if not hasattr(cache, "layers"):
            cache.key_cache.append([] if shaped[0] is None else shaped[0])
            cache.value_cache.append([] if shaped[1] is None else shaped[1])
            continue
        cache.layers.append(transformers.cache_utils.DynamicLayer())
        cache.layers[layer].keys, cache.layers[layer].values = shaped
        cache.layers[layer].is_initialized = shaped[0] is not None
    return cache


def test_the_contract_of_adapters() -> None:
    check_adapter(ADAPTER, made_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_nothing_is_copied_on_either_way(batch: int, dtype: torch.dtype) -> None:
    cache = filled(20, batch=batch, dtype=dtype)
    data = ADAPTER.export(cache, request_id="r")
    assert data.metadata.kv_lens == (20,) * batch == data.metadata.ropes
    for view, (key, _) in zip(data.layer_blocks["key_cache"], layers(cache), strict=True):
        assert view is not None
        memory = view.pool if isinstance(view, PagedTensor) else view
        assert memory.data_ptr() == key.data_ptr()
        assert view.shape == (20 * batch, HEADS, DIM)
    received = KVCacheTransferData(
        "r",
        {
            name: [torch.empty(view.shape, dtype=view.dtype) for view in views if view is not None]
            for name, views in data.layer_blocks.items()
        },
        (),
        data.metadata,
    )
    for view, tensor in zip(data.tensors(), received.tensors(), strict=True):
        assert isinstance(tensor, torch.Tensor)
        tensor.copy_(dense(view))
    loaded = ADAPTER.load(received, make_cache())
    for (key, _), layer in zip(layers(loaded), received.layer_blocks["key_cache"], strict=True):
        assert isinstance(layer, torch.Tensor)
        assert key.data_ptr() == layer.data_ptr()
    assert_goes_on_alike(loaded, cache)


def test_rows_of_a_batch_are_sequences() -> None:
    """The payload of a batch of three holds the sequences one after the other."""
    cache = filled(5, batch=3)
    data = ADAPTER.export(cache, request_id="r")
    sent = data.layer_blocks["value_cache"][2]
    assert isinstance(sent, PagedTensor)
    value = layers(cache)[2][1]
    assert same_bytes(sent.dense()[5:10], value[1].transpose(0, 1).contiguous())


@sliding
@pytest.mark.parametrize("kinds", ["ssss", "fsfs", "sfff"])
@pytest.mark.parametrize("tokens", [4, WINDOW - 1, WINDOW, WINDOW + 1, 30])
@pytest.mark.parametrize("batch", [1, 2])
def test_windows_are_restored_with_the_tokens_seen(kinds: str, tokens: int, batch: int) -> None:
    cache = filled(tokens, kinds=kinds, batch=batch)
    payload = ADAPTER.pack(cache, request_id="r", extra={"a": 1})
    mixed = kinds != "ssss" and tokens > WINDOW - 1
    assert isinstance(payload, KVCacheBundle) == mixed
    loaded = ADAPTER.unpack(payload, config=config(kinds))
    assert_goes_on_alike(loaded, cache)


@sliding
def test_mixed_layers_do_not_fit_into_one_cache() -> None:
    with pytest.raises(SchemaError, match=r"\[20, 7, 20, 7\].*pack\(\)"):
        ADAPTER.export(filled(20, kinds="fsfs"), request_id="r")


@sliding
def test_all_tokens_fit_into_a_window_and_not_the_other_way_round() -> None:
    """As from transformers 4.50, which keeps all, into a later one."""
    whole = ADAPTER.export(filled(20), request_id="r")
    loaded = ADAPTER.unpack(whole, config=config("fsfs"))
    assert [key.shape[2] for key, _ in layers(loaded)] == [20, 7, 20, 7]
    for (key, value), (key2, value2) in zip(layers(loaded), layers(filled(20)), strict=True):
        assert same_bytes(key, key2[:, :, -key.shape[2] :])
        assert same_bytes(value, value2[:, :, -value.shape[2] :])
    assert {loaded.get_seq_length(layer) for layer in range(4)} == {20}
    assert_goes_on_alike(loaded, ADAPTER.unpack(whole, config=config("fsfs")))
    cut = ADAPTER.pack(filled(20, kinds="fsfs"), request_id="r")
    with pytest.raises(SchemaError, match=r"layer 1: 7 of 20 tokens.*config=model.config"):
        ADAPTER.unpack(cut)
    wider = config("fsfs")
    wider.sliding_window = WINDOW + 1
    with pytest.raises(SchemaError, match="layer 1: 7 of 20"):
        ADAPTER.unpack(cut, config=wider)


@sliding
def test_a_window_of_an_inconsistent_length_is_refused() -> None:
    cache = filled(20, kinds="ssss")
    cache.layers[2].cumulative_length = 5
    with pytest.raises(SchemaError, match="layer 2 keeps 7 tokens"):
        ADAPTER.pack(cache, request_id="r")


@sliding
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"layers": [0, 1, 2], "seen": [20] * 4}, "does not have 4 layers"),
        ({"layers": [0, 1, 2, 2], "seen": [20] * 4}, "make no cache"),
        ({"layers": [0, 1, 2, 3], "seen": [20, 20, 20, 21]}, "have seen"),
        ({"layers": [0, 1, 2, 3], "seen": [3] * 4}, "7 of 3 tokens"),
        ({"layers": [0, 1, 2, 3], "seen": ["20"] * 4}, "dynamic_cache"),
        ([], "dynamic_cache"),
    ],
)
def test_received_metadata_is_checked(extra: Any, message: str) -> None:
    data = ADAPTER.export(filled(20, kinds="ssss"), request_id="r")
    metadata = dataclasses.replace(data.metadata, extra={"dynamic_cache": extra})
    wrong = KVCacheTransferData("r", data.layer_blocks, (), metadata)
    with pytest.raises(SchemaError, match=message):
        ADAPTER.unpack(wrong, config=config("ssss"))


def test_metadata_of_another_batch_is_refused() -> None:
    """The total is right, but the sequences' lengths are not."""
    cache = filled(6, batch=2)
    with pytest.raises(SchemaError, match=r"kv_lens \[12\], but the cache has \[6, 6\]"):
        ADAPTER.export(cache, request_id="r", metadata={"kv_lens": [12], "ropes": [12]})
    data = ADAPTER.export(cache, request_id="r")
    metadata = dataclasses.replace(data.metadata, kv_lens=(5, 7))
    ragged = KVCacheTransferData("r", data.layer_blocks, (), metadata)
    with pytest.raises(SchemaError, match="equally many"):
        ADAPTER.load(ragged, make_cache())


def test_a_missing_layer_is_named() -> None:
    cache = filled(6)
    if hasattr(cache, "layers"):
        cache.layers[2].keys = cache.layers[2].values = None
    else:
        cache.key_cache[2] = cache.value_cache[2] = []
    with pytest.raises(SchemaError, match="layer 2, K"):
        ADAPTER.pack(cache, request_id="r")


def test_only_an_empty_target_is_filled() -> None:
    cache = filled(6)
    data = ADAPTER.export(cache, request_id="r")
    with pytest.raises(SchemaError, match="not empty"):
        ADAPTER.load(data, cache)


def test_a_cache_of_another_kind_is_refused() -> None:
    class Remembering(transformers.DynamicCache):  # type: ignore[misc,name-defined]
        pass

    with pytest.raises(SchemaError, match="Remembering"):
        ADAPTER.export(Remembering(), request_id="r", metadata=KVMetadata((0,), (0,), 1))
    both = transformers.EncoderDecoderCache(make_cache(), make_cache())
    with pytest.raises(SchemaError, match="EncoderDecoderCache"):
        ADAPTER.pack(both, request_id="r")
    if HAS_LAYERS:
        cache = filled(6)
        cache.layers[1] = type("QuantizedLayer", (), {"keys": None, "values": None})()
        with pytest.raises(SchemaError, match="layer 1 is a QuantizedLayer"):
            ADAPTER.pack(cache, request_id="r")


def test_the_code_of_the_page_runs(sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    execute(blocks("docs/transformers.md"), {})
    (Path(sockets) / "kvlink").rmdir()
