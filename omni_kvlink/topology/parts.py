"""The parts of a cache: the heads that one rank sends to others."""

from __future__ import annotations

import dataclasses

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branches import Shard
from omni_kvlink.topology.heads import slice_heads
from omni_kvlink.topology.shards import P, label, rank_of, suffix


def shard_of(rank: int, world: int, *, heads: int) -> Shard:
    """Return the KV heads that a tensor-parallel rank has.

    All ranks have equally many; if there are fewer heads than ranks, `world / heads` neighbours
    have the same head.

    Raises:
        SchemaError: there is no such rank, or the heads cannot be divided evenly.
    """
    if world < 1 or not 0 <= rank < world:
        raise SchemaError(f"rank {rank} of {world}; ranks count from 0")
    if heads < 1 or (heads % world and world % heads):
        raise SchemaError(f"{heads} KV heads on {world} ranks; one must divide the other")
    start = rank * heads // world
    return Shard(rank, world, (start, start + max(1, heads // world)))


@dataclasses.dataclass(frozen=True)
class Part:
    """Heads that one rank sends as one payload, to one or several ranks of the other stage.

    Attributes:
        shard: the sender's rank and world, and the heads sent.
        receivers: ranks that get it; `put` takes their number as `readers`.
    """

    shard: Shard
    receivers: tuple[int, ...]

    def key(self, request_id: str) -> str:
        """Return the key under which the part is put and got."""
        return request_id + suffix(self.shard)

    def of(self, data: P) -> P:
        """Return the part as a payload of borrowed tensors; its `request_id` is the key.

        Raises:
            SchemaError: the cache is another rank's by its `shard`, or lacks these heads.
        """
        rank, world = rank_of(data)
        if (rank, world) != (self.shard.rank, self.shard.world):
            raise SchemaError(
                f"the cache is that of rank {rank} of {world}, {label(self.shard)} is "
                "required; set metadata.shard to Topology.sender(rank)"
            )
        return slice_heads(data, *self.shard.heads)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Two stages of a model, and how its KV heads go from the ranks of one to those of the other.

    Args:
        heads: KV heads of the whole model; 1 for latents.
        senders: number of tensor-parallel ranks of the producer.
        receivers: number of tensor-parallel ranks of the consumer.

    Raises:
        SchemaError: the heads cannot be divided evenly over one of the stages.
    """

    heads: int
    senders: int
    receivers: int

    def __post_init__(self) -> None:
        self.sender(0)
        self.receiver(0)

    def sender(self, rank: int) -> Shard:
        """Return the shard of a rank of the producer."""
        return shard_of(rank, self.senders, heads=self.heads)

    def receiver(self, rank: int) -> Shard:
        """Return the shard of a rank of the consumer."""
        return shard_of(rank, self.receivers, heads=self.heads)

    def sent_to(self, rank: int) -> tuple[Part, ...]:
        """Return the parts that a rank of the consumer gets, in the order of the heads."""
        return tuple(part for part in self.parts() if rank in part.receivers)

    def sent_by(self, rank: int) -> tuple[Part, ...]:
        """Return the parts that a rank of the producer sends; may be none."""
        return tuple(part for part in self.parts() if part.shard.rank == rank)

    def parts(self) -> tuple[Part, ...]:
        """Return all parts by heads; receivers of the same heads share a part."""
        receivers: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.receivers):
            needed = self.receiver(rank).heads
            for sender in self._sources(rank):
                sent = self.sender(sender).heads
                heads = max(sent[0], needed[0]), min(sent[1], needed[1])
                receivers.setdefault((*heads, sender), []).append(rank)
        return tuple(
            Part(Shard(sender, self.senders, (start, stop)), tuple(receivers[start, stop, sender]))
            for start, stop, sender in sorted(receivers)
        )

    def _sources(self, rank: int) -> range:
        """Return one sender for each head; senders of the same head share the receivers evenly."""
        start, stop = self.receiver(rank).heads
        replicas = max(1, self.senders // self.heads)
        sharing = max(1, self.receivers // self.heads)
        mine = rank % sharing * replicas // sharing  # which of the senders of the same head
        width = max(1, self.heads // self.senders)
        first, last = start // width, (stop - 1) // width
        return range(first * replicas + mine, last * replicas + mine + 1, replicas)
