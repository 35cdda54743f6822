"""The tensors that a payload is copied out into, in the order of the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.schema import KVCacheTransferData, PayloadBase
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.views import TensorView


def targets_of(
    data: Payload, into: PayloadBase | Mapping[str, Any] | Sequence[TensorView]
) -> Sequence[TensorView]:
    """Return the tensors of `into` in the order of `data.tensors()`.

    SchemaError if it is nothing that holds tensors, or has other names than `data`.
    """
    if isinstance(into, PayloadBase):
        return into.tensors()
    if isinstance(into, Mapping):
        if isinstance(data, TensorTransferData):
            named = TensorTransferData(data.request_id, _in_order(data.tree, into, ""))
            return named.tensors()
        if isinstance(data, KVCacheTransferData):
            return KVCacheTransferData(data.request_id, into, (), data.metadata).tensors()
    elif isinstance(into, Sequence) and not isinstance(into, str):
        return into
    raise SchemaError(
        f"scatter of a {type(data).__name__} takes a list of tensors in the order of "
        f"data.tensors(), or a payload that holds them; this is a {type(into).__name__}"
    )


def _in_order(tree: Any, given: Any, path: str) -> Any:
    """The tensors of `given` in the structure and the order of `tree`."""
    where = f"scatter, tensor {path!r}" if path else "scatter"
    if isinstance(tree, dict):
        names = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        if not isinstance(given, Mapping) or set(given) != set(tree):
            raise SchemaError(f"{where}: the payload has {sorted(tree)}, given are {names}")
        inside = f"{path}/" if path else ""
        return {name: _in_order(tree[name], given[name], f"{inside}{name}") for name in tree}
    if isinstance(tree, list):
        if not isinstance(given, (list, tuple)) or len(given) != len(tree):
            raise SchemaError(f"{where}: the payload has a list of {len(tree)}")
        return [
            _in_order(child, one, f"{path}/{number}")
            for number, (child, one) in enumerate(zip(tree, given, strict=True))
        ]
    return given
