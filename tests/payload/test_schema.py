from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from omni_kvlink import ClosedError, KVCacheTransferData, KVMetadata, SchemaError
from omni_kvlink.copier import TorchCopier
from omni_kvlink.payload.tensor_memory import tensor_view
from omni_kvlink.payload.views import dense
from support.payloads import strategies
from support.payloads.random_caches import DTYPES, bits, cache, empty, noise, written
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT: dict[str, Any] = {"kv_lens": [3], "ropes": [3], "num_layers": 3}


def layers(count: int = 3, **other: Any) -> list[Any]:
    return [noise(n, **{"shape": (3, 2, 4), **other}) for n in range(count)]


def build(keys: Any = None, values: Any = None, **about: Any) -> KVCacheTransferData:
    blocks = {
        "key_cache": layers() if keys is None else keys,
        "value_cache": layers() if values is None else values,
    }
    return KVCacheTransferData("r", blocks, (), {**ABOUT, **about})


def with_one(at: int, other: Any) -> list[Any]:
    found = layers()
    found[at] = other
    return found


def latent(count: int = 3, **about: Any) -> KVCacheTransferData:
    blocks = {"latent_cache": layers(count, shape=(3, 8))}
    return KVCacheTransferData("r", blocks, (), {**ABOUT, "layout": "ND", **about})


sparse = torch.eye(3).reshape(3, 3, 1).to_sparse()


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: build(with_one(1, torch.zeros(3, 2, 5))), ["layer 1, K", "2, 5]", "2, 4]"]),
        (lambda: build(None, with_one(2, torch.zeros(4, 2, 4))), ["layer 2, V", "[4, 2, 4]"]),
        (lambda: build(with_one(0, None)), ["layer 0, K", "missing"]),
        (lambda: build(None, with_one(2, None)), ["layer 2, V", "missing"]),
        (lambda: build([None] * 3), ["layer 0, K", "missing"]),
        (lambda: build(None, [None] * 3), ["layer 0, V", "missing"]),
        (lambda: build(layers(2)), ["K: 2 layers", "num_layers is 3"]),
        (lambda: build(None, layers(4)), ["V: 4 layers", "num_layers is 3"]),
        (lambda: build([], []), ["K: 0 layers", "3"]),
        (lambda: build(num_layers=2), ["K: 3 layers", "num_layers is 2"]),
        (lambda: build(None, layers(shape=(3, 4, 2))), ["layer 0, V", "[3, 4, 2]", "[3, 2, 4]"]),
        (lambda: build(with_one(1, torch.zeros(3, 2, 4).half())), ["layer 1, K", "16", "32"]),
        (lambda: build(dtype="bfloat16"), ["layer 0, K", "float32", "bfloat16"]),
        (lambda: build(kv_lens=[4]), ["layer 0, K", "3 tokens", "[4]", "4"]),
        (lambda: build(kv_lens=[1, 1], ropes=[1, 1]), ["layer 0, K", "3 tokens", "[1, 1]", "2"]),
        (lambda: build(kv_lens=[3], ropes=[3, 3]), ["2 ropes", "1 kv_lens"]),
        (lambda: build([torch.zeros(3, 2, 4).long()] * 3, [torch.zeros(3, 2, 4).long()] * 3),
         ["layer 0, K", "int64", "bfloat16"]),
        (lambda: build([torch.zeros(3, 2, 4).bool()] * 3, [torch.zeros(3, 2, 4).bool()] * 3),
         ["layer 0, K", "bool"]),
        (lambda: build([sparse] * 3, [sparse] * 3), ["layer 0, K", "sparse"]),
        (lambda: build(with_one(2, [[1.0]])), ["layer 2, K", "list", "torch.Tensor"]),
        (lambda: build(layers(shape=(3, 0, 4)), layers(shape=(3, 0, 4))),
         ["layer 0, K", "[3, 0, 4]", "None"]),
        (lambda: build(layers(shape=(3, 8)), layers(shape=(3, 8))), ["layer 0, K", "[3, 8]", "3"]),
        (lambda: build(layout="ND"), ["key_cache", "ND", "latent_cache"]),
        (lambda: latent(layout="NHD"), ["latent_cache", "NHD", "key_cache"]),
        (lambda: latent(2), ["latent: 2 layers", "3"]),
        (lambda: build(layout="HND"), ["layout", "HND", "NHD, ND"]),
        (lambda: build([None] * 3, [None] * 3), ["3 tokens", "None"]),
        (lambda: build(shard={"rank": 0, "world": 2, "heads": [0, 4]}), ["heads 0…4", "but 2"]),
        (lambda: KVCacheTransferData("r", None, (), ABOUT), ["layer_blocks", "key_cache"]),  # type: ignore[arg-type]
        (lambda: KVCacheTransferData("r", {"key_cache": layers()}, (), ABOUT), ["value_cache"]),
        (lambda: KVCacheTransferData("r", {1: [], "key_cache": []}, (), ABOUT), ["layer_blocks"]),  # type: ignore[dict-item]
        (lambda: KVCacheTransferData("r", {}, (), None), ["metadata", "kv_lens"]),
        (lambda: KVCacheTransferData("r", {}, (), 7), ["metadata"]),  # type: ignore[arg-type]
        (lambda: cache(""), ["request_id", "1024"]),
        (lambda: cache("r" * 1025), ["request_id", "1024"]),
        (lambda: cache("\udc00"), ["request_id", "surrogates"]),
        (lambda: cache(7), ["request_id", "string"]),  # type: ignore[arg-type]
        (lambda: cache(block_ids=[-1]), ["block_ids", ">= 0"]),
        (lambda: cache(block_ids=[2**60]), ["block_ids", "9007199254740992"]),
        (lambda: cache(block_ids=[1.5]), ["block_ids", "float"]),  # type: ignore[list-item]
        (lambda: cache(block_ids=["7"]), ["block_ids", "str"]),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_a_wrong_one_cannot_exist(make: Callable[[], Any], texts: list[str]) -> None:
    with pytest.raises(SchemaError) as caught:
        make()
    assert all(word in str(caught.value) for word in texts), str(caught.value)


