"""`Budget`: how many bytes of received KV may be held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.errors import CapacityError

if TYPE_CHECKING:
    from omni_kvlink.engine.config import KVConfig
    from omni_kvlink.engine.request import OmniDiffusionRequest


class Budget:
    """Bytes reserved by request. Not thread-safe: its owner holds a lock.

    Args:
        config: its `budget` is the limit, its `reserve` the size of a KV whose size is unknown.
    """

    def __init__(self, config: KVConfig):
        self.nbytes = config.budget
        self._default = config.reserve or config.budget // 8
        self._reserved: dict[str, int] = {}

    @property
    def charged(self) -> int:
        """Bytes that are reserved now."""
        return sum(self._reserved.values())

    def has_room(self, request: OmniDiffusionRequest) -> bool:
        """Whether `take` would succeed."""
        return self.charged + self._size(request) <= self.nbytes

    def take(self, request: OmniDiffusionRequest) -> int:
        """Reserve `request.kv_nbytes`, or `kv.reserve` if it is None; returns the bytes reserved.

        Raises:
            CapacityError: more than what is free; `requested` and `free` are in bytes.
        """
        self.correct(request.request_id, self._size(request))
        return self._size(request)

    def correct(self, request_id: str, nbytes: int) -> None:
        """Replace the reserved size of a request by its actual one.

        Raises:
            CapacityError: it does not fit; the reservation is unchanged.
        """
        free = self.nbytes - self.charged + self._reserved.get(request_id, 0)
        if nbytes > free:
            raise CapacityError(
                f"the KV of {request_id!r} takes {nbytes} bytes, {free} of the budget of "
                f"{self.nbytes} are free: raise kv.budget",
                requested=nbytes,
                free=free,
            )
        self._reserved[request_id] = nbytes

    def release(self, request_id: str) -> None:
        """Release a request's reservation, if it has one."""
        self._reserved.pop(request_id, None)

    def _size(self, request: OmniDiffusionRequest) -> int:
        return self._default if request.kv_nbytes is None else request.kv_nbytes
