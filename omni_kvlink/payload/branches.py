"""Branches: the caches and the trees of tensors of a payload, without their bytes."""

from __future__ import annotations

import operator
import re
import reprlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from omni_kvlink.payload.dtypes import DTYPES, KV_DTYPES
from omni_kvlink.payload.format import MAX_BRANCHES, MAX_DEPTH, MAX_LAYERS, MAX_TENSORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from omni_kvlink.errors import KVLinkError

PART_WORDS = {"key": "K", "value": "V", "latent": "latent"}
PARTS = {"NHD": ("key", "value"), "ND": ("latent",)}
"""A layer's tensors by layout: K and V of [tokens, heads, dim], or one latent of [tokens, dim].

A layout has a letter for each dimension.
"""

_BRANCH_NAME = re.compile(r"(?!pad$)[A-Za-z_][A-Za-z0-9_-]{0,63}")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Reuse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A branch whose bytes are those of branch `of`: its first `tokens` tokens, or (None) all."""

    of: str
    tokens: Count | None = None


class Shard(msgspec.Struct, frozen=True):
    """The KV heads, `start` to `stop` of the whole model, that a tensor-parallel rank holds."""

    rank: Count
    world: Count
    heads: tuple[Count, Count]


class Branch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One KV cache, or (with `tree` set) the tensors of one `TensorTransferData`.

    Every tensor of a cache has `shape` and `dtype`. A tree is a dict of nested dicts and lists with
    a 0 for each tensor; then `extra` is the metadata, and no field of a cache is set.
    """

    name: str
    kv_lens: tuple[Count, ...]
    ropes: tuple[Count, ...]
    num_layers: Count
    seq_len: Count
    dtype: str = ""
    layout: str = "NHD"
    shape: tuple[Count, ...] = ()
    block_size: Count = 0
    block_ids: tuple[Count, ...] = ()
    image_shape: tuple[Count, Count] | None = None
    extra: dict[str, Any] = {}
    reuse: Reuse | None = None
    shard: Shard | None = None
    tree: dict[str, Any] | None = None

    @classmethod
    def of_tree(cls, name: str, tree: dict[str, Any], extra: dict[str, Any]) -> Branch:
        """The branch of a `TensorTransferData`; `extra` is its metadata."""
        return cls(name=name, kv_lens=(), ropes=(), num_layers=0, seq_len=0, extra=extra, tree=tree)

    @property
    def carries_tensors(self) -> bool:
        """Whether a cache has tensors of its own: it is not empty and reuses no other branch."""
        return self.reuse is None and self.seq_len > 0

    @property
    def parts(self) -> int:
        """Tensors of a layer; each tensor of a tree counts as a layer of its own."""
        return len(PARTS[self.layout]) if self.tree is None else 1

    @property
    def code(self) -> str:
        """The safetensors code of the dtype."""
        return DTYPES[self.dtype]


def is_nested(tree: Mapping[str, object]) -> bool:
    """Whether a tree has dicts or lists in it, and not tensors by name alone."""
    for child in tree.values():  # noqa: SIM110 (a generator costs a small payload more)
        if isinstance(child, (dict, list)):
            return True
    return False


def length_complaints(branch: Branch) -> Iterator[str]:
    """Yield what is wrong with a cache's lengths and metadata, before there are tensors."""
    if not 1 <= branch.num_layers <= MAX_LAYERS:
        yield f"num_layers {branch.num_layers}; must be 1 to {MAX_LAYERS}"
    if sum(branch.kv_lens) != branch.seq_len:
        shown = reprlib.repr(list(branch.kv_lens))  # a hostile header may have many
        yield f"kv_lens {shown} do not add up to seq_len {branch.seq_len}"
    if not branch.kv_lens or len(branch.ropes) != len(branch.kv_lens):
        yield (
            f"{len(branch.ropes)} ropes for {len(branch.kv_lens)} kv_lens; "
            "each sequence has one length and one next position"
        )
    if _depth(branch.extra) > MAX_DEPTH:
        yield f"extra is nested deeper than {MAX_DEPTH}"


