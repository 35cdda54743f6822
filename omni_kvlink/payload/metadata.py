"""`KVMetadata`: what must travel with a cache besides its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branch import Branch, Reuse, Shard, length_complaints

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class KVMetadata:
    """Lengths, positions and layout of one cache.

    `ropes` differs from `kv_lens` as soon as an image is in the context (it adds many tokens and
    one position), so it is carried and never derived.

    Args:
        kv_lens: cached tokens of each sequence.
        ropes: next rotary position of each sequence.
        num_layers: layers of the cache.
        seq_len: all tokens together; the sum of `kv_lens` when left out.
        dtype: torch's name, such as "bfloat16"; taken from the tensors when left out.
        layout: "NHD" for K and V of [tokens, kv_heads, head_dim], "ND" for one latent a layer.
        block_size: tokens of a block where the cache came from pages, else 0.
        image_shape: (height, width) in pixels of the image to make, where there is one.
        extra: anything else, as JSON values (dicts with string keys, lists, no tuples, no NaN).
        shard: which heads of the whole model these are, under tensor parallelism.

    Raises:
        SchemaError: a value is not of its type, or the lengths contradict each other.
    """

    kv_lens: tuple[int, ...]
    ropes: tuple[int, ...]
    num_layers: int
    seq_len: int = -1
    dtype: str = ""
    layout: str = "NHD"
    block_size: int = 0
    image_shape: tuple[int, int] | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    shard: Shard | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__  # frozen from here on
        try:
            put(self, "kv_lens", tuple(self.kv_lens))
            put(self, "ropes", tuple(self.ropes))
            put(self, "extra", json_copy(self.extra, "extra"))
            if self.image_shape is not None:
                put(self, "image_shape", tuple(self.image_shape))
            if self.seq_len == -1:
                put(self, "seq_len", sum(self.kv_lens))
            branch = self.as_branch("metadata")
        except TypeError as error:
            raise SchemaError(f"metadata: {error}") from None
        for complaint in length_complaints(branch):
            raise SchemaError(f"metadata: {complaint}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVMetadata:
        """From the RFC's dict; keys this class has no field for go into `extra`."""
        names = {field.name for field in dataclasses.fields(cls)}
        missing = [name for name in ("kv_lens", "ropes", "num_layers") if name not in values]
        if missing:
            raise SchemaError(f"metadata lacks {', '.join(missing)}")
        known = {name: value for name, value in values.items() if name in names}
        known["extra"] = json_copy(known.get("extra", {}), "extra") | {
            name: value for name, value in values.items() if name not in names
        }
        if isinstance(known.get("shard"), Mapping):
            known["shard"] = _converted(known["shard"], Shard)
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """The RFC's dict: `kv_lens` and `ropes` as lists, every field present."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["kv_lens"], values["ropes"] = list(self.kv_lens), list(self.ropes)
        values["shard"] = msgspec.to_builtins(self.shard)
        return values

    def as_branch(
        self,
        name: str,
        *,
        shape: tuple[int, ...] = (),
        block_ids: tuple[int, ...] = (),
        reuse: Reuse | None = None,
    ) -> Branch:
        """This metadata as the wire carries it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own = {"name": name, "shape": shape, "block_ids": block_ids, "reuse": reuse}
        return _converted({**values, **own}, Branch)

    @classmethod
    def from_branch(cls, branch: Branch) -> KVMetadata:
        return cls(**{field.name: getattr(branch, field.name) for field in dataclasses.fields(cls)})


def _converted(values: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"metadata: {error}") from None


def json_copy(values: dict[str, Any], where: str) -> dict[str, Any]:
    """A private copy of a JSON object, as the other side will read it.

    Raises:
        SchemaError: it is no JSON object, or does not come back from JSON as it was.
    """
    try:
        copy = msgspec.json.decode(msgspec.json.encode(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"metadata: {where} is not JSON: {error}") from None
    if not isinstance(copy, dict) or copy != values:
        raise SchemaError(
            f"metadata: {where} changes when written as JSON; "
            "use string keys, lists and finite numbers"
        )
    return copy