def test_the_tensors_of_the_wire_are_layer_by_layer_k_before_v() -> None:
    keys, values = layers(), layers(shape=(3, 2, 4))
    assert build(keys, values).tensors() == [
        tensor for pair in zip(keys, values, strict=True) for tensor in pair
    ]


def test_dtype_and_length_are_filled_in() -> None:
    data = build(layers(dtype="bfloat16"), layers(dtype="bfloat16"))
    assert (data.metadata.dtype, data.metadata.seq_len) == ("bfloat16", 3)


def test_block_ids_may_be_tensors() -> None:
    assert cache(block_ids=torch.tensor([4, 2])).block_ids == [4, 2]  # type: ignore[arg-type]


def test_the_callers_lists_are_not_kept() -> None:
    keys, values = layers(), layers()
    data = build(keys, values)
    keys[0] = values[0] = None
    assert None not in data.layer_blocks["key_cache"] + data.layer_blocks["value_cache"]


few = settings(
    max_examples=EXAMPLES * 40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@few
@given(strategies.caches())
def test_a_dict_and_back(data: KVCacheTransferData) -> None:
    values = data.to_dict()
    again = KVCacheTransferData.from_dict(values)
    assert again.difference(data) == ""
    assert all(a is b for a, b in zip(again.tensors(), data.tensors(), strict=True))


def test_the_dict_has_the_shape_of_the_rfc() -> None:
    values = cache("req", block_ids=[7]).to_dict()
    assert set(values) == {"request_id", "layer_blocks", "block_ids", "metadata"}
    assert set(values["layer_blocks"]) == {"key_cache", "value_cache"}
    assert [type(layer) for layer in values["layer_blocks"]["key_cache"]] == [torch.Tensor] * 2
    assert values["block_ids"] == [7]
    assert values["metadata"].items() >= {"kv_lens": [3], "ropes": [3], "num_layers": 2}.items()


def test_what_the_rfc_shows_is_enough() -> None:
    blocks = {"key_cache": layers(), "value_cache": layers()}
    values = {"request_id": "r", "layer_blocks": blocks, "metadata": ABOUT}
    assert KVCacheTransferData.from_dict(values).block_ids == []


@pytest.mark.parametrize("missing", ["request_id", "layer_blocks", "metadata"])
def test_a_dict_without_a_key_says_which(missing: str) -> None:
    values = cache().to_dict()
    del values[missing]
    with pytest.raises(SchemaError, match=f"lacks {missing}"):
        KVCacheTransferData.from_dict(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 2, 3), (5, 7), (5, 1, 1)], ids=["GQA", "MLA", "one"])
