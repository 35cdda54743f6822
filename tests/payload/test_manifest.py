from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import safetensors
import safetensors.torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_kvlink import (
    IntegrityError,
    KVCacheBundle,
    KVCacheTransferData,
    PrefixOf,
    SameAs,
    SchemaError,
    VersionError,
    WireError,
)
from omni_kvlink.payload.format import ALIGN, DIGEST_CHUNK, MAX_TENSORS
from omni_kvlink.payload.manifest import Manifest
from support.payloads import headers, strategies
from support.payloads.random_caches import bits, cache, empty, written
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

few = settings(
    max_examples=EXAMPLES * 40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def named(data: KVCacheTransferData | KVCacheBundle, manifest: Manifest) -> dict[str, Any]:
    return {
        spec.name: tensor for spec, tensor in zip(manifest.tensors, data.tensors(), strict=True)
    }


@few
@given(strategies.bundles() | strategies.caches(), st.booleans())
def test_encode_and_decode(data: KVCacheTransferData | KVCacheBundle, digests: bool) -> None:
    manifest, mapping = written(data, digests=digests)
    payload = mapping.region.view()
    header = bytes(payload[: manifest.header_nbytes])
    assert Manifest.decode(payload) == manifest
    assert Manifest.decode(header, manifest.nbytes) == manifest
    assert Manifest.decode(payload).encode() == header
    assert manifest.has_digests is (digests and bool(manifest.tensors))
    assert type(data).from_region(Manifest.decode(payload), mapping.region).difference(data) == ""  # type: ignore[arg-type]  # of one type


@few
@given(strategies.bundles() | strategies.caches())
def test_the_plan_has_the_final_size(data: KVCacheTransferData | KVCacheBundle) -> None:
    plan = data.plan()
    manifest, _ = written(data)
    assert len(manifest.encode()) == plan.header_nbytes == len(plan.encode())
    assert msgspec.structs.replace(plan, tensors=manifest.tensors) == manifest


@few
@given(strategies.bundles() | strategies.caches())
def test_tensors_are_aligned_and_there_are_no_holes(
    data: KVCacheTransferData | KVCacheBundle,
) -> None:
    manifest, mapping = written(data)
    header = json.loads(bytes(mapping.region.view(8, manifest.header_nbytes)))
    del header["__metadata__"]
    at = 0
    for name, tensor in header.items():
        start, stop = tensor["data_offsets"]
        assert start == at
        assert name.startswith("pad.") or start % ALIGN == 0
        at = stop
    assert manifest.header_nbytes % ALIGN == 0
    assert manifest.header_nbytes + at == manifest.nbytes


@few
@given(strategies.bundles() | strategies.caches())
def test_stock_tools_open_what_lies_in_memory(data: KVCacheTransferData | KVCacheBundle) -> None:
    manifest, mapping = written(data)
    found = safetensors.torch.load(bytes(mapping.region.view()))
    for name, tensor in named(data, manifest).items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)
    assert all(name.startswith("pad.") for name in set(found) - set(named(data, manifest)))


@pytest.mark.parametrize("from_memory", [False, True])
def test_stock_tools_open_the_file(tmp_path: Path, from_memory: bool) -> None:
    data = KVCacheBundle(
        "r", {"gen": cache(dtype="bfloat16", shape=(5, 3, 7)), "cfg": SameAs("gen"), "e": empty()}
    )
    path = tmp_path / "payload.safetensors"
    manifest, mapping = written(data)
    if from_memory:
        path.write_bytes(mapping.region.view())
    else:
        data.save(path)
    loaded = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["kvlink"])["request_id"] == "r"
        for name, tensor in named(data, manifest).items():
            assert bits(file.get_tensor(name)) == bits(loaded[name]) == bits(tensor)


def big_bundle() -> KVCacheBundle:
    """What one image costs: 3 branches, none shared, of 36 layers."""
    return KVCacheBundle(
        "r", {name: cache(layers=36, shape=(33, 2, 8)) for name in ("gen", "cfg_text", "cfg_img")}
    )


def test_the_header_of_a_big_bundle_decodes_in_few_calls() -> None:
    """Counted: seconds would fail on a busy machine. A callback for each object is too many."""
    plan = big_bundle().plan()
    header, calls = plan.encode(), Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        Manifest.decode(header, plan.nbytes)
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 19 * len(plan.tensors)


