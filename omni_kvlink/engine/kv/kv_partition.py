"""Which branches and heads of a request's KV each rank of the next stage receives."""

from __future__ import annotations

import dataclasses

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVPayload, PrefixOf, SameAs
from omni_kvlink.engine.config import DiffusionParallelConfig
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.errors import SchemaError
from omni_kvlink.topology import Part, Topology


@dataclasses.dataclass(frozen=True)
class KVPart:
    """A part of a request's KV that is sent as one payload."""

    guidance: int = 0  # the guidance rank that receives it
    of: int = 1  # how many guidance ranks there are
    part: Part | None = None  # its heads; None if one tensor rank sends all heads to one

    @property
    def sender(self) -> int:
        """The tensor rank that sends it."""
        return 0 if self.part is None else self.part.shard.rank

    @property
    def readers(self) -> int:
        """How many ranks receive it."""
        return 1 if self.part is None else len(self.part.receivers)

    def key(self, request_id: str) -> str:
        """The key under which it is put; the request's id if the KV is not divided."""
        key = self._branches_key(request_id)
        return key if self.part is None else self.part.key(key)

    def cut(self, payload: KVPayload) -> KVPayload:
        """This part of the sender's payload, as views; SchemaError if the payload lacks it."""
        if self.of > 1:
            key = self._branches_key(payload.request_id)
            payload = _select_branches(payload, key, self.guidance, self.of)
        return payload if self.part is None else self.part.of(payload)

    def _branches_key(self, request_id: str) -> str:
        return request_id if self.of == 1 else f"{request_id}/cfg{self.guidance}of{self.of}"


@dataclasses.dataclass(frozen=True)
class KVPartition:
    """How a stage's KV is divided among the ranks of the next stage.

    The receivers' data-parallel groups are alike: each request goes to one of them. SchemaError if
    a stage's ranks cannot have as many heads each.
    """

    heads: int  # of the whole model's KV; 1 for latents
    senders: int  # tensor ranks of the sending stage
    receivers: DiffusionParallelConfig

    def __post_init__(self) -> None:
        Topology(self.heads, self.senders, self.receivers.tensor_parallel_size)

    @property
    def parts_each(self) -> int:
        """How many parts a rank of the receiving stage gets; all have as many heads."""
        return len(self.sent_to(RankCoords(0, 0, 0)))

    def sent_to(self, coords: RankCoords) -> tuple[KVPart, ...]:
        """The parts that a rank of the receiving stage gets, in the order of the heads."""
        return tuple(
            one
            for one in self.parts()
            if one.guidance == coords.guidance
            and (one.part is None or coords.tensor in one.part.receivers)
        )

    def parts(self) -> list[KVPart]:
        """All parts of a KV."""
        tensor, guidance = self.receivers.tensor_parallel_size, self.receivers.cfg_parallel_size
        heads: tuple[Part | None, ...] = (None,)
        if not self.senders == tensor == 1:
            heads = Topology(self.heads, self.senders, tensor).parts()
        return [KVPart(rank, guidance, part) for rank in range(guidance) for part in heads]


def _select_branches(payload: KVPayload, key: str, rank: int, of: int) -> KVCacheBundle:
    """Each `of`-th branch from `rank` on.

    Where a branch refers to one that is not selected, its tensors are views of that one's. The
    `extra` metadata of the payload's first branch goes to every rank.
    """
    names = list(payload)[rank::of] if isinstance(payload, KVCacheBundle) else []
    if not isinstance(payload, KVCacheBundle) or not names:
        raise SchemaError(f"{payload!r} has no branch for guidance rank {rank} of {of}")
    caches = {name: payload[name] for name in names}
    metadata = {name: cache.metadata for name, cache in caches.items()}
    extra = payload[next(iter(payload))].metadata.extra | metadata[names[0]].extra
    metadata[names[0]] = dataclasses.replace(metadata[names[0]], extra=extra)
    branches: dict[str, KVCacheTransferData | SameAs | PrefixOf] = {}
    owners: dict[str, str] = {}
    # The longest branch comes first: it has the tensors that shorter ones refer to.
    for name in sorted(names, key=lambda one: -metadata[one].seq_len):
        declared, cache, own = payload.branches[name], caches[name], metadata[name]
        source = declared.branch if isinstance(declared, (SameAs, PrefixOf)) else name
        owner = source if source in names else owners.setdefault(source, name)
        if owner == name:
            branches[name] = KVCacheTransferData(key, cache.layer_blocks, cache.block_ids, own)
        elif own.seq_len == metadata[owner].seq_len:
            branches[name] = SameAs(owner, own)
        else:
            branches[name] = PrefixOf(owner, own.seq_len, own)
    return KVCacheBundle(key, {name: branches[name] for name in names})