def test_bits_survive_the_wire(dtype: str, shape: tuple[int, ...]) -> None:
    data = cache(dtype=dtype, shape=shape, ropes=[2], extra={"ü": [1, None]}, block_size=16)
    manifest, mapping = written(data)
    found = KVCacheTransferData.from_region(manifest, mapping.region)
    assert found.difference(data) == data.difference(found) == ""
    assert [bits(t) for t in found.tensors()] == [bits(t) for t in data.tensors()]


@pytest.mark.parametrize(
    "stride",
    [
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
        lambda t: torch.cat([t, t])[3:],
        lambda t: t[:1].expand(3, 2, 4),
        lambda t: t.as_strided((3, 2, 4), (1, 8, 2)),
        lambda t: t.clone().requires_grad_(),
        lambda t: torch._neg_view(t),
    ],
    ids=["transposed", "every second", "offset", "expanded", "as_strided", "grad", "negated"],
)
def test_any_strides_are_taken(stride: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = stride(torch.arange(24.0).view(3, 2, 4))
    data = build([source] * 3, [source] * 3)
    manifest, mapping = written(data)
    expected = source.detach().resolve_neg().contiguous()
    for spec in manifest.tensors:
        assert torch.equal(tensor_view(mapping.region, spec, manifest.header_nbytes), expected)
    TorchCopier().verify(manifest, mapping.region)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1, 1, 1), (2, 2, 2)),
        ((1, 1, 1), (0, 0, 0)),
        ((2, 1, 1), (1, 5, 7)),
        ((1, 2, 1), (9, 1, 3)),
    ],
)
def test_sides_of_one_have_any_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Tensors that torch calls contiguous but refuses to view as bytes."""
    source = torch.arange(40.0).as_strided(shape, stride)
    about = {"kv_lens": [shape[0]], "ropes": [1], "num_layers": 1}
    data = KVCacheTransferData("r", {"key_cache": [source], "value_cache": [source]}, (), about)
    manifest, mapping = written(data)
    found = KVCacheTransferData.from_region(manifest, mapping.region)
    assert found.difference(data) == ""
    assert torch.equal(dense(found.tensors()[1]), source)


NO_TEMPORARY = """
import torch
from omni_kvlink import KVCacheTransferData
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.mapping import Mapping

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def taken(work):
    "Bytes resident at the highest point of the work, beyond those before it."
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
    before = status("VmRSS")
    kept = work()
    return status("VmHWM") - before

