"""Ray's object store: an array that the receiver reads in shared memory.

Both ends are drivers of one cluster on this machine; an actor passes the references. Its CPU, and
that of the cluster's other processes, is not counted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "blocks → array → object store → blocks"
VERIFIES = "nothing"
WAITS = "wakes, by an actor"
REQUIRES = (("ray", "numpy"),)
_NAME, _NAMESPACE = "references", "kvlink-bench"


@contextlib.contextmanager
def sender(end: Any) -> Iterator[Callable[[], None]]:
    """Start the cluster and the actor; put the array, and pass its reference."""
    import asyncio

    end.publish("token", secrets.token_hex(32).encode())
    ray = _ray(end)

    class References:
        """A queue of references to objects."""

        def __init__(self) -> None:
            self._queue = asyncio.Queue[list[Any]]()

        async def put(self, references: list[Any]) -> None:
            """Pass a reference, in a list so that it is not resolved."""
            await self._queue.put(references)

        async def get(self) -> list[Any]:
            """Wait for a reference."""
            return await self._queue.get()

    space = max(1 << 28, 4 * end.memory.nbytes)
    context = ray.init(
        num_cpus=2,
        object_store_memory=space,
        include_dashboard=False,
        namespace=_NAMESPACE,
        log_to_driver=False,
    )
    actor = ray.remote(References).options(name=_NAME, num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    end.publish("address", context.address_info["gcs_address"].encode())
    flat = end.flat()

    def send() -> None:
        end.gather(flat)
        ray.get(actor.put.remote([ray.put(flat)]))

    try:
        yield send
    finally:
        ray.shutdown()


@contextlib.contextmanager
def receiver(end: Any) -> Iterator[Callable[[], int]]:
    """Connect to the cluster; get the array, and scatter it."""
    ray = _ray(end)
    ray.init(address=end.published("address").decode(), namespace=_NAMESPACE, log_to_driver=False)
    actor = ray.get_actor(_NAME)

    def receive() -> int:
        (reference,) = ray.get(actor.get.remote())
        array = ray.get(reference)
        arrived = time.monotonic_ns()
        end.scatter(array)
        return arrived

    try:
        yield receive
    finally:
        ray.shutdown()


def _ray(end: Any) -> Any:
    """Import Ray, whose cluster admits those alone that have the token."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": end.published("token").decode()}
    import ray

    return ray
