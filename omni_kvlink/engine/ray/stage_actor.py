"""`StageActor`: a stage in a Ray actor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.ipc.codec import pack_config
from omni_kvlink.engine.ipc.rpc import RpcClient
from omni_kvlink.engine.ray.actor import ActorHandle, ActorHost, at_node
from omni_kvlink.engine.ray.cluster import Cluster, Placement, library, rank_resources
from omni_kvlink.engine.stage.remote_stage import RemoteStage, StageService
from omni_kvlink.errors import TransferTimeout

if TYPE_CHECKING:
    from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig, StageConfig

_ENGINE_ONLY = {"memory": float(1 << 20)}
"""Resources of a stage whose ranks are actors of their own: next to nothing."""
_SAME_NODE_TIMEOUT = 5.0
"""Seconds in which a stage that restarts must find room on its former node."""


class StageHost(ActorHost):
    """An actor with a stage's engine."""

    def make_service(self, config: StageConfig) -> StageService:
        """Make the engine; it starts when `StageService.start` is called."""
        has_rank_actors = config.distributed_executor_backend == "ray"
        return StageService(config if has_rank_actors else at_node(config))


class StageActor(RemoteStage):
    """A stage in an actor, placed as `config.ray` says; see `RemoteStage`.

    It restarts on its former node, at the same URLs. If that node has no room for it any more it
    restarts on another one, with new `sink_urls`. `options` are `RemoteStage`'s.
    """

    address = ""
    """Address of the actor's node."""
    _placement: Placement | None = None

    def __init__(self, config: OmniARConfig | OmniDiffusionConfig, **options: Any):
        self._cluster = Cluster(config.ray.address)
        try:
            super().__init__(config, **options)
        except BaseException:
            self._cluster.close()
            raise

    def close(self) -> None:
        """Shut the stage down, and fail its requests; a second call does nothing."""
        super().close()
        self._cluster.close()

    def _start_process(self) -> RpcClient:
        config = self._actor_config()
        assert self._placement is not None
        name, options = f"the {config.stage} stage", self._placement.options(0)
        handle = ActorHandle(StageHost, self._cluster, options, name=name)
        client = RpcClient(handle, self._on_process_death)
        try:
            location = client.request(
                "open", [pack_config(config)], timeout=self.config.start_timeout, phase="starting"
            )
        except BaseException:
            client.kill()
            client.join()
            self._placement.close()
            raise
        handle.pid, self.address = location["pid"], location["address"]
        return client

    def _actor_config(self) -> OmniARConfig | OmniDiffusionConfig:
        """Reserve resources on a node; returns the configuration for it."""
        config, resources = self.config, _ENGINE_ONLY
        if config.distributed_executor_backend != "ray":
            ranks = config.parallel_config.world_size
            resources = {name: ranks * amount for name, amount in rank_resources(config).items()}
            config = dataclasses.replace(config, device="auto" if "GPU" in resources else "cpu")
        node = f"node:{self.address}"
        if node in library().cluster_resources():
            try:
                self._reserve({**resources, node: 0.001}, _SAME_NODE_TIMEOUT)
                return config.served_at(self.sink_urls)
            except TransferTimeout:
                pass  # the node is lost or full
        self._reserve(resources, self.config.start_timeout)
        return config

    def _reserve(self, resources: dict[str, float], timeout: float) -> None:
        self._placement = Placement(self._cluster, [resources], "PACK", timeout=timeout)

    def _shutdown(self) -> None:
        super()._shutdown()
        if self._placement is not None:
            self._placement.close()