big = torch.ones(64, 1024, 128).transpose(0, 1)  # 32 MiB, strided
about = {"kv_lens": [1024], "ropes": [1024], "num_layers": 1}
data = KVCacheTransferData("r", {"key_cache": [big], "value_cache": [big]}, (), about)
plan = data.plan()
region = Mapping.anonymous(plan.nbytes).region
TorchCopier().gather(data.tensors(), plan, region)  # threads and caches are there from now on
print(taken(lambda: TorchCopier().gather(data.tensors(), plan, region)))
print(taken(lambda: [tensor.contiguous() for tensor in data.tensors()]))
"""


def test_a_strided_source_needs_no_temporary() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TEMPORARY],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    gather, contiguous = map(int, done.stdout.split())
    assert gather < 8 << 20
    assert contiguous > 50 << 20  # the measure does see a temporary


def test_an_empty_cache_keeps_its_metadata() -> None:
    data = empty(dtype="bfloat16", extra={"a": 1})
    assert data.is_empty
    manifest, mapping = written(data)
    assert manifest.tensors == ()
    found = KVCacheTransferData.from_region(manifest, mapping.region)
    assert found.difference(data) == ""
    assert found.layer_blocks == {"key_cache": [None] * 2, "value_cache": [None] * 2}


def changed(data: KVCacheTransferData, number: int, byte: int, flip: int) -> KVCacheTransferData:
    copy = [dense(tensor).clone() for tensor in data.tensors()]
    copy[number].view(-1).view(torch.uint8)[byte] ^= flip
    blocks = {"key_cache": copy[::2], "value_cache": copy[1::2]}
    return KVCacheTransferData(data.request_id, blocks, data.block_ids, data.metadata)


@pytest.mark.parametrize(
    ("number", "where"), [(0, "layer 0, K"), (1, "layer 0, V"), (3, "layer 1, V")]
)
@pytest.mark.parametrize("flip", [1, 128])
def test_difference_finds_one_bit(number: int, where: str, flip: int) -> None:
    data = cache()
    assert data.difference(changed(data, number, 95, flip)) == where
    assert data.difference(changed(data, number, 95, 0)) == ""


def test_difference_tells_nans_and_zeros_apart() -> None:
    def single(pattern: int) -> KVCacheTransferData:
        raw = torch.tensor([pattern], dtype=torch.int32).view(torch.float32).view(1, 1, 1)
        about = {"kv_lens": [1], "ropes": [1], "num_layers": 1}
        return KVCacheTransferData("r", {"key_cache": [raw], "value_cache": [raw]}, (), about)

    quiet, other, minus_zero = 0x7FC00000, 0x7FC00001, -(2**31)
    assert single(quiet).difference(single(quiet)) == ""
    assert single(quiet).difference(single(other)) == "layer 0, K"
    assert single(0).difference(single(minus_zero)) == "layer 0, K"


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (cache("q"), "request_id"),
        (cache(block_ids=[1]), "block_ids"),
        (cache(ropes=[4]), "metadata"),
        (cache(extra={"a": 1}), "metadata"),
        (cache(dtype="int8"), "metadata"),
        (cache(shape=(3, 4, 2)), "layer 0, K"),
    ],
)
def test_difference_finds_what_is_not_a_byte(other: KVCacheTransferData, word: str) -> None:
    assert cache().difference(other).startswith(word)


def test_closed_is_closed() -> None:
    data, kept = cache(), cache().tensors()[0]
    assert "released" not in repr(data)
    data.close()
    for use in (data.tensors, data.plan, data.to_dict, lambda: data.layer_blocks):
        with pytest.raises(ClosedError, match="'r'"):
            use()
    assert "released" in repr(data)
    assert kept.shape == (3, 2, 4)


def test_first_tokens_are_views() -> None:
    data = cache()
    about = KVMetadata(kv_lens=(2,), ropes=(9,), num_layers=2)
    short = data.first_tokens(2, about)
    assert dense(short.tensors()[0]).data_ptr() == dense(data.tensors()[0]).data_ptr()
    assert short.metadata.ropes == (9,)


def test_a_difference_is_named_and_short() -> None:
    long = {"salt": "x" * 10_000}
    found = build(extra=long).difference(build(extra={"salt": "y"}))
    assert found.startswith("metadata.extra: ")
    assert len(found) < 300
