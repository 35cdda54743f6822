"""Which part of a request's KV each rank of the next stage gets: its branches, and its heads."""

from __future__ import annotations

import dataclasses

from omni_kvlink.engine.config import DiffusionParallelConfig
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.errors import SchemaError
from omni_kvlink.link import Payload
from omni_kvlink.payload.branch import Shard
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle, PrefixOf, SameAs
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.topology import Part, Topology, shard_of


@dataclasses.dataclass(frozen=True)
class KVPart:
    """What is put, and got, as one payload.

    Attributes:
        guidance: the guidance rank that gets it.
        of: how many there are.
        part: which heads; None if one tensor rank sends all of them to one.
    """

    guidance: int = 0
    of: int = 1
    part: Part | None = None

    @property
    def sender(self) -> int:
        """The tensor rank that has it."""
        return 0 if self.part is None else self.part.shard.rank

    @property
    def readers(self) -> int:
        return 1 if self.part is None else len(self.part.receivers)

    def key(self, request_id: str) -> str:
        """Under which it is put: the request's own id where nothing is divided."""
        own = self._branches_key(request_id)
        return own if self.part is None else self.part.key(own)

    def cut(self, payload: Payload) -> Payload:
        """This part of the sender's payload, borrowed.

        Raises:
            SchemaError: it has no branches for this rank, or not these heads.
        """
        if self.of > 1:
            key = self._branches_key(payload.request_id)
            payload = _some_branches(payload, key, self.guidance, self.of)
        return payload if self.part is None else self.part.of(payload)

    def _branches_key(self, request_id: str) -> str:
        return request_id if self.of == 1 else f"{request_id}/cfg{self.guidance}of{self.of}"


WHOLE = KVPart()


@dataclasses.dataclass(frozen=True)
class KVPartition:
    """How a stage's KV goes to the ranks of the next one.

    Args:
        heads: KV heads of the whole model; 1 for latents.
        senders: tensor ranks of the stage.
        receivers: how the next one divides its work. Its data-parallel groups are all alike: each
            request is one group's.

    Raises:
        SchemaError: the heads cannot be dealt evenly to one of the stages.
    """

    heads: int
    senders: int
    receivers: DiffusionParallelConfig

    def __post_init__(self) -> None:
        Topology(self.heads, self.senders, self.receivers.tensor_parallel_size)

    def receiver(self, tensor: int) -> Shard:
        """The heads that a tensor rank of the next stage holds."""
        return shard_of(tensor, self.receivers.tensor_parallel_size, heads=self.heads)

    @property
    def parts_each(self) -> int:
        """Payloads that a rank of the next stage gets, all with as many heads."""
        return len(self.sent_to(RankCoords(0, 0, 0)))

    def sent_by(self, tensor: int) -> tuple[KVPart, ...]:
        """What a tensor rank of the stage sends."""
        return tuple(share for share in self._shares() if share.sender == tensor)

    def sent_to(self, place: RankCoords) -> tuple[KVPart, ...]:
        """What a rank of the next stage gets, in the order of the heads."""
        return tuple(
            share
            for share in self._shares()
            if share.guidance == place.guidance
            and (share.part is None or place.tensor in share.part.receivers)
        )

    def _shares(self) -> list[KVPart]:
        tensor, guidance = self.receivers.tensor_parallel_size, self.receivers.cfg_parallel_size
        parts: tuple[Part | None, ...] = (None,)
        if not self.senders == tensor == 1:
            parts = Topology(self.heads, self.senders, tensor).parts()
        return [KVPart(rank, guidance, part) for rank in range(guidance) for part in parts]


def _some_branches(payload: Payload, key: str, rank: int, of: int) -> KVCacheBundle:
    """Each `of`-th branch from `rank` on; where one refers to a branch that is not among them, its
    tensors are views of that one's.

    What the payload's first branch carries as `extra` is for everybody.
    """
    names = list(payload)[rank::of] if isinstance(payload, KVCacheBundle) else []
    if not isinstance(payload, KVCacheBundle) or not names:
        raise SchemaError(f"{payload!r} has no branch for guidance rank {rank} of {of}")
    caches = {name: payload[name] for name in names}
    about = {name: cache.metadata for name, cache in caches.items()}
    extra = payload[next(iter(payload))].metadata.extra | about[names[0]].extra
    about[names[0]] = dataclasses.replace(about[names[0]], extra=extra)
    found: dict[str, BundleBranch] = {}
    owners: dict[str, str] = {}
    for name in sorted(names, key=lambda one: -about[one].seq_len):  # the longest has the tensors
        declared, cache, tokens = payload.branches[name], caches[name], about[name].seq_len
        source = name if isinstance(declared, KVCacheTransferData) else declared.branch
        owner = source if source in names else owners.setdefault(source, name)
        if owner == name:
            found[name] = KVCacheTransferData(key, cache.layer_blocks, cache.block_ids, about[name])
        elif tokens == about[owner].seq_len:
            found[name] = SameAs(owner, about[name])
        else:
            found[name] = PrefixOf(owner, tokens, about[name])
    return KVCacheBundle(key, {name: found[name] for name in names})
