"""Which rank sends which heads to which: numbers only."""

from __future__ import annotations

import dataclasses

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branch import Shard
from omni_kvlink.topology.heads import slice_heads
from omni_kvlink.topology.shards import P, rank_of, suffix, label


def shard_of(rank: int, world: int, *, heads: int) -> Shard:
    """What a tensor-parallel rank holds of a model with so many KV heads.

    Each rank has as many as the others; where there are fewer heads than ranks, `world / heads`
    neighbours hold the same one.

    Raises:
        SchemaError: there is no such rank, or the heads cannot be dealt evenly.
    """
    if world < 1 or not 0 <= rank < world:
        raise SchemaError(f"rank {rank} of {world}; ranks count from 0")
    if heads < 1 or (heads % world and world % heads):
        raise SchemaError(f"{heads} KV heads on {world} ranks; one must divide the other")
    start = rank * heads // world
    return Shard(rank, world, (start, start + max(1, heads // world)))


@dataclasses.dataclass(frozen=True)
class Part:
    """Heads that one rank sends as one payload, to one rank of the other stage or to several.

    Attributes:
        shard: the sender's rank and world, and the heads sent.
        receivers: who gets it; `put` wants as many `readers`.
    """

    shard: Shard
    receivers: tuple[int, ...]

    def key(self, request_id: str) -> str:
        """Under which the part is put and got."""
        return request_id + suffix(self.shard)

    def of(self, data: P) -> P:
        """The part as a payload, borrowed from the sender's cache; its `request_id` is the key.

        Raises:
            SchemaError: the cache is another rank's by its `shard`, or lacks these heads.
        """
        found = rank_of(data)
        if found != (self.shard.rank, self.shard.world):
            raise SchemaError(
                f"the cache is that of rank {found[0]} of {found[1]}, {label(self.shard)} is "
                "wanted; metadata.shard says whose it is, and Topology.sender gives it"
            )
        return slice_heads(data, *self.shard.heads)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Two stages of a model, and how its KV heads go from the ranks of one to those of the other.

    Args:
        heads: KV heads of the whole model; 1 for latents.
        senders: tensor-parallel ranks of the producer.
        receivers: those of the consumer.

    Raises:
        SchemaError: the heads cannot be dealt evenly to one of the stages.
    """

    heads: int
    senders: int
    receivers: int

    def __post_init__(self) -> None:
        self.sender(0)
        self.receiver(0)

    def sender(self, rank: int) -> Shard:
        """What a rank of the producer holds."""
        return shard_of(rank, self.senders, heads=self.heads)

    def receiver(self, rank: int) -> Shard:
        """What a rank of the consumer holds."""
        return shard_of(rank, self.receivers, heads=self.heads)

    def sent_to(self, rank: int) -> tuple[Part, ...]:
        """What a rank of the consumer gets, in the order of the heads."""
        return tuple(part for part in self.parts() if rank in part.receivers)

    def sent_by(self, rank: int) -> tuple[Part, ...]:
        """What a rank of the producer sends: nothing if others hold the same and suffice."""
        return tuple(part for part in self.parts() if part.shard.rank == rank)

    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order of the heads; who need the same share one payload."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.receivers):
            expected = self.receiver(rank).heads
            for sender in self._sources(rank):
                heads_in = self.sender(sender).heads
                heads = max(heads_in[0], expected[0]), min(heads_in[1], expected[1])
                found.setdefault((*heads, sender), []).append(rank)
        return tuple(
            Part(Shard(sender, self.senders, (start, stop)), tuple(found[start, stop, sender]))
            for start, stop, sender in sorted(found)
        )

    def _sources(self, rank: int) -> range:
        """One sender for each head; where several hold it, they share the receivers evenly."""
        start, stop = self.receiver(rank).heads
        same = max(1, self.senders // self.heads)
        twins = max(1, self.receivers // self.heads)
        mine = rank % twins * same // twins
        each = max(1, self.heads // self.senders)
        return range(start // each * same + mine, (stop - 1) // each * same + mine + 1, same)
