"""`Budget`: how many bytes of KV may be held."""

from __future__ import annotations

from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.errors import CapacityError


class Budget:
    """Bytes set aside, by request; whoever has it locks it.

    Args:
        config: its `budget` and `reserve`.
    """

    def __init__(self, config: KVConfig):
        self._config = config
        self._taken: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """In all."""
        return self._config.budget

    @property
    def charged(self) -> int:
        """Set aside now."""
        return sum(self._taken.values())

    def has_room(self, request: OmniDiffusionRequest) -> bool:
        """Whether `take` would find room."""
        return self.charged + self._size(request) <= self.nbytes

    def take(self, request: OmniDiffusionRequest) -> int:
        """Set aside as much as the stage before said, or a reserve; how much that is.

        Raises:
            CapacityError: more than what is free; asked and free bytes are its attributes.
        """
        self.correct(request.request_id, self._size(request))
        return self._size(request)

    def correct(self, request_id: str, nbytes: int) -> None:
        """It takes so much instead.

        Raises:
            CapacityError: and it keeps what it has.
        """
        free = self.nbytes - self.charged + self._taken.get(request_id, 0)
        if nbytes > free:
            raise CapacityError(
                f"the KV of {request_id!r} takes {nbytes} bytes, {free} of the budget of "
                f"{self.nbytes} are free: raise kv.budget",
                asked=nbytes,
                free=free,
            )
        self._taken[request_id] = nbytes

    def give_back(self, request_id: str) -> None:
        self._taken.pop(request_id, None)

    def _size(self, request: OmniDiffusionRequest) -> int:
        if request.kv_nbytes is not None:
            return request.kv_nbytes
        return self._config.reserve or self._config.budget // 8
