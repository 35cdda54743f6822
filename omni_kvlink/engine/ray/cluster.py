"""`Cluster`: this process's membership in a Ray cluster. `Placement`: resources in it."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.errors import TransferTimeout, UnavailableError, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig

INSTALL = "pip install 'omni-kvlink[ray]'"
NODE = "{node}"
"""Placeholder in a URL for the address of the node on which Ray puts a stage, or a rank."""


def library() -> Any:
    """The module `ray`, which is optional; raises UnavailableError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UnavailableError(f"Ray cannot be imported ({error}): {INSTALL}") from error


class Cluster:
    """Connects this process to a Ray cluster for as long as one of these objects is open.

    If the process was connected before the first of them was made, it stays so after the last one
    is closed. `address` is "auto" for the cluster of this machine or of RAY_ADDRESS, "host:port",
    or "local" to start one.
    """

    _lock = threading.Lock()
    _users = 0
    _is_owner = False

    def __init__(self, address: str):
        self._ray = library()
        self._closed = False
        with Cluster._lock:
            if self._ray.is_initialized():
                self._check(address)
            else:
                self._connect(address)
                Cluster._is_owner = True
            Cluster._users += 1

    @property
    def is_connected(self) -> bool:
        """Whether this process is still connected; if not, a call of Ray would start a cluster."""
        return bool(self._ray.is_initialized())

    def close(self) -> None:
        """Disconnect the process if nothing else needs the cluster; a second call does nothing."""
        with Cluster._lock:
            if self._closed:
                return
            self._closed = True
            Cluster._users -= 1
            if not Cluster._users and Cluster._is_owner:
                Cluster._is_owner = False
                self._ray.shutdown()

    def _connect(self, address: str) -> None:
        try:
            self._ray.init(address=address)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise EngineError(
                f"no Ray cluster at {address!r} ({error}): `ray start --head` starts one, "
                "and so does `ray: {address: local}`"
            ) from error

    def _check(self, address: str) -> None:
        current = self._ray.get_runtime_context().gcs_address
        if address not in ("auto", "local", current):
            raise EngineError(f"this process is in the Ray cluster at {current}, not at {address}")


class Placement:
    """A placement group: one bundle of resources, {"CPU": 1.0, …}, for each actor.

    Raises TransferTimeout if they are not available within `timeout` seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        *,
        timeout: float,
    ):
        self._ray, self._cluster, self._bundles = library(), cluster, bundles
        module = importlib.import_module("ray.util.placement_group")
        self._remove = module.remove_placement_group
        self._group = module.placement_group(list(map(dict, bundles)), strategy=strategy)
        if not self._group.wait(timeout):
            self.close()
            raise TransferTimeout(
                f"the Ray cluster had no room for {len(bundles)} × {dict(bundles[0])} ({strategy})"
                f" within {format_seconds(timeout)}: it has {self._ray.available_resources()}; "
                "add nodes, or ask for less under `ray:`",
                waited=timeout,
                phase="starting",
            )

    def options(self, index: int) -> dict[str, Any]:
        """Options of an actor that uses this bundle."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        resources = dict(self._bundles[index])
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, index),
        }

    def close(self) -> None:
        """Release the resources, and kill the actors that use them; repeatable."""
        if self._cluster.is_connected:
            self._remove(self._group)


def rank_resources(config: StageConfig) -> dict[str, float]:
    """The resources that one rank of a stage needs: a GPU, too, if its device is one."""
    gpus, device = config.ray.num_gpus, config.device
    if device not in ("auto", "cpu", "cuda"):
        raise EngineError(f"device {device!r}: Ray chooses the GPU; say 'cuda', 'cpu' or 'auto'")
    if device == "cuda" and gpus == 0:
        raise EngineError("device 'cuda', and num_gpus 0 of Ray: leave out one of them")
    if gpus is None:
        has_gpus = "GPU" in library().cluster_resources()
        gpus = float(device == "cuda" or (device == "auto" and has_gpus))
    resources = {"CPU": config.ray.num_cpus, "GPU": gpus, **config.ray.resources}
    return {name: amount for name, amount in resources.items() if amount}
