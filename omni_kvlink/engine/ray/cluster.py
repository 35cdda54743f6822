"""This process's place in a Ray cluster, and places there for what a stage needs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from omni_kvlink.engine.config import StageConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.errors import TransferTimeout, UnavailableError

INSTALL = "pip install 'omni-kvlink[ray]'"


def library() -> Any:
    """Ray itself.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UnavailableError(f"Ray cannot be imported ({error}): {INSTALL}") from error


class Cluster:
    """A Ray cluster that this process is in, for as long as somebody here needs it.

    Who finds the process in a cluster leaves it there; who brought it in, is the last to leave.

    Args:
        address: "auto" for the cluster of this machine, or of RAY_ADDRESS; "host:port"; "local"
            to start one.

    Raises:
        UnavailableError: Ray is not installed.
        EngineError: there is no such cluster, or this process is in another.
    """

    _lock = threading.Lock()
    _users = 0
    _is_ours = False

    def __init__(self, address: str):
        self._ray = library()
        self._left = False
        with Cluster._lock:
            if self._ray.is_initialized():
                self._check(address)
            else:
                self._enter(address)
                Cluster._is_ours = True
            Cluster._users += 1

    @property
    def is_there(self) -> bool:
        """Whether this process is in it still; Ray itself would start another, unasked."""
        return bool(self._ray.is_initialized())

    def leave(self) -> None:
        """No more needed; again does nothing."""
        with Cluster._lock:
            if self._left:
                return
            self._left = True
            Cluster._users -= 1
            if not Cluster._users and Cluster._is_ours:
                Cluster._is_ours = False
                self._ray.shutdown()

    def _enter(self, address: str) -> None:
        try:
            self._ray.init(address=address)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise EngineError(
                f"no Ray cluster at {address!r} ({error}): `ray start --head` starts one, "
                "and so does `ray: {address: local}`"
            ) from error

    def _check(self, address: str) -> None:
        here = self._ray.get_runtime_context().gcs_address
        if address not in ("auto", "local", here):
            raise EngineError(f"this process is in the Ray cluster at {here}, not at {address}")


class Placement:
    """Room in a cluster: one bundle of resources for each actor, on one node or many.

    Args:
        cluster: where.
        bundles: what each actor needs: {"CPU": 1.0, "GPU": 1.0, …}.
        strategy: of a placement group of Ray.
        timeout: seconds until there must be room.

    Raises:
        TransferTimeout: there was none.
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
        self._group = module.placement_group([dict(one) for one in bundles], strategy=strategy)
        if not self._group.wait(timeout):
            self.remove()
            raise TransferTimeout(
                f"the Ray cluster had no room for {len(bundles)} × {dict(bundles[0])} ({strategy})"
                f" within {timeout:g} s: it has {self._ray.available_resources()}; add nodes, or"
                " ask for less under `ray:`",
                waited=timeout,
                phase="starting",
            )

    def options(self, index: int) -> dict[str, Any]:
        """Of an actor that takes this bundle."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        rest = dict(self._bundles[index])
        return {
            "num_cpus": rest.pop("CPU", 0),
            "num_gpus": rest.pop("GPU", 0),
            "memory": rest.pop("memory", None),
            "resources": rest,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, index),
        }

    def remove(self) -> None:
        """Give the room back, and end what is in it; again does nothing."""
        if self._cluster.is_there:
            self._remove(self._group)


def share_of(config: StageConfig) -> dict[str, float]:
    """What one rank of a stage takes of its node: a GPU where the stage wants one.

    Raises:
        EngineError: the stage's device is not for it to choose, or Ray is to give it none.
    """
    gpus, device = config.ray.num_gpus, config.device
    if device not in ("auto", "cpu", "cuda"):
        raise EngineError(f"device {device!r}: Ray chooses which; say 'cuda', 'cpu' or 'auto'")
    if device == "cuda" and gpus == 0:
        raise EngineError("device 'cuda', and num_gpus 0 of Ray: leave out one of them")
    if gpus is None:
        has_gpus = "GPU" in library().cluster_resources()
        gpus = float(device == "cuda" or (device == "auto" and has_gpus))
    share = {"CPU": config.ray.num_cpus, "GPU": gpus, **config.ray.resources}
    return {name: amount for name, amount in share.items() if amount}
