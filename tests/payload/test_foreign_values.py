"""Tensors without memory of their own, and integers of numpy and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from omni_kvlink import (
    KVCacheBundle,
    KVCacheTransferData,
    KVMetadata,
    PrefixOf,
    SchemaError,
    TensorTransferData,
)
from omni_kvlink.payload.branches import Shard
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from support.payloads.random_caches import cache

if TYPE_CHECKING:
    from collections.abc import Callable

Use: TypeAlias = "Callable[[torch.Tensor], None]"
LAYER = torch.ones(3, 2, 4)


def summed(use: Use) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(each: torch.Tensor) -> torch.Tensor:
        use(each)
        return each.sum()

    return call


def in_vmap(use: Use) -> None:
    torch.vmap(summed(use))(torch.ones(2, 3, 2, 4))


def in_grad(use: Use) -> None:
    torch.func.grad(summed(use))(LAYER)


def in_jvp(use: Use) -> None:
    torch.func.jvp(summed(use), (LAYER,), (LAYER,))


def in_functionalize(use: Use) -> None:
    torch.func.functionalize(summed(use))(LAYER)


def fake(use: Use) -> None:
    with FakeTensorMode():
        tensor = torch.ones(3, 2, 4)
    use(tensor)


def freed(use: Use) -> None:
    tensor = torch.ones(3, 2, 4)
    tensor.untyped_storage().resize_(0)
    use(tensor)


def cut(use: Use) -> None:
    tensor = torch.ones(3, 2, 4)
    tensor.untyped_storage().resize_(95)
    use(tensor)


def zero(use: Use) -> None:
    use(torch._efficientzerotensor((3, 2, 4)))


def nested(use: Use) -> None:
    use(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]))


def sparse(use: Use) -> None:
    use(LAYER.to_sparse())


def quantized(use: Use) -> None:
    use(torch.quantize_per_tensor(LAYER, 0.1, 0, torch.qint8))


def conjugate(use: Use) -> None:
    use(torch.ones(3, 2, 4, dtype=torch.complex64).conj())


FOREIGN: dict[Callable[[Use], None], str] = {
    in_vmap: "no memory of its own.*torch.func",
    in_grad: "no memory of its own.*torch.func",
    in_jvp: "no memory of its own.*torch.func",
    in_functionalize: "no memory of its own.*torch.func",
    fake: "no memory of its own.*fake",
    zero: "no memory of its own",
    freed: "no memory of its own.*storage was freed",
    cut: "cut to 95 bytes, it needs 96",
    nested: "nested tensor",
    sparse: "sparse_coo.*not dense",
    quantized: "dtype torch.qint8 cannot be sent",
    conjugate: "dtype torch.complex64 cannot be sent",
}


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_tensors_that_cannot_be_sent(make: Callable[[Use], None]) -> None:
    """SchemaError names the tensor and says why, before anything is planned."""
    metadata = {"kv_lens": [3], "ropes": [0], "num_layers": 1}

    def use(tensor: torch.Tensor) -> None:
        with pytest.raises(SchemaError, match=f"tensor 'a/0'.*{FOREIGN[make]}"):
            TensorTransferData("r", {"a": [tensor]})
        blocks = {"key_cache": [LAYER], "value_cache": [tensor]}
        with pytest.raises(SchemaError, match=f"layer 0, V.*{FOREIGN[make]}"):
            KVCacheTransferData("r", blocks, (), metadata)

    make(use)


@pytest.mark.filterwarnings("ignore")
def test_pools_that_cannot_be_read() -> None:
    table = BlockTable.of_blocks([0], block_size=2, tokens=2)

    def use(pool: torch.Tensor) -> None:
        with pytest.raises(SchemaError, match="layer 3, K has no memory of its own"):
            PagedTensor(pool, table, "layer 3, K")

    for make in (in_vmap, in_grad, fake, freed):
        make(use)


INTEGERS: list[Callable[[int], Any]] = [int, np.int64, np.uint8, np.int32, torch.tensor]


@pytest.mark.parametrize("of", INTEGERS)
def test_integers_of_others(of: Callable[[int], Any]) -> None:
    shard = Shard(of(1), of(2), (of(2), of(4)))
    sizes = {"num_layers": of(2), "seq_len": of(3), "block_size": of(16)}
    lens, ropes = (of(1), of(2)), (of(4), of(5))
    metadata = KVMetadata(lens, ropes, image_shape=(of(8), of(9)), shard=shard, **sizes)
    plain = KVMetadata(
        (1, 2), (4, 5), 2, seq_len=3, block_size=16, image_shape=(8, 9), shard=Shard(1, 2, (2, 4))
    )
    assert metadata == plain
    assert repr(metadata) == repr(plain)
    layers = [torch.ones(3, 2, 4)] * 2
    blocks = {"key_cache": layers, "value_cache": layers}
    data = KVCacheTransferData("r", blocks, [of(7)], metadata)
    assert data.plan().encode() == KVCacheTransferData("r", blocks, [7], plain).plan().encode()
    table = BlockTable.of_blocks([of(3), of(1)], block_size=of(4), tokens=of(6))
    assert (type(table.block_size), type(table.tokens), table.index.tolist()) == (int, int, [3, 1])
    prefix = PrefixOf("gen", of(2), KVMetadata((2,), (1,), 2))
    bundle = KVCacheBundle("r", {"gen": cache(), "cfg": prefix})
    assert b'\\"tokens\\":2' in bundle.plan().encode()


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_lengths_in_an_array(array: Callable[[list[int]], Any]) -> None:
    assert KVMetadata(array([1, 2]), array([4, 5]), 2) == KVMetadata((1, 2), (4, 5), 2)


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 1.0, np.float64(1)])
@pytest.mark.parametrize(
    "field", ["kv_lens", "ropes", "num_layers", "seq_len", "block_size", "image_shape"]
)
def test_what_is_no_integer(field: str, value: object) -> None:
    fields: dict[str, Any] = {"kv_lens": [1], "ropes": [0], "num_layers": 1}
    wrong = {"kv_lens": [value], "ropes": [value], "image_shape": (value, 8)}
    with pytest.raises(SchemaError, match=r"metadata: .*Expected `int`"):
        KVMetadata(**{**fields, field: wrong.get(field, value)})


@pytest.mark.parametrize("value", [True, np.True_, 1.0])
def test_what_is_no_integer_elsewhere(value: Any) -> None:
    with pytest.raises(SchemaError, match="Expected `int`"):
        KVMetadata((1,), (0,), 1, shard=Shard(value, 2, (0, 1)))
    with pytest.raises(SchemaError, match="block_size"):
        BlockTable.of_blocks([0], block_size=value, tokens=1)
    with pytest.raises(SchemaError, match="tokens"):
        BlockTable.of_blocks([0], block_size=4, tokens=value)
    blocks = {name: [torch.ones(1, 2, 4)] for name in ("key_cache", "value_cache")}
    with pytest.raises(SchemaError, match="block_ids"):
        KVCacheTransferData("r", blocks, [value], KVMetadata((1,), (0,), 1))
    prefix = PrefixOf("gen", value, KVMetadata((1,), (1,), 2))
    with pytest.raises(SchemaError, match=r"branch 'cfg': tokens .* is no integer"):
        KVCacheBundle("r", {"gen": cache(), "cfg": prefix})
