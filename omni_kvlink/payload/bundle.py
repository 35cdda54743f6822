"""`KVCacheBundle`: all caches of one request in one payload; how any payload is opened and read."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branches import Branch, Reuse, as_int, check_branches
from omni_kvlink.payload.schema import (
    KVCacheTransferData,
    KVMetadata,
    PayloadBase,
    Reserve,
    check_request_id,
)
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.tensor_memory import payload_views

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layout_cache import KnownHeader
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


@dataclasses.dataclass(frozen=True)
class PrefixOf:
    """The first `tokens` tokens of another branch; `metadata` tells their own next position."""

    branch: str
    tokens: int
    metadata: KVMetadata


@dataclasses.dataclass(frozen=True)
class SameAs:
    """A branch whose bytes are those of another branch; so is its metadata, unless given."""

    branch: str
    metadata: KVMetadata | None = None


BundleBranch: TypeAlias = KVCacheTransferData | TensorTransferData | PrefixOf | SameAs

OWNERS = (KVCacheTransferData, TensorTransferData)
"""The kinds of branches that have tensors of their own."""


class KVCacheBundle(PayloadBase):
    """The caches of one request, by name; BAGEL's are `gen`, `cfg_text` and `cfg_img`.

    They are sent as one payload, in which no byte occurs twice.
    `bundle[name]` is a cache with tensors, also where the branch is declared as `PrefixOf` or
    `SameAs` another cache (then its tensors are views of that one's). A branch may be a
    `TensorTransferData` instead: those are in `bundle.tensor_data`, and iteration leaves them out.
    `bundle.branches[name]` is what was declared.

    SchemaError if a branch refers to one without tensors of its own, or if lengths disagree or
    request ids differ.
    """

    _is_bundle: ClassVar[bool] = True

    def __init__(self, request_id: str, branches: Mapping[str, BundleBranch]):
        self.request_id = check_request_id(request_id)
        if not isinstance(branches, Mapping):
            text = f"branches: a dict of caches by name, this is a {type(branches).__name__}"
            raise SchemaError(text)
        self.branches: dict[str, BundleBranch] = dict(branches)
        for name, branch in self.branches.items():
            if not isinstance(name, str):
                raise SchemaError(f"branch {name!r}: its name is a {type(name).__name__}")
            if isinstance(branch, OWNERS):
                if branch.request_id != request_id:
                    raise SchemaError(
                        f"branch {name!r} is of request {branch.request_id!r}, not {request_id!r}"
                    )
            elif not isinstance(branch, (PrefixOf, SameAs)):
                raise SchemaError(
                    f"branch {name!r} is a {type(branch).__name__}; "
                    "wanted a KVCacheTransferData, TensorTransferData, PrefixOf or SameAs"
                )
            elif isinstance(branch, PrefixOf) and type(as_int(branch.tokens)) is not int:
                raise SchemaError(f"branch {name!r}: tokens {branch.tokens!r} is no integer")
            elif not isinstance(branch.metadata, KVMetadata) and not (
                isinstance(branch, SameAs) and branch.metadata is None
            ):
                raise SchemaError(f"branch {name!r}: its metadata is no KVMetadata")
        check_branches(self._branches(), bundle=True, error=SchemaError)

    def __getitem__(self, name: str) -> KVCacheTransferData:
        if name not in self.branches:
            raise KeyError(f"{name!r}; this bundle has {', '.join(self.branches)}")
        branch = self.branches[name]
        if isinstance(branch, KVCacheTransferData):
            return branch
        if isinstance(branch, TensorTransferData):
            raise KeyError(f"{name!r} is a TensorTransferData: take it from `tensor_data`")
        source, metadata = self._source(name, branch), self._metadata(name)
        return source.first_tokens(metadata.seq_len, metadata)

    def __iter__(self) -> Iterator[str]:
        tensor_data = self.tensor_data
        return (name for name in self.branches if name not in tensor_data)

    def __len__(self) -> int:
        return len(self.branches) - len(self.tensor_data)

    @property
    def layer_blocks(self) -> Mapping[str, list[TensorView | None]]:
        """The `layer_blocks` of the only cache; AttributeError if there are several, or none."""
        names = list(self)
        if len(names) != 1:
            choice = " or ".join(f"bundle[{name!r}].layer_blocks" for name in names)
            cure = f"choose {choice}" if names else "it has named tensors: bundle.tensor_data"
            raise AttributeError(f"this bundle has {len(names)} caches: {cure}")
        return self[names[0]].layer_blocks

    @property
    def tensor_data(self) -> dict[str, TensorTransferData]:
        """The branches that are a `TensorTransferData`, by name."""
        branches = self.branches.items()
        return {name: data for name, data in branches if isinstance(data, TensorTransferData)}

    def tensors(self) -> list[TensorView]:
        """The tensors that are sent, in the order of the wire."""
        return [view for owner in self._owners() for view in owner.tensors()]

    @property
    def reused_nbytes(self) -> int:
        """Bytes that need not be sent, because a branch is a prefix of another or the same."""
        total = 0
        for name, branch in self.branches.items():
            if isinstance(branch, (PrefixOf, SameAs)):
                source = self._source(name, branch)
                sent = sum(view.nbytes for view in source.tensors())
                total += sent * self._metadata(name).seq_len // source.metadata.seq_len
        return total

    def reserve(self, branch: Branch) -> Iterable[Reserve]:
        """Name, dtype code and shape of each tensor that a branch has of its own."""
        owner = self.branches[branch.name]
        return owner.reserve(branch) if isinstance(owner, OWNERS) else ()

    @classmethod
    def views_of(
        cls, manifest: Manifest, branches: Sequence[Branch], region: Region
    ) -> KVCacheBundle:
        """The branches of a validated payload; those that reuse another one have no tensors."""
        opened: dict[str, BundleBranch] = {}
        for branch in branches:
            reuse = branch.reuse
            if reuse is None:
                kind = KVCacheTransferData if branch.tree is None else TensorTransferData
                opened[branch.name] = kind.views_of(manifest, [branch], region)
            elif reuse.tokens is None:
                opened[branch.name] = SameAs(reuse.of, KVMetadata.from_branch(branch))
            else:
                metadata = KVMetadata.from_branch(branch)
                opened[branch.name] = PrefixOf(reuse.of, reuse.tokens, metadata)
        return cls(manifest.request_id, opened)

    def difference(self, other: KVCacheBundle) -> str:
        """The first thing that is not bit for bit the same, in words; "" when all is."""
        if self.request_id != other.request_id or list(self.branches) != list(other.branches):
            return f"{self!r} here, {other!r} there"
        for name, mine in self.branches.items():
            theirs = other.branches[name]
            if type(mine) is not type(theirs) or self._reuse(name) != other._reuse(name):
                return f"branch {name!r}: {mine!r:.200} here, {theirs!r:.200} there"
            if isinstance(mine, TensorTransferData) and isinstance(theirs, TensorTransferData):
                difference = mine.difference(theirs)
            else:
                difference = self[name].difference(other[name])
            if difference:
                return f"branch {name!r}, {difference}"
        return ""

    def close(self) -> None:
        """Release the tensors; those that the caller kept stay valid."""
        for owner in self._owners():
            owner.close()

    def __repr__(self) -> str:
        return f"<KVCacheBundle {self.request_id!r}: {', '.join(self.branches)}>"

    def _owners(self) -> list[KVCacheTransferData | TensorTransferData]:
        return [b for b in self.branches.values() if isinstance(b, OWNERS)]

    def _source(self, name: str, reference: PrefixOf | SameAs) -> KVCacheTransferData:
        source = self.branches.get(reference.branch)
        if not isinstance(source, KVCacheTransferData):
            raise SchemaError(
                f"branch {name!r} refers to {reference.branch!r}, which has no tensors of its own"
            )
        return source

    def _metadata(self, name: str) -> KVMetadata:
        branch = self.branches[name]
        if isinstance(branch, KVCacheTransferData):
            return branch.metadata
        assert isinstance(branch, (PrefixOf, SameAs))
        source = self._source(name, branch).metadata
        if branch.metadata is None:
            return source
        return dataclasses.replace(branch.metadata, dtype=branch.metadata.dtype or source.dtype)

    def _reuse(self, name: str) -> Reuse | None:
        branch = self.branches[name]
        if isinstance(branch, PrefixOf):
            return Reuse(branch.branch, operator.index(branch.tokens))
        return Reuse(branch.branch) if isinstance(branch, SameAs) else None

    def _shapes(self) -> tuple[Any, ...]:
        return tuple([data._shapes() for data in self.tensor_data.values()])

    def _branches(self) -> list[Branch]:
        return [
            branch.as_branch(name)
            if isinstance(branch, OWNERS)
            else self._metadata(name).as_branch(name, reuse=self._reuse(name))
            for name, branch in self.branches.items()
        ]


KVPayload: TypeAlias = KVCacheTransferData | KVCacheBundle
"""The payloads that an engine reads KV caches from."""

Payload: TypeAlias = KVPayload | TensorTransferData
"""The content of one transfer."""

PAYLOAD_KINDS: dict[str, type[Payload]] = {
    kind.__name__: kind for kind in (KVCacheTransferData, TensorTransferData, KVCacheBundle)
}
PAYLOAD_TYPES = frozenset(PAYLOAD_KINDS.values())


def check_payload(data: object, call: str) -> None:
    """Raise SchemaError, which says what `call` takes, unless `data` is a payload."""
    if isinstance(data, PayloadBase):
        return
    cure = "wrap tensors as TensorTransferData(request_id, {name: tensor}), K and V of layers as "
    raise SchemaError(
        f"{call} takes a payload, this is a {type(data).__name__}: {cure}KVCacheTransferData"
    )


def payload_list(payloads: Iterable[Payload], call: str) -> list[Payload]:
    """Return the payloads as a list; SchemaError, which says what `call` takes, if one is none."""
    if isinstance(payloads, (PayloadBase, torch.Tensor, str)) or not isinstance(payloads, Iterable):
        text = f"{call} takes a list of payloads, this is a {type(payloads).__name__}"
        raise SchemaError(text)
    listed = list(payloads)
    for number, data in enumerate(listed):
        check_payload(data, f"{call}, payload {number},")
    return listed


def open_known(header: KnownHeader, region: Region) -> Payload:
    """Open a payload whose header has a layout of a `kind`: sooner than `open_payload` does."""
    return PAYLOAD_KINDS[header.layout.kind].of_header(header, payload_views(region, header))


def open_payload(manifest: Manifest, region: Region) -> Payload:
    """The data that were put, as views of the payload; nothing is copied."""
    return PAYLOAD_KINDS[manifest.kind].views_of(manifest, manifest.branches, region)


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
