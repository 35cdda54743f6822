"""Checks of the values that a KV cache is made of: its metadata, and the tensors of its layers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branches import PART_WORDS, PARTS, Branch, Shard, as_int, length_complaints
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.tensor_memory import are_alike, dtype_name
from omni_kvlink.payload.views import TensorView, check_view

T = TypeVar("T")
LayerBlocks = Mapping[str, Sequence[TensorView | None]]

CACHES = {"key": "key_cache", "value": "value_cache", "latent": "latent_cache"}
"""The RFC's names of `layer_blocks`, by the wire's name of the part."""


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `KVMetadata`, integers of other libraries made Python's; or SchemaError."""
    fields = dict(metadata)
    try:
        for name in ("kv_lens", "ropes"):
            if not isinstance(fields[name], Iterable):
                form = f"one integer a sequence, as in [{described(fields[name])}]"
                raise SchemaError(f"metadata: {name}: {form}")
            fields[name] = tuple(map(as_int, fields[name]))
        for name in ("num_layers", "seq_len", "block_size"):
            fields[name] = as_int(fields[name])
        fields["extra"] = json_copy(fields["extra"], "metadata: extra")
        if fields["image_shape"] is not None:
            fields["image_shape"] = tuple(map(as_int, fields["image_shape"]))
        if isinstance(fields["shard"], Mapping):
            fields["shard"] = converted(fields["shard"], Shard)
        if isinstance(shard := fields["shard"], Shard):
            heads = [as_int(head) for head in shard.heads]
            values = {"rank": as_int(shard.rank), "world": as_int(shard.world), "heads": heads}
            fields["shard"] = converted(values, Shard)
        if fields["seq_len"] == -1:
            fields["seq_len"] = sum(fields["kv_lens"])
        branch = converted({**fields, "name": "metadata"}, Branch)
    except TypeError as error:
        raise SchemaError(f"metadata: {error}") from None
    for complaint in length_complaints(branch):
        raise SchemaError(f"metadata: {complaint}")
    return fields


def check_names(subject: str, required: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise SchemaError unless the dict has these names; it says which similar ones it has."""
    missing = [name for name in required if name not in values]
    if missing:
        extra = [str(name) for name in values if name not in required]
        close = {name: difflib.get_close_matches(name, extra, 1) for name in missing}
        hints = [f"is {match[0]!r} meant as {name!r}?" for name, match in close.items() if match]
        raise SchemaError("; ".join([f"{subject} lacks {', '.join(missing)}", *hints]))


def complete_layers(
    layer_blocks: LayerBlocks, layout: str, num_layers: int
) -> dict[str, list[TensorView | None]]:
    """A private copy of the lists, every layer present and of one shape and dtype."""
    if layout not in PARTS:
        raise SchemaError(f"layout {layout!r}; must be one of {', '.join(PARTS)}")
    names = {CACHES[part]: PART_WORDS[part] for part in PARTS[layout]}
    if not isinstance(layer_blocks, Mapping) or set(layer_blocks) != set(names):
        is_dict = isinstance(layer_blocks, Mapping)
        state = f"has {sorted(map(str, layer_blocks))}" if is_dict else described(layer_blocks)
        text = f"layer_blocks {'' if is_dict else 'is '}{state}"
        raise SchemaError(f"{text}; layout {layout} has {list(names)}")
    for name, layers in layer_blocks.items():
        if layers is not None and not isinstance(layers, (Sequence, Iterator)):
            raise SchemaError(
                f"layer_blocks: {name} is {described(layers)}, wanted a list with one tensor a "
                "layer; list(t) makes one of a tensor t of all layers"
            )
    blocks = {name: list(layer_blocks[name] or ()) for name in names}
    first = next((layer for name in names for layer in blocks[name] if layer is not None), None)
    for name, word in names.items():
        if len(blocks[name]) != num_layers:
            raise SchemaError(f"{word}: {len(blocks[name])} layers, but num_layers is {num_layers}")
        if first is None or are_alike(blocks[name], first):
            continue
        for index, layer in enumerate(blocks[name]):
            label = f"layer {index}, {word}"
            if layer is None:
                raise SchemaError(f"{label} is missing, while other layers are present")
            layer = blocks[name][index] = check_view(layer, label)
            if layer.shape != first.shape or layer.dtype != first.dtype:
                raise SchemaError(
                    f"{label} is {layer.dtype} {list(layer.shape)}; the first tensor of this cache "
                    f"is {first.dtype} {list(first.shape)}, and all must be alike"
                )
    return blocks


def fitting_dtype(
    blocks: dict[str, list[TensorView | None]], layout: str, lengths: Sequence[int], dtype: str
) -> str:
    """The dtype of the layers; SchemaError if they are not as layout, lengths and dtype say."""
    first = next((layer for layers in blocks.values() for layer in layers), None)
    tokens = sum(lengths)
    if first is None:
        if tokens:
            raise SchemaError(f"kv_lens say {tokens} tokens, but every layer is None")
        return dtype
    label = f"layer 0, {PART_WORDS[PARTS[layout][0]]}"
    rank = len(layout)
    if len(first.shape) != rank or 0 in first.shape:
        raise SchemaError(
            f"{label} is {list(first.shape)}; layout {layout} has {rank} dimensions, "
            "none of them 0 (an empty cache is given as None)"
        )
    if first.shape[0] != tokens:
        says = f"kv_lens {list(lengths)} say {tokens}"
        raise SchemaError(f"{label} has {first.shape[0]} tokens, but {says}")
    name = dtype_name(first.dtype)
    if name not in KV_DTYPES:
        raise SchemaError(
            f"{label}: dtype {first.dtype} is not one of a KV cache ({', '.join(KV_DTYPES)}); "
            "TensorTransferData sends tensors of others"
        )
    if dtype not in ("", name):
        raise SchemaError(f"{label} is {name}, but metadata says {dtype}")
    return name


def check_reason(reason: str) -> str:
    """Return the reason of a failure; SchemaError if it is no string."""
    if not isinstance(reason, str):
        raise SchemaError(f"reason: a string, this is {described(reason)}")
    return reason


def described(value: object) -> str:
    """A value that is none of those allowed, in one short line."""
    if isinstance(value, (str, int, float, bytes)):
        return f"{value!r:.60}"
    return "None" if value is None else f"a {type(value).__name__}"


def converted(values: object, kind: type[T]) -> T:
    """An object of metadata; SchemaError if the values do not make one."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"metadata: {error}") from None


def json_copy(values: dict[str, Any], subject: str) -> dict[str, Any]:
    """A private copy of a JSON object; SchemaError if it does not come back from JSON as it was."""
    return through_json(values, subject)[1]


def through_json(values: dict[str, Any], subject: str) -> tuple[bytes, dict[str, Any]]:
    """The text of a JSON object, and the copy that is read from it; errors as `json_copy`."""
    try:
        text = msgspec.json.encode(values)
        copy = msgspec.json.decode(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"{subject} is not JSON: {error}") from None
    if not isinstance(copy, dict) or copy != values:
        raise SchemaError(
            f"{subject} changes when written as JSON; use string keys, lists and finite numbers"
        )
    return text, copy
