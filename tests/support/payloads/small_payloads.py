"""Small payloads of each kind, with the key "key" unless another one is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink import KVCacheBundle, PrefixOf, TensorTransferData
from support.payloads.random_caches import cache, noise, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.payload.bundle import Payload


def tensors(key: str = "key", *, seed: int = 0, **change: Any) -> TensorTransferData:
    found = {"a": noise(seed, (3, 8)), "b": noise(seed + 1, (5,), "bfloat16"), **change}
    return TensorTransferData(key, found)


def nested(key: str = "key", *, seed: int = 0) -> TensorTransferData:
    parts = [noise(seed + number, (number, 4)) for number in range(3)]
    return TensorTransferData(key, {"tree": [parts, {"one": parts[1]}]}, {"steps": [{"at": 1}]})


def metadata_alone(key: str = "key", *, seed: int = 0) -> TensorTransferData:
    return TensorTransferData(key, {}, {"steps": 1})


def bundle(key: str = "key", *, seed: int = 0) -> KVCacheBundle:
    whole = cache(key, seed=seed)
    prefix = PrefixOf("gen", 2, cache(shape=(2, 2, 4)).metadata)
    return KVCacheBundle(key, {"gen": whole, "cfg": prefix})


MAKERS: dict[str, Callable[..., Payload]] = {
    "tensors": tensors,
    "nested": nested,
    "cache": cache,
    "bundle": bundle,
}


def bytes_of(data: Payload, *, digests: bool = True) -> memoryview:
    _, mapping = written(data, digests=digests)
    return memoryview(bytes(mapping.region.view()))
