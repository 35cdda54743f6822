"""The branches, layers and heads of a request's KV that each rank of the next stage receives."""

from __future__ import annotations

import dataclasses

from omni_kvlink import (
    BundleBranch,
    KVCacheBundle,
    KVCacheTransferData,
    KVMetadata,
    KVPayload,
    PrefixOf,
    SameAs,
    TensorTransferData,
)
from omni_kvlink.engine.config import DiffusionParallelConfig
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.errors import SchemaError
from omni_kvlink.topology import Part, Topology


@dataclasses.dataclass(frozen=True)
class KVPart:
    """A part of a request's KV that is sent as one payload."""

    guidance: int = 0  # the guidance rank that receives it
    degree: int = 1  # how many guidance ranks there are
    part: Part | None = None  # its heads; None if one rank sends all heads to one
    pipeline: int = 0  # the pipeline rank that receives it
    stages: int = 1  # how many pipeline ranks there are
    copies: int = 1  # ranks of a ring, which receive the same

    @property
    def sender(self) -> int:
        """The tensor rank that sends it."""
        return 0 if self.part is None else self.part.shard.rank

    @property
    def readers(self) -> int:
        """The number of ranks that receive it."""
        return self.copies * (1 if self.part is None else len(self.part.receivers))

    def key(self, request_id: str) -> str:
        """The key under which it is put; the request's id if the KV is not divided."""
        key = self._layers_key(self._branches_key(request_id))
        return key if self.part is None else self.part.key(key)

    def cut(self, payload: KVPayload) -> KVPayload:
        """This part of the sender's payload, as views; SchemaError if the payload lacks it."""
        if self.degree > 1:
            key = self._branches_key(payload.request_id)
            payload = _select_branches(payload, key, self.guidance, self.degree)
        if self.stages > 1:
            key = self._layers_key(payload.request_id)
            payload = _select_layers(payload, key, self.pipeline, self.stages)
        return payload if self.part is None else self.part.of(payload)

    def _branches_key(self, request_id: str) -> str:
        return request_id if self.degree == 1 else f"{request_id}/cfg{self.guidance}of{self.degree}"

    def _layers_key(self, key: str) -> str:
        return key if self.stages == 1 else f"{key}/pp{self.pipeline}of{self.stages}"


@dataclasses.dataclass(frozen=True)
class KVPartition:
    """The division of a stage's KV among the ranks of the next stage.

    The receivers' data-parallel groups are alike: each request goes to one of them. SchemaError if
    a stage's ranks cannot have as many heads each.
    """

    heads: int  # of the whole model's KV; 1 for latents
    senders: int  # tensor ranks of the sending stage
    receivers: DiffusionParallelConfig

    def __post_init__(self) -> None:
        Topology(self.heads, self.senders, self.receivers.kv_ranks)

    @property
    def parts_each(self) -> int:
        """The number of parts that a rank of the receiving stage gets; all have as many heads."""
        return len(self.sent_to(RankCoords(0, 0, 0)))

    def sent_to(self, coords: RankCoords) -> tuple[KVPart, ...]:
        """The parts that a rank of the receiving stage gets, in the order of the heads."""
        return tuple(
            part
            for part in self.parts()
            if (part.guidance, part.pipeline) == (coords.guidance, coords.pipeline)
            and (part.part is None or coords.kv_rank(self.receivers) in part.part.receivers)
        )

    def parts(self) -> list[KVPart]:
        """All parts of a KV."""
        ranks, guidance = self.receivers.kv_ranks, self.receivers.cfg_parallel_size
        stages, copies = self.receivers.pipeline_parallel_size, self.receivers.ring_degree
        heads: tuple[Part | None, ...] = (None,)
        if not self.senders == ranks == 1:
            heads = Topology(self.heads, self.senders, ranks).parts()
        return [
            KVPart(rank, guidance, part, pipeline, stages, copies)
            for rank in range(guidance)
            for pipeline in range(stages)
            for part in heads
        ]


def _select_branches(payload: KVPayload, key: str, rank: int, degree: int) -> KVCacheBundle:
    """Select each `degree`-th branch from `rank` on.

    Where a branch refers to one that is not selected, its tensors are views of that one's. The
    `extra` metadata of the payload's first branch goes to every rank.
    """
    names = list(payload)[rank::degree] if isinstance(payload, KVCacheBundle) else []
    if not isinstance(payload, KVCacheBundle) or not names:
        raise SchemaError(f"{payload!r} has no branch for guidance rank {rank} of {degree}")
    caches = {name: payload[name] for name in names}
    metadata = {name: cache.metadata for name, cache in caches.items()}
    extra = payload[next(iter(payload))].metadata.extra | metadata[names[0]].extra
    metadata[names[0]] = dataclasses.replace(metadata[names[0]], extra=extra)
    branches: dict[str, KVCacheTransferData | SameAs | PrefixOf] = {}
    owners: dict[str, str] = {}
    # The longest branch comes first: it has the tensors that shorter ones refer to.
    for name in sorted(names, key=lambda branch: -metadata[branch].seq_len):
        declared, cache, branch_metadata = payload.branches[name], caches[name], metadata[name]
        source = declared.branch if isinstance(declared, (SameAs, PrefixOf)) else name
        owner = source if source in names else owners.setdefault(source, name)
        if owner == name:
            branches[name] = KVCacheTransferData(
                key, cache.layer_blocks, cache.block_ids, branch_metadata
            )
        elif branch_metadata.seq_len == metadata[owner].seq_len:
            branches[name] = SameAs(owner, branch_metadata)
        else:
            branches[name] = PrefixOf(owner, branch_metadata.seq_len, branch_metadata)
    return KVCacheBundle(key, {name: branches[name] for name in names})


def _select_layers(payload: KVPayload, key: str, rank: int, degree: int) -> KVPayload:
    """The layers of a pipeline rank; `extra` of each branch says which, as "layers"."""
    if isinstance(payload, KVCacheTransferData):
        return _layers_of(payload, key, rank, degree)
    branches: dict[str, BundleBranch] = {}
    for name, branch in payload.branches.items():
        if isinstance(branch, TensorTransferData):
            raise SchemaError(f"branch {name!r} of {payload.request_id!r} has no layers to divide")
        if isinstance(branch, KVCacheTransferData):
            branches[name] = _layers_of(branch, key, rank, degree)
        else:
            metadata, _ = _about_layers(payload[name].metadata, rank, degree)
            branches[name] = dataclasses.replace(branch, metadata=metadata)
    return KVCacheBundle(key, branches)


def _layers_of(cache: KVCacheTransferData, key: str, rank: int, degree: int) -> KVCacheTransferData:
    metadata, span = _about_layers(cache.metadata, rank, degree)
    blocks = {name: layers[span] for name, layers in cache.layer_blocks.items()}
    return KVCacheTransferData(key, blocks, cache.block_ids, metadata)


def _about_layers(metadata: KVMetadata, rank: int, degree: int) -> tuple[KVMetadata, slice]:
    """The metadata of a pipeline rank's layers, and which these are."""
    count = metadata.num_layers
    span = slice(rank * count // degree, (rank + 1) * count // degree)
    extra = {**metadata.extra, "layers": [span.start, span.stop]}
    own_metadata = dataclasses.replace(metadata, num_layers=span.stop - span.start, extra=extra)
    return own_metadata, span
