"""`RayExecutor`: a Ray actor for each rank, on as many machines as it takes."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from omni_kvlink.engine.config import StageConfig
from omni_kvlink.engine.executor.distributed import DeathCallback, DistributedExecutor
from omni_kvlink.engine.ipc.codec import pack_config
from omni_kvlink.engine.ipc.process_handle import Call
from omni_kvlink.engine.ray.actor_handle import ActorHandle
from omni_kvlink.engine.ray.actor_host import ActorHost, at_node
from omni_kvlink.engine.ray.cluster import Cluster, Placement, share_of
from omni_kvlink.engine.worker.service import WorkerService

_END = 5.0
"""Seconds to end when the executor wants it; other ranks may wait for one that is gone, too."""


class RankHost(ActorHost):
    """One rank's worker, in an actor."""

    def make(self, config: StageConfig) -> Call:
        # an actor sees no GPU but its own
        self._worker = WorkerService(at_node(config), 0, self.rank)
        self._model = threading.Thread(target=self._worker.run, name="model", daemon=True)
        self._model.start()
        return self._worker.call

    def end(self) -> None:
        if self._service is not None:
            self._worker.stop()
            self._model.join(_END)


class RayExecutor(DistributedExecutor):
    """A stage of either kind, its ranks in actors, placed as `config.ray` says.

    What crosses is written by the engine's own codec; Ray carries bytes. Actors end with the
    process that started them.

    Attributes:
        places: of each rank: its "pid" and its node's "address".

    Raises:
        UnavailableError: Ray is not installed.
        TransferTimeout: the cluster has no room.
    """

    _cluster: Cluster | None = None
    _placement: Placement | None = None
    places: list[dict[str, Any]]

    def _make_workers(self, on_death: DeathCallback) -> None:
        self._cluster = Cluster(self.config.ray.address)
        share, ranks = share_of(self.config), self.config.parallel_config.world_size
        self._placement = Placement(
            self._cluster, [share] * ranks, self.config.ray.strategy, timeout=self.start_timeout
        )
        for rank in range(ranks):
            self.workers.append(
                ActorHandle(
                    RankHost,
                    self._cluster,
                    self._placement.options(rank),
                    name=f"rank {rank} of the {self.config.stage} stage",
                    rank=rank,
                    on_death=on_death,
                )
            )
        where = self.config.distributed_init_method
        if ranks > 1 and not where:
            where = self.collective_rpc("meet", timeout=self.start_timeout)[0]
        device = "cuda:0" if "GPU" in share else "cpu"
        config = dataclasses.replace(self.config, distributed_init_method=where, device=device)
        self.places = self.collective_rpc(
            "open", timeout=self.start_timeout, args=[pack_config(config)]
        )

    def shutdown(self) -> None:
        super().shutdown()
        if self._placement is not None:
            self._placement.remove()
        if self._cluster is not None:
            self._cluster.leave()
