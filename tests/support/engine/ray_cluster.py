"""A Ray cluster of two nodes on this machine, at addresses of their own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = ("127.0.0.2", "127.0.0.3")
"""Not 127.0.0.1, which Ray replaces by the machine's address in the network."""


class Nodes:
    """The head node, where this process is, and another node, with resources "head" and "other".

    Attributes:
        address: of the cluster.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self.head = self._add(NODES[0], "head", include_dashboard=False)
        self.other = self._add(NODES[1], "other")
        self.address: str = self._cluster.address

    def _add(self, address: str, name: str, **options: Any) -> Any:
        return self._cluster.add_node(
            num_cpus=2,
            node_ip_address=address,
            object_store_memory=100 << 20,
            resources={name: 8},
            **options,
        )

    def kill_other(self) -> None:
        """Kill all processes of the node at once."""
        self._cluster.remove_node(self.other, allow_graceful=False)

    def add_other(self) -> None:
        self.other = self._add(NODES[1], "other")
        self._cluster.wait_for_nodes()

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """A cluster to which this process is connected."""
    import ray

    nodes = Nodes()
    try:
        ray.init(nodes.address, _node_ip_address=NODES[0], log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.close()


def pids_alive(name: str = "") -> list[int]:
    """Process ids of the live actors of a class, or of all."""
    from ray._private.state import actors

    found = [one for one in actors().values() if one["State"] != "DEAD"]
    return [one["Pid"] for one in found if name in one["ActorClassName"]]
