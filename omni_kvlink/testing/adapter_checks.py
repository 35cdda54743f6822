"""`check_adapter`: hold an adapter to its contract: an engine's cache is exported and loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.views import dense, same_bytes
from omni_kvlink.testing.caches import random_tensor
from omni_kvlink.testing.rig import expect, naming

if TYPE_CHECKING:
    from omni_kvlink.adapters.base import CacheAdapter

C = TypeVar("C")
Layers = list[torch.Tensor | None]
MakeCache = Callable[[Layers, Layers], C]


def check_adapter(adapter: CacheAdapter[C], make_cache: MakeCache[C]) -> None:
    """Run every check against one adapter of K and V caches.

    `make_cache` takes keys and values, one tensor of each a layer, and returns an engine's cache of
    them; all are None for the empty cache that `load` fills. `CheckFailed` names the first
    behaviour that is missing.
    """
    for check in (
        check_round_trip,
        check_empty_cache,
        check_missing_layers,
        check_contradictions,
        check_load_into_another_size,
        check_own_targets,
    ):
        with naming(check):
            check(adapter, make_cache)


def check_round_trip(adapter: CacheAdapter[C], make_cache: MakeCache[C]) -> None:
    """Exported and loaded bit for bit, in each dtype, without copying a tensor."""
    for dtype in KV_DTYPES:
        keys, values = _layers(3, dtype), _layers(3, dtype)
        data = adapter.export(make_cache(keys, values), request_id="r", metadata=_metadata(3))
        assert data.request_id == "r"
        assert data.metadata.ropes == (2,)
        assert data.metadata.dtype == dtype
        _check_layers(data, keys, values, f"{dtype}, export")
        empty = make_cache([None] * 3, [None] * 3)
        loaded = adapter.load(data, empty)
        assert loaded is empty, "load must return the cache it filled"
        exported = adapter.export(loaded, request_id="r", metadata=_metadata(3))
        _check_layers(exported, keys, values, f"{dtype}, load")
        assert not data.difference(exported), data.difference(exported)


def check_empty_cache(adapter: CacheAdapter[C], make_cache: MakeCache[C]) -> None:
    """A cache without tokens is exported and loaded as one."""
    metadata = KVMetadata((0,), (0,), 2)
    cache = make_cache([None] * 2, [None] * 2)
    data = adapter.export(cache, request_id="r", metadata=metadata)
    assert data.is_empty
    loaded = adapter.load(data, make_cache([None] * 2, [None] * 2))
    assert adapter.export(loaded, request_id="r", metadata=metadata).is_empty


def check_missing_layers(adapter: CacheAdapter[C], make_cache: MakeCache[C]) -> None:
    """A cache with one K or V missing is refused by `export`, which names the layer."""
    for layer in range(3):
        for part in (0, 1):
            tensors = [_layers(3, "float32"), _layers(3, "float32")]
            tensors[part][layer] = None
            export = partial(adapter.export, make_cache(*tensors), request_id="r")
            mentions = (f"layer {layer}", "KV"[part])
            expect(SchemaError, export, metadata=_metadata(3), mentions=mentions)


def check_contradictions(adapter: CacheAdapter[C], make_cache: MakeCache[C]) -> None:
    """A cache that disagrees with its metadata is refused by `export`."""
    cache = make_cache(_layers(2, "float32"), _layers(2, "float32"))
    for wrong in (_metadata(3), KVMetadata((4,), (2,), 2), KVMetadata((0,), (0,), 2)):
        expect(SchemaError, adapter.export, cache, request_id="r", metadata=wrong)


def check_load_into_another_size(adapter: CacheAdapter[C], make_cache: MakeCache[C]) -> None:
    """A cache of other sizes is refused by `load`."""
    cache = make_cache(_layers(2, "float32"), _layers(2, "float32"))
    data = adapter.export(cache, request_id="r", metadata=_metadata(2))
    for layers in (1, 3):
        expect(SchemaError, adapter.load, data, make_cache([None] * layers, [None] * layers))


def _metadata(layers: int) -> KVMetadata:
    return KVMetadata((3,), (2,), layers)


def _layers(layers: int, dtype: str) -> Layers:
    generator = torch.Generator().manual_seed(layers)
    return [random_tensor((3, 2, 5), getattr(torch, dtype), generator) for _ in range(layers)]


def _check_layers(data: KVCacheTransferData, keys: Layers, values: Layers, label: str) -> None:
    for name, layers in (("key_cache", keys), ("value_cache", values)):
        for tensor, original in zip(data.layer_blocks[name], layers, strict=True):
            assert isinstance(tensor, torch.Tensor)
            assert original is not None
            assert same_bytes(tensor, original), f"{label}: {name} has other bytes"
            assert tensor.data_ptr() == original.data_ptr(), f"{label}: {name} was copied"


def check_own_targets(adapter: CacheAdapter[C], make_cache: MakeCache[C]) -> None:
    """`targets` gives an empty cache memory of its own, once, in which a `get` leaves the bytes."""
    for dtype in KV_DTYPES:
        cache = make_cache(_layers(3, dtype), _layers(3, dtype))
        data = adapter.export(cache, request_id="r", metadata=_metadata(3))
        empty = make_cache([None] * 3, [None] * 3)
        stream, targets = SimpleNamespace(payload=data), adapter.targets(empty)
        own = targets(stream)
        targets(stream)  # as a `get` does whose connection broke
        for target, sent in zip(own.tensors(), data.tensors(), strict=True):
            dense(target).copy_(dense(sent))
        exported = adapter.export(empty, request_id="r", metadata=_metadata(3))
        assert not data.difference(exported), data.difference(exported)
