"""The ranks of an engine: the URL that each serves, and which rank of another engine reads it."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.topology import Topology

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from omni_kvlink.integrations.vllm.step import PromptCache

MAX_KEY = 1024
"""Characters of a key on a link."""

_NAMED = ("inproc", "shm", "zmq+ipc")
"""Schemes whose URLs are names or paths, and so may have a suffix."""


@dataclasses.dataclass(frozen=True)
class EngineRank:
    """A worker's rank in its engine, in vLLM's order: the tensor-parallel rank varies fastest."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> EngineRank:
        """The rank of this worker's process; in the scheduler's, rank 0.

        Raises:
            UnavailableError: the engine divides a prompt's tokens over its ranks.
        """
        parallel = vllm_config.parallel_config
        context = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
        if context > 1:
            raise UnavailableError(
                "this connector does not support context parallelism, which divides a prompt's "
                "tokens over the ranks: --prefill-context-parallel-size 1 "
                "--decode-context-parallel-size 1"
            )
        tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        return cls(parallel.rank % tp_size, tp_size, parallel.rank // tp_size % pp_size, pp_size)

    @property
    def index(self) -> int:
        """The rank's number in its engine."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """The number of the engine's ranks."""
        return self.pp_size * self.tp_size

    def parts(self, heads: int, peer_tp: int, *, sends: bool) -> list[RankPart]:
        """The parts of a cache that this rank sends to each consumer, or reads; may be none.

        Args:
            heads: KV heads of the whole model; 1 for latents.
            peer_tp: tensor-parallel size of the other side; 0 is this engine's.
            sends: whether this engine is the producer.

        Raises:
            SchemaError: the heads cannot be divided evenly over the ranks of one side.
        """
        if peer_tp in (0, self.tp_size):
            return [RankPart(self)]
        senders, receivers = (self.tp_size, peer_tp) if sends else (peer_tp, self.tp_size)
        topology = Topology(heads, senders, receivers)
        parts = topology.sent_by(self.tp_rank) if sends else topology.sent_to(self.tp_rank)
        return [
            RankPart(
                EngineRank(part.shard.rank, senders, self.pp_rank, self.pp_size),
                _split(topology, part.shard.heads),
                len(part.receivers),
            )
            for part in parts
        ]


@dataclasses.dataclass(frozen=True)
class RankPart:
    """The part of a cache that a rank of a producer has for one or several ranks of a consumer."""

    sender: EngineRank = dataclasses.field(default_factory=EngineRank)
    heads: tuple[int, int] | None = None  # as numbered in the model; None: its blocks, unchanged
    readers: int = 1  # ranks of one consumer

    def describe(self) -> dict[str, Any]:
        """Its fields as JSON values, which are sent with the part and checked by its readers."""
        heads = None if self.heads is None else list(self.heads)
        return {**dataclasses.asdict(self.sender), "heads": heads}

    def cache(self, cache: PromptCache) -> PromptCache:
        """This part of a cache that is sent."""
        readers = cache.readers * self.readers
        return dataclasses.replace(cache, key=self.key(cache.key), readers=readers)

    def key(self, key: str) -> str:
        """The key of this part of a cache, on the sender's link."""
        if self.heads is None:
            return key
        suffix = f"/heads{self.heads[0]}-{self.heads[1]}"
        if len(key) + len(suffix) > MAX_KEY:
            key = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        return key + suffix


def engine_url(url: str, vllm_config: VllmConfig) -> str:
    """The URL of this engine, which ends in the number of its data-parallel rank if it says so."""
    return url.replace("{dp}", str(vllm_config.parallel_config.data_parallel_index))


def rank_url(url: str, index: int) -> str:
    """The URL that a rank of an engine serves: `url` with its number in place of "{rank}".

    Without "{rank}" rank 0 serves `url`; the others serve names or paths derived from it.

    Raises:
        SchemaError: the URL is neither a name nor a path, and has no "{rank}".
    """
    if "{rank}" in url:
        return url.replace("{rank}", str(index))
    if index == 0:
        return url
    if url.partition("://")[0] not in _NAMED:
        raise SchemaError(
            f"{url} is one address, and each rank serves its own: write {{rank}} in it, "
            "such as zmq+tcp://10.0.0.5:700{rank}"
        )
    name, mark, options = url.partition("?")
    return f"{name}.rank{index}{mark}{options}"


def _split(topology: Topology, heads: tuple[int, int]) -> tuple[int, int] | None:
    """The heads of a part; None if both sides have just these, so that blocks go unchanged."""
    sizes = [stop - start for start, stop in (topology.sender(0).heads, topology.receiver(0).heads)]
    return None if sizes[0] == sizes[1] else heads
