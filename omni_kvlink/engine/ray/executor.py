"""`RayExecutor`: a Ray actor for each rank, on one machine or several."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.executor.distributed import DistributedExecutor
from omni_kvlink.engine.ipc.codec import pack_config
from omni_kvlink.engine.ray.actor import ActorHandle, ActorHost, at_node
from omni_kvlink.engine.ray.cluster import Cluster, Placement, rank_resources
from omni_kvlink.engine.worker.service import WorkerService

if TYPE_CHECKING:
    from omni_kvlink.engine.config import StageConfig


class RankHost(ActorHost):
    """An actor with one rank's worker."""

    def make_service(self, config: StageConfig) -> WorkerService:
        """Make the worker; its local rank is 0, because an actor sees only its own GPU."""
        return WorkerService(at_node(config), 0, self.rank)


class RayExecutor(DistributedExecutor):
    """Runs each rank of a stage, of either kind, in an actor, placed as `config.ray` says.

    Actors end with the process that started them. Raises TransferTimeout if there is no room.
    """

    locations: list[dict[str, Any]]
    """Each rank's "pid", and its node's "address"."""
    _cluster: Cluster | None = None
    _placement: Placement | None = None

    def _start_workers(self) -> None:
        self._cluster = Cluster(self.config.ray.address)
        resources, ranks = rank_resources(self.config), self.config.parallel_config.world_size
        self._placement = Placement(
            self._cluster,
            [resources] * ranks,
            self.config.ray.strategy,
            timeout=self.config.start_timeout,
        )
        handles = []
        for rank in range(ranks):
            name = f"rank {rank} of the {self.config.stage} stage"
            options = self._placement.options(rank)
            handles.append(ActorHandle(RankHost, self._cluster, options, name=name, rank=rank))
            self._add_worker(handles[-1])
        url = self.config.distributed_init_method
        if ranks > 1 and not url:
            url = self.collective_rpc("open_rendezvous", timeout=self.config.start_timeout)[0]
        device = "cuda:0" if "GPU" in resources else "cpu"
        config = dataclasses.replace(self.config, distributed_init_method=url, device=device)
        self.locations = self.collective_rpc(
            "open", timeout=self.config.start_timeout, args=[pack_config(config)]
        )
        for handle, location in zip(handles, self.locations, strict=True):
            handle.pid = location["pid"]

    def shutdown(self) -> None:
        """Shut down the actors, and release their resources; a second call does nothing."""
        super().shutdown()
        if self._placement is not None:
            self._placement.close()
        if self._cluster is not None:
            self._cluster.close()