def test_digests_are_one_for_each_started_mib() -> None:
    manifest, _ = written(cache(layers=1, shape=(DIGEST_CHUNK // 32 + 1, 2, 4)))
    assert [len(spec.digest) for spec in manifest.tensors] == [2 * 8, 2 * 8]
    assert all(spec.digest == "" for spec in cache().plan(digests=False).tensors)


def test_where_names_a_tensor_by_branch_layer_and_part() -> None:
    manifest = KVCacheBundle("r", {"gen": cache(), "mla": cache(shape=(3, 4))}).plan()
    assert manifest.tensors[3].where() == "branch 'gen', layer 1, V"
    assert manifest.tensors[-1].where() == "branch 'mla', layer 1, latent"
    assert {b.name: b.layout for b in manifest.branches}["mla"] == "ND"


def test_too_much_for_a_header_is_the_callers_error() -> None:
    with pytest.raises(SchemaError, match=str(MAX_TENSORS)):
        KVCacheBundle("r", {f"b{n}": cache(layers=40, shape=(1, 1, 1)) for n in range(52)}).plan()
    with pytest.raises(SchemaError, match="extra"):
        cache(extra={"a": [[]] * 50_000}).plan()
    with pytest.raises(SchemaError, match="header"):
        cache(extra={"a": "a" * (1 << 20)}).plan()


# ---- headers that another writer made


def test_a_header_made_by_hand() -> None:
    """The format as it is written down, without the encoder's help."""
    plan = msgspec.structs.replace(cache().plan(), producer=plain().producer)
    assert content(plain()) == content(plan)


def plain() -> Manifest:
    return Manifest.decode(headers.payload())


def test_keys_in_another_order_and_other_spaces() -> None:
    note = dict(reversed(headers.note().items()))
    text = json.dumps(
        {
            "__metadata__": {"kvlink": headers.dump(note)},
            **{name: dict(reversed(entry.items())) for name, entry in _entries().items()},
        },
        indent=1,
    )
    assert content(Manifest.decode(headers.sealed(text.encode()))) == content(plain())


def _entries() -> dict[str, Any]:
    return dict(headers.spans(headers.names()))


def content(manifest: Manifest) -> Manifest:
    """What a header says, apart from how long it is."""
    return msgspec.structs.replace(manifest, header_nbytes=0, nbytes=0)


def test_a_later_minor_version_is_readable() -> None:
    note = headers.note(
        version=[1, 7],
        branches=[headers.branch(colour="red", sizes={"a": [1, {"b": None}]})],
        compression={"codec": "none", "level": [1, 2.5, None, True, "ü"]},
    )
    entries = {name: {**entry, "stride": [8, 4, 1]} for name, entry in _entries().items()}
    text = headers.text(entries, note).replace(b'"__metadata__":{', b'"__metadata__":{"by":"x",')
    payload = headers.sealed(text)
    assert content(Manifest.decode(payload)) == content(plain())
    assert set(safetensors.torch.load(payload)) >= set(headers.names())


@pytest.mark.parametrize("value", ["9" * 10**5, "1e999", "[{},null]", "-0.0"])
def test_what_an_unknown_field_holds_does_not_matter(value: str) -> None:
    text = headers.text().decode().replace('"dtype"', f'"later":{value},"dtype"', 1)
    assert content(Manifest.decode(headers.sealed(text.encode()))) == content(plain())


@pytest.mark.parametrize("version", [[0, 9], [2, 0], [2**60, 1]])
def test_another_major_version_is_named(version: list[int]) -> None:
    with pytest.raises(VersionError) as caught:
        Manifest.decode(headers.payload(headers.note(version=version)))
    assert f"{version[0]}.{version[1]}" in str(caught.value)
    assert "1.1" in str(caught.value)


def test_another_major_version_need_not_look_like_this_one() -> None:
    """An unknown major version is reported as such, whatever its other fields."""
    text = headers.text({"other": {"codec": "x"}}, {"version": [2, 0], "layers": 7})
    with pytest.raises(VersionError, match=r"2\.0"):
        Manifest.decode(headers.sealed(text))


# ---- damage


def golden() -> bytes:
    data = KVCacheBundle("r", {"a": cache(layers=1, shape=(1, 1, 1)), "b": PrefixOf("a", 1, META)})
    _, mapping = written(data)
    return bytes(mapping.region.view())


META = cache(layers=1, shape=(1, 1, 1)).metadata


def test_no_byte_of_a_header_can_change_unseen() -> None:
    """Every one-byte mutation: also of the length, of the digest itself and of the padding."""
    payload = golden()
    header_nbytes = Manifest.decode(payload).header_nbytes
    for at in range(header_nbytes):
        for flip in (*(1 << bit for bit in range(8)), 0xFF):
            changed = bytearray(payload)
            changed[at] ^= flip
            with pytest.raises(WireError):
                Manifest.decode(bytes(changed))


@pytest.mark.parametrize("space", [b"\t", b"\n", b"\r"])
def test_padding_is_spaces_and_covered_by_the_digest(space: bytes) -> None:
    payload = golden()
    last = Manifest.decode(payload).header_nbytes - 1
    assert payload[last : last + 1] == b" "
    with pytest.raises(IntegrityError, match="header"):
        Manifest.decode(payload[:last] + space + payload[last + 1 :])


def test_every_truncation_is_refused() -> None:
    payload = golden()
    for length in range(len(payload)):
        with pytest.raises(WireError):
            Manifest.decode(payload[:length])


@pytest.mark.parametrize("by", [-256, -1, 1, 256])
def test_the_payload_ends_where_the_header_says(by: int) -> None:
    payload = golden()
    with pytest.raises(WireError, match="end at byte"):
        Manifest.decode(payload, len(payload) + by)
