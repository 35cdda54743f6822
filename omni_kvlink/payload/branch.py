"""A branch of a payload: one KV cache of a request, in numbers and names, without its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from omni_kvlink.errors import KVLinkError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

KV_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
}
"""torch's names of the dtypes that a KV cache may have, with safetensors' codes for them."""

DTYPES = {
    **KV_DTYPES,
    "float64": "F64",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
"""The same for the tensors of a `TensorTransferData`. Complex dtypes and sub-byte floats are not
among them: not every version of safetensors has a code for them."""

RANKS = {"NHD": 3, "ND": 2}
"""Dimensions by layout: [tokens, kv_heads, head_dim], or [tokens, latent_dim]."""

MAX_BRANCHES = 256
MAX_LAYERS = 4096
MAX_TENSORS = 4096
MAX_DEPTH = 32
_NAME = re.compile(r"(?!pad$)[A-Za-z_][A-Za-z0-9_-]{0,63}")


class Reuse(msgspec.Struct, frozen=True, omit_defaults=True):
    """This branch's bytes are another's: its first `tokens` tokens, or (None) all of them."""

    of: str
    tokens: Count | None = None


class Shard(msgspec.Struct, frozen=True):
    """Which KV heads, `start` to `stop` of the whole model, a tensor-parallel rank holds."""

    rank: Count
    world: Count
    heads: tuple[Count, Count]


class Branch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One KV cache, or (with `tree` set) the tensors of one `TensorTransferData`.

    Every tensor of a cache has `shape` and `dtype`. A tree is a dict of nested dicts and lists with
    a 0 where a tensor is; its other fields describe no cache, and `extra` is its metadata.
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

    @property
    def carries_tensors(self) -> bool:
        """Whether a cache has tensors of its own: it is not empty and reuses no other branch."""
        return self.reuse is None and self.seq_len > 0

    @property
    def code(self) -> str:
        """safetensors' code of the dtype."""
        return DTYPES[self.dtype]


def check_branches(branches: Sequence[Branch], *, bundle: bool, error: type[KVLinkError]) -> None:
    """Raise `error` with the first thing that is wrong; used on both sides of a transfer."""
    for complaint in _complaints(branches, bundle):
        raise error(complaint)


def _complaints(branches: Sequence[Branch], bundle: bool) -> Iterator[str]:
    if not 1 <= len(branches) <= MAX_BRANCHES:
        yield f"{len(branches)} branches; a payload has 1 to {MAX_BRANCHES}"
    if not bundle and (len(branches) != 1 or branches[0].reuse):
        yield "a single cache has exactly one branch with tensors of its own"
    by_name = {branch.name: branch for branch in branches}
    if len(by_name) != len(branches):
        yield "two branches have the same name"
    for branch in branches:
        here = f"branch {branch.name[:80]!r}"
        if not _NAME.fullmatch(branch.name):
            yield f"{here}: a name is 1 to 64 letters, digits, '_' or '-', and not 'pad'"
        complaints = (
            (*length_complaints(branch), *_of_shape(branch), *_of_reuse(branch, by_name))
            if branch.tree is None
            else _of_tree(branch, branch.tree)
        )
        for complaint in complaints:
            yield f"{here}: {complaint}"


def length_complaints(branch: Branch) -> Iterator[str]:
    """What can be wrong with a branch before there are tensors."""
    if not 1 <= branch.num_layers <= MAX_LAYERS:
        yield f"num_layers {branch.num_layers}; wanted 1 to {MAX_LAYERS}"
    if sum(branch.kv_lens) != branch.seq_len:
        yield f"kv_lens {_short(branch.kv_lens)} do not add up to seq_len {branch.seq_len}"
    if not branch.kv_lens or len(branch.ropes) != len(branch.kv_lens):
        yield (
            f"{len(branch.ropes)} ropes for {len(branch.kv_lens)} kv_lens; "
            "each sequence has one length and one next position"
        )
    if _depth(branch.extra) > MAX_DEPTH:
        yield f"extra is nested deeper than {MAX_DEPTH}"


def _of_tree(branch: Branch, tree: dict[str, Any]) -> Iterator[str]:
    if branch != tensor_branch(branch.name, tree, branch.extra):
        yield "it has a tree of tensors, and fields of a KV cache"
    if max(_depth(tree), _depth(branch.extra)) > MAX_DEPTH:
        yield f"tensors or metadata are nested deeper than {MAX_DEPTH}"
        return
    for count, leaf in enumerate(_leaves(tree), 1):
        if type(leaf) is not int or leaf != 0:  # False and 0.0 are equal to 0
            yield f"its tree holds a {type(leaf).__name__}; wanted dicts, lists, and 0 for a tensor"
        if count > MAX_TENSORS:
            yield f"it has more than {MAX_TENSORS} tensors"
            return


def _of_shape(branch: Branch) -> Iterator[str]:
    rank = RANKS.get(branch.layout)
    if rank is None:
        yield f"layout {branch.layout[:40]!r}; wanted one of {', '.join(RANKS)}"
        return
    if branch.dtype not in KV_DTYPES and (branch.dtype or branch.carries_tensors):
        yield f"dtype {branch.dtype[:40]!r}; wanted one of {', '.join(KV_DTYPES)}"
    if not branch.carries_tensors:
        if branch.shape:
            yield "it has a shape but no tensors"
        return
    if len(branch.shape) != rank or branch.shape[0] != branch.seq_len or 0 in branch.shape:
        yield f"shape {list(branch.shape)} of {branch.seq_len} tokens in layout {branch.layout}"
    elif branch.shard and rank == 3:
        yield from _of_shard(branch.shard, branch.shape[1])


def _of_shard(shard: Shard, heads: int) -> Iterator[str]:
    start, stop = shard.heads
    if shard.rank >= shard.world or stop - start != heads:
        yield f"rank {shard.rank} of {shard.world} with heads {start}…{stop}, but {heads} are here"


def _of_reuse(branch: Branch, by_name: dict[str, Branch]) -> Iterator[str]:
    if branch.reuse is None:
        return
    source = by_name.get(branch.reuse.of)
    if source is None or source.reuse is not None or source.tree is not None:
        yield f"it reuses {branch.reuse.of[:80]!r}, which has no tensors of its own, or is no cache"
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


def tensor_branch(name: str, tree: dict[str, Any], metadata: dict[str, Any]) -> Branch:
    """The branch of a `TensorTransferData`: no field of a KV cache is set."""
    return Branch(
        name=name, kv_lens=(), ropes=(), num_layers=0, seq_len=0, extra=metadata, tree=tree
    )


def leaf_paths(tree: dict[str, Any]) -> Iterator[str]:
    """The path of each tensor, in order, as a JSON pointer (RFC 6901) such as "/hidden/0"."""
    return (path for path, _ in flatten(tree))


def flatten(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Path and value of everything in nested dicts and lists that is neither, depth first."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from flatten(child, f"{path}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from flatten(child, f"{path}/{index}")
    else:
        yield path, node


def _leaves(tree: dict[str, Any]) -> Iterator[object]:
    """The values of `flatten` in any order: without paths it is cheap for any hostile tree."""
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


def _short(numbers: Sequence[int]) -> str:
    """The numbers in a message: a hostile header may have many of them."""
    shown = ", ".join(map(str, numbers[:16]))
    return f"[{shown}{', …' if len(numbers) > 16 else ''}]"