def flatten(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Path (a JSON pointer, RFC 6901) and value of each leaf of dicts and lists, depth first."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from flatten(child, f"{path}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from flatten(child, f"{path}/{index}")
    else:
        yield path, node


def check_branches(branches: Sequence[Branch], *, bundle: bool, error: type[KVLinkError]) -> None:
    """Raise `error` with the first thing that is wrong; used on both sides of a transfer."""
    if not 1 <= len(branches) <= MAX_BRANCHES:
        raise error(f"{len(branches)} branches; a payload has 1 to {MAX_BRANCHES}")
    if not bundle and (len(branches) != 1 or branches[0].reuse):
        raise error("a payload that is no bundle has exactly one branch, with tensors of its own")
    by_name = {branch.name: branch for branch in branches}
    if len(by_name) != len(branches):
        raise error("two branches have the same name")
    for branch in branches:
        where = f"branch {branch.name[:80]!r}"
        if not _BRANCH_NAME.fullmatch(branch.name):
            raise error(f"{where}: a name is 1 to 64 letters, digits, '_' or '-', and not 'pad'")
        complaints = (
            (*length_complaints(branch), *_shape_complaints(branch), *_reuse_of(branch, by_name))
            if branch.tree is None
            else _tree_complaints(branch, branch.tree)
        )
        for complaint in complaints:
            raise error(f"{where}: {complaint}")


def _tree_complaints(branch: Branch, tree: dict[str, Any]) -> Iterator[str]:
    if branch != Branch.of_tree(branch.name, tree, branch.extra):
        yield "it has a tree of tensors and fields of a KV cache"
    if max(_depth(tree), _depth(branch.extra)) > MAX_DEPTH:
        yield f"tensors or metadata are nested deeper than {MAX_DEPTH}"
    for count, leaf in enumerate(leaves(tree), 1):
        if type(leaf) is not int or leaf != 0:  # False and 0.0 are equal to 0
            yield f"its tree holds a {type(leaf).__name__}; only dicts, lists, and 0 for a tensor"
        if count > MAX_TENSORS:
            yield f"it has more than {MAX_TENSORS} tensors"


def _shape_complaints(branch: Branch) -> Iterator[str]:
    if branch.layout not in PARTS:
        yield f"layout {branch.layout[:40]!r}; must be one of {', '.join(PARTS)}"
        return
    rank = len(branch.layout)
    if branch.dtype not in KV_DTYPES and (branch.dtype or branch.carries_tensors):
        yield f"dtype {branch.dtype[:40]!r}; must be one of {', '.join(KV_DTYPES)}"
    if not branch.carries_tensors:
        if branch.shape:
            yield "it has a shape but no tensors"
        return
    if len(branch.shape) != rank or branch.shape[0] != branch.seq_len or 0 in branch.shape:
        yield f"shape {list(branch.shape)} of {branch.seq_len} tokens in layout {branch.layout}"
    elif branch.shard and rank == 3:
        shard, heads = branch.shard, branch.shape[1]
        start, stop = shard.heads
        if shard.rank >= shard.world or stop - start != heads:
            yield f"rank {shard.rank} of {shard.world}, heads {start}…{stop}, but {heads} are here"


def _reuse_of(branch: Branch, by_name: Mapping[str, Branch]) -> Iterator[str]:
    if branch.reuse is None:
        return
    source = by_name.get(branch.reuse.of)
    if source is None or source.reuse is not None or source.tree is not None:
        what = "no tensors of its own" if source is None or source.tree is None else "no cache"
        yield f"it reuses {branch.reuse.of[:80]!r}, which has {what}"
        return
    tokens = source.seq_len if branch.reuse.tokens is None else branch.reuse.tokens
    if not 0 < tokens <= source.seq_len or tokens != branch.seq_len:
        yield (
            f"it reuses {tokens} tokens of {source.name!r} ({source.seq_len} tokens), "
            f"but its own length is {branch.seq_len}"
        )
    for field in ("num_layers", "layout", "dtype"):
        mine, theirs = getattr(branch, field), getattr(source, field)
        if mine != theirs:
            yield f"its {field} is {mine!r}, that of {source.name!r} is {theirs!r}"


def leaves(tree: dict[str, Any]) -> Iterator[object]:
    """The values of `flatten` in any order, without the cost of paths: a tree may be hostile."""
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, (dict, list)):
                stack.append(child)
            else:
                yield child


def _depth(value: dict[str, Any]) -> int:
    """Levels of dicts and lists, found without recursion."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
    return depth


def tensor_names(branch: Branch) -> Iterator[str]:
    """The name of each tensor that a branch carries, in the order of the wire."""
    if branch.tree is not None:
        for path, _ in flatten(branch.tree):
            yield branch.name + path
    elif branch.carries_tensors:
        for layer in range(branch.num_layers):
            for part in PARTS[branch.layout]:
                yield f"{branch.name}.{layer}.{part}"


def as_int(value: object) -> object:
    """An int for an integer of numpy or torch; all else, bools too, as it is, to be refused."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value
