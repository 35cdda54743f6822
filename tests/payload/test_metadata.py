from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from omni_kvlink import KVMetadata, SchemaError, Shard
from omni_kvlink.payload.format import MAX_DEPTH, MAX_LAYERS
from support.payloads import strategies


def make(**other: Any) -> KVMetadata:
    values: dict[str, Any] = {"kv_lens": (3, 4), "ropes": (3, 1), "num_layers": 2, **other}
    return KVMetadata(**values)


def nested(depth: int) -> dict[str, Any]:
    """`depth` dicts and lists inside one another."""
    value: Any = {}
    for _ in range(depth - 2):
        value = [value]
    return {"a": value}


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


@given(strategies.metadata())
def test_a_dict_and_back(about: KVMetadata) -> None:
    assert KVMetadata.from_dict(about.to_dict()) == about


@given(strategies.metadata())
def test_a_branch_and_back(about: KVMetadata) -> None:
    assert KVMetadata.from_branch(about.as_branch("b")) == about


def test_the_dict_has_the_shape_of_the_rfc() -> None:
    values = make().to_dict()
    assert (values["kv_lens"], values["ropes"], values["num_layers"]) == ([3, 4], [3, 1], 2)


def test_ropes_are_carried_and_not_derived() -> None:
    about = make(kv_lens=[1000], ropes=[12])
    assert (about.seq_len, about.ropes) == (1000, (12,))


def test_keys_without_a_field_go_into_extra() -> None:
    values = {"kv_lens": [1], "ropes": [1], "num_layers": 1, "extra": {"a": 1}, "model": "m"}
    assert KVMetadata.from_dict(values).extra == {"a": 1, "model": "m"}


def test_shard_may_be_a_dict() -> None:
    values = make().to_dict() | {"shard": {"rank": 1, "world": 2, "heads": [2, 4]}}
    assert KVMetadata.from_dict(values).shard == Shard(1, 2, (2, 4))


def test_it_is_frozen_and_extra_is_a_private_copy() -> None:
    extra: dict[str, Any] = {"list": [1]}
    about = make(extra=extra)
    extra["list"].append(float("nan"))
    assert about.extra == {"list": [1]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        about.seq_len = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        ({"kv_lens": (3, 5), "seq_len": 7}, ["kv_lens", "[3, 5]", "7"]),
        ({"kv_lens": tuple(range(10**5)), "seq_len": 7}, ["kv_lens", ", ...]", "7"]),
        ({"kv_lens": (), "ropes": ()}, ["0 ropes", "0 kv_lens"]),
        ({"ropes": (1,)}, ["1 ropes", "2 kv_lens"]),
        ({"num_layers": 0}, ["num_layers", "0", str(MAX_LAYERS)]),
        ({"num_layers": MAX_LAYERS + 1}, ["num_layers", str(MAX_LAYERS + 1)]),
        ({"num_layers": True}, ["num_layers", "bool"]),
        ({"num_layers": "2"}, ["num_layers", "str"]),
        ({"num_layers": 2.0}, ["num_layers", "float"]),
        ({"kv_lens": (8, -1)}, ["kv_lens", ">= 0"]),
        ({"kv_lens": (2**53, 1)}, ["seq_len", "<= 9007199254740992"]),
        ({"kv_lens": 7}, ["kv_lens", "as in [7]"]),
        ({"ropes": ("3", "1")}, ["ropes", "str"]),
        ({"layout": 3}, ["layout", "int"]),
        ({"dtype": None}, ["dtype", "null"]),
        ({"block_size": -1}, ["block_size", ">= 0"]),
        ({"image_shape": (1, 2, 3)}, ["image_shape"]),
        ({"image_shape": (1.5, 2)}, ["image_shape", "float"]),
        ({"shard": 3}, ["shard", "int"]),
        ({"extra": None}, ["extra"]),
        ({"extra": [1]}, ["extra"]),
        ({"extra": {1: 2}}, ["extra"]),
        ({"extra": {"t": (1, 2)}}, ["extra"]),
        ({"extra": {"x": float("nan")}}, ["extra"]),
        ({"extra": {"x": float("inf")}}, ["extra"]),
        ({"extra": {"x": b"bytes"}}, ["extra"]),
        ({"extra": {"x": object()}}, ["extra", "object"]),
        ({"extra": {"x": "\ud800"}}, ["extra", "surrogates"]),
        ({"extra": {"\ud800": 1}}, ["extra", "surrogates"]),
        ({"extra": endless()}, ["extra"]),
        ({"extra": nested(MAX_DEPTH + 1)}, ["extra", str(MAX_DEPTH)]),
        ({"extra": nested(100_000)}, ["extra"]),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(SchemaError) as caught:
        make(**wrong)
    assert all(word in str(caught.value) for word in texts), str(caught.value)
    assert len(str(caught.value)) < 1000


def test_extra_may_be_as_deep_as_the_limit() -> None:
    assert make(extra=nested(MAX_DEPTH)).extra == nested(MAX_DEPTH)


@pytest.mark.parametrize("missing", ["kv_lens", "ropes", "num_layers"])
def test_a_dict_without_a_field_says_which(missing: str) -> None:
    values = make().to_dict()
    del values[missing]
    with pytest.raises(SchemaError, match=f"lacks {missing}"):
        KVMetadata.from_dict(values)


@pytest.mark.parametrize("wrong", [{"extra": None}, {"extra": "x"}, {"shard": {"rank": -1}}])
def test_a_wrong_dict_is_a_schema_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        KVMetadata.from_dict(make().to_dict() | wrong)


def test_it_is_read_as_the_dict_of_the_rfc() -> None:
    metadata = make(extra={"first_token": 7})
    assert metadata["kv_lens"] == [3, 4]
    assert (metadata["first_token"], metadata.get("num_layers"), metadata.get("x", 1)) == (7, 2, 1)
    assert "ropes" in metadata
    assert "x" not in metadata
    assert "extra" not in metadata
    assert dict(metadata) == {name: metadata[name] for name in metadata}
    assert len(metadata) == len(dict(metadata)) > 5
    assert KVMetadata.from_dict(dict(metadata)) == metadata
    with pytest.raises(KeyError, match=r"'kv_len'; this metadata has .*kv_lens"):
        metadata["kv_len"]
