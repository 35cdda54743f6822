"""`TensorTransferData`: any tensors by name, sent as one payload."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branches import Branch, check_branches, flatten, is_nested
from omni_kvlink.payload.format import MAX_DEPTH, MAX_RANK
from omni_kvlink.payload.kv_checks import json_copy
from omni_kvlink.payload.schema import PayloadBase, Reserve, check_request_id
from omni_kvlink.payload.tensor_memory import dtype_code, payload_views
from omni_kvlink.payload.views import TensorView, check_view, same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layout_cache import KnownHeader
    from omni_kvlink.payload.manifest import Manifest

TensorTree: TypeAlias = Union[TensorView, "dict[str, TensorTree]", "list[TensorTree]"]
"""A tensor, or dicts and lists of tensors, nested at will."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_MAX_NAMES = 64
"""Number of tensors up to which a payload's layout is found by their names."""

TENSORS = "tensors"
"""The branch name of a payload that is one `TensorTransferData` and no bundle."""


class TensorTransferData(PayloadBase):
    """Tensors by name, for hidden states, embeddings, token ids, masks or opaque blocks.

    It borrows its tensors and never writes to them. `data["hidden"]` is a tensor, or the dict or
    list of tensors that was given; the consumer reads the same structure, its tensors as views of
    the payload.

    Args:
        request_id: names the payload; the consumer gets it by this name.
        tensors: a dict of tensors, or of dicts and lists of them, nested at most 32 levels deep; a
            tuple becomes a list. Any shape of at most 8 dimensions, zero-sized and 0-d ones too;
            any strides, any device; the dtypes of `DTYPES`. A `PagedTensor` may stand for a tensor.
        metadata: a JSON object: string keys, lists, no tuples, no NaN. It is copied.

    SchemaError names the path of a tensor that cannot be sent, such as "hidden/0".
    """

    _tree: dict[str, TensorTree] | None
    _is_nested: bool

    def __init__(
        self, request_id: str, tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ):
        self.request_id = check_request_id(request_id)
        if type(tensors) is not dict and not isinstance(tensors, Mapping):
            raise SchemaError(f"tensors: a {type(tensors).__name__}, wanted a dict of tensors")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise SchemaError(f"metadata: a {type(metadata).__name__}, wanted a dict")
        # The copy of an empty one would cost a small payload more than the test.
        self.metadata: dict[str, Any] = json_copy(dict(metadata), "metadata") if metadata else {}
        self._set_tree(_checked_dict(tensors, "", 1))
        if self._names() is None:  # a few checked tensors by name exceed no limit
            check_branches(self._branches(), bundle=False, error=SchemaError)

    @property
    def tree(self) -> dict[str, TensorTree]:
        """The tensors in their dicts and lists; ClosedError if the payload was released."""
        if self._tree is None:
            raise self._released()
        return self._tree

    def __getitem__(self, name: str) -> Any:
        if name not in self.tree:
            raise KeyError(f"{name!r}; this payload has {', '.join(self.tree)}")
        return self.tree[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def tensors(self) -> list[TensorView]:
        """All tensors in the order of the wire: depth first, in the order of dicts and lists."""
        if self._is_nested:
            return [leaf for _, leaf in self._flat()]
        return list(self.tree.values())  # type: ignore[arg-type]

    @classmethod
    def blank(
        cls, request_id: str, tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> TensorTransferData:
        """Sizes without bytes, for `KVProducer.allocate` and `KVProducer.stream_put`.

        Only the shapes and dtypes of `tensors` count: tensors on torch's `meta` device will do.
        """
        data = cls(request_id, tensors, metadata)
        views = data.tensors()
        metas = (torch.empty(view.shape, dtype=view.dtype, device="meta") for view in views)
        data._tree = _mapped(data.tree, lambda _: next(metas))
        return data

    def difference(self, other: TensorTransferData) -> str:
        """The first thing that is not bit for bit the same, in words; "" when all is."""
        if difference := self._first_difference(other, ("request_id", "metadata")):
            return difference
        mine, theirs = _skeleton(self.tree), _skeleton(other.tree)
        if mine != theirs or list(self) != list(other):
            return f"tensors: {mine!r:.100} here, {theirs!r:.100} there"
        pairs = zip(self._flat(), other._flat(), strict=True)
        for (path, view), (other_path, other_view) in pairs:
            if path != other_path or not same_bytes(view, other_view):
                return f"tensor {path[1:]!r}"
        return ""

    def as_branch(self, name: str) -> Branch:
        """The structure and the metadata, as the wire carries them."""
        return Branch.of_tree(name, _skeleton(self.tree), json_copy(self.metadata, "metadata"))

    def reserve(self, branch: Branch) -> Iterator[Reserve]:
        """Name, dtype code and shape of each tensor, in the order of the wire."""
        for path, view in self._flat():
            yield branch.name + path, dtype_code(view.dtype), tuple(view.shape)

    @classmethod
    def views_of(
        cls, manifest: Manifest, branches: Sequence[Branch], region: Region
    ) -> TensorTransferData:
        """The tensors of one validated branch as views."""
        (branch,) = branches
        views = payload_views(region, manifest, manifest.numbers_of(branch))
        return cls.of_views(manifest.request_id, branch.tree or {}, views, branch.extra)

    @classmethod
    def of_views(
        cls,
        request_id: str,
        tree: dict[str, Any],
        views: Sequence[torch.Tensor],
        metadata: dict[str, Any],
    ) -> TensorTransferData:
        """Views of a payload that was validated, in the structure of `tree`."""
        data = object.__new__(cls)
        data.request_id, data.metadata = request_id, metadata
        data._set_tree(filled(tree, views))
        return data

    @classmethod
    def of_header(cls, header: KnownHeader, views: Sequence[torch.Tensor]) -> TensorTransferData:
        """See `PayloadBase.of_header`."""
        data = object.__new__(cls)
        data.request_id, data.metadata = header.request_id, {}
        data._tree, data._is_nested = dict(zip(header.layout.names, views, strict=True)), False
        return data

    def close(self) -> None:
        """Release the tensors; those that the caller kept stay valid."""
        self._tree = None

    def __repr__(self) -> str:
        state = ", ".join(self._tree) if self._tree is not None else "(released)"
        return f"<TensorTransferData {self.request_id!r}: {state:.200}>"

    def _branches(self) -> list[Branch]:
        return [self.as_branch(TENSORS)]

    def _key(self) -> Hashable | None:
        names = self._names()
        if names is None:
            return super()._key()
        return names, tuple([(view.dtype, view.shape) for view in self.tree.values()])  # type: ignore[union-attr]

    def _shapes(self) -> tuple[Any, ...]:
        return tuple([(view.dtype, tuple(view.shape)) for view in self.tensors()])

    def _set_tree(self, tree: dict[str, TensorTree]) -> None:
        self._tree, self._is_nested = tree, is_nested(tree)

    def _names(self) -> tuple[str, ...] | None:
        """The names, if the payload is a few tensors by name, without nesting and metadata."""
        tree = self.tree
        if self.metadata or self._is_nested or len(tree) > _MAX_NAMES:
            return None
        return tuple(tree)

    def _flat(self) -> Iterator[tuple[str, TensorView]]:
        return flatten(self.tree)  # type: ignore[return-value]  # every leaf was checked


def _checked_dict(values: Mapping[str, Any], path: str, depth: int) -> dict[str, TensorTree]:
    tree: dict[str, TensorTree] = {}
    for key, child in values.items():
        subpath = f"{path}/{key}" if path else str(key)
        if not isinstance(key, str) or _SURROGATE.search(key):
            raise SchemaError(f"tensors: key {subpath!r:.200} is no string of Unicode characters")
        tree[key] = _checked(child, subpath, depth)
    return tree


def _checked(value: object, path: str, depth: int) -> TensorTree:
    """A private copy of nested dicts and lists, every leaf a tensor that can be sent."""
    where = f"tensor {path!r:.200}"
    # A tensor first: whether it is a Mapping costs more.
    if not isinstance(value, torch.Tensor) and isinstance(value, (Mapping, list, tuple)):
        if depth >= MAX_DEPTH:
            raise SchemaError(f"{where}: nested deeper than {MAX_DEPTH}")
        if isinstance(value, Mapping):
            return _checked_dict(value, path, depth + 1)
        return [_checked(child, f"{path}/{i}", depth + 1) for i, child in enumerate(value)]
    view = check_view(value, where)
    if len(view.shape) > MAX_RANK:
        raise SchemaError(f"{where} has {len(view.shape)} dimensions; the limit is {MAX_RANK}")
    return view


def _skeleton(tree: dict[str, TensorTree]) -> dict[str, Any]:
    """The structure with a 0 in the place of each tensor."""
    return _mapped(tree, lambda _: 0)  # type: ignore[no-any-return]


def filled(tree: dict[str, TensorTree], tensors: Iterable[torch.Tensor]) -> dict[str, TensorTree]:
    """The structure of `tree` with other tensors, in the order of the wire."""
    if not is_nested(tree):
        return dict(zip(tree, tensors, strict=True))
    leaves = iter(tensors)
    return _mapped(tree, lambda _: next(leaves))  # type: ignore[no-any-return]


def _mapped(node: Any, replace: Callable[[Any], Any]) -> Any:
    """The structure with what `replace` returns in the place of each leaf, in their order."""
    if isinstance(node, dict):
        return {key: _mapped(child, replace) for key, child in node.items()}
    if isinstance(node, list):
        return [_mapped(child, replace) for child in node]
    return replace(node)
