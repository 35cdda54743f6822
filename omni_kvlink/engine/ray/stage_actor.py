"""`StageActor`: a stage in a Ray actor, on whichever machine Ray puts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig, StageConfig
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.codec import pack_config
from omni_kvlink.engine.ipc.process_handle import Call
from omni_kvlink.engine.ray.actor_handle import ActorHandle
from omni_kvlink.engine.ray.actor_host import ActorHost, at_node
from omni_kvlink.engine.ray.cluster import Cluster, Placement, library, share_of
from omni_kvlink.engine.stage.remote_stage import RemoteStage
from omni_kvlink.engine.stage.stage_main import StageService
from omni_kvlink.errors import TransferTimeout

_STEERS = {"memory": float(1 << 20)}
"""What a stage takes of its node whose ranks are actors, too: next to nothing."""
_AGAIN = 5.0
"""Seconds until a stage that starts again has its old node, or any."""


class StageHost(ActorHost):
    """A stage's engine, in an actor."""

    def make(self, config: StageConfig) -> Call:
        has_ranks_elsewhere = config.distributed_executor_backend == "ray"
        self._stage = StageService(config if has_ranks_elsewhere else at_node(config))
        return self._stage.call

    def end(self) -> None:
        if self._service is not None:
            self._stage.close()


class StageActor(RemoteStage):
    """A stage in an actor, placed as `config.ray` says; see `RemoteStage`.

    It starts again on the node where it was, at the same URL. If that node has no room for it any
    more it starts on another, and `sink_urls` are new.

    Attributes:
        pid, address: of the actor's process, and of its node.

    Raises:
        UnavailableError: Ray is not installed.
    """

    _handle: ActorHandle
    _placement: Placement | None = None
    pid = 0
    address = ""

    def __init__(self, config: OmniARConfig | OmniDiffusionConfig, **how: Any):
        self._cluster = Cluster(config.ray.address)
        try:
            super().__init__(config, **how)
        except BaseException:
            self._cluster.leave()
            raise

    def close(self) -> None:
        super().close()
        self._cluster.leave()

    def _make(self, on_death: Callable[[EngineDeadError], None]) -> ActorHandle:
        config = self._placed()
        assert self._placement is not None
        name, options = f"the {config.stage} stage", self._placement.options(0)
        child = ActorHandle(StageHost, self._cluster, options, name=name, on_death=on_death)
        try:
            place = self._opened(child, config)
        except BaseException:
            child.join(0.0)
            self._placement.remove()
            raise
        self.pid, self.address = place["pid"], place["address"]
        return child

    def _opened(self, child: ActorHandle, config: StageConfig) -> dict[str, Any]:
        """Let the actor make its service; where it is."""
        opened = child.call("open", [pack_config(config)])
        if not wait([opened], self._timeout).done:
            raise TransferTimeout(
                f"{child.name} did not begin within {self._timeout:g} s",
                waited=self._timeout,
                phase="starting",
            )
        place: dict[str, Any] = opened.result()
        return place

    def _placed(self) -> OmniARConfig | OmniDiffusionConfig:
        """Find a node; the configuration for it."""
        config, share = self.config, _STEERS
        if config.distributed_executor_backend != "ray":
            ranks = config.parallel_config.world_size
            share = {name: ranks * amount for name, amount in share_of(config).items()}
            config = dataclasses.replace(config, device="auto" if "GPU" in share else "cpu")
        node = f"node:{self.address}"
        if node in library().cluster_resources():
            try:
                self._take({**share, node: 0.001}, _AGAIN)
                return config.served_at(self.sink_urls)
            except TransferTimeout:
                pass  # it is lost, or full
        self._take(share, self._timeout)
        return config

    def _take(self, share: dict[str, float], timeout: float) -> None:
        self._placement = Placement(self._cluster, [share], "PACK", timeout=timeout)

    def _end(self) -> None:
        super()._end()
        if self._placement is not None:
            self._placement.remove()
