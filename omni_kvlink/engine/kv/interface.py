"""The methods that a scheduler calls on its KV manager, in this process or elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.engine.kv.kv_manager import KVState
    from omni_kvlink.engine.request import OmniDiffusionRequest


class KVManager(Protocol):
    """The methods of `DiffusionKVManager` that schedulers use; thread-safe, and none blocks."""

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, whenever a receive has ended."""

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        """Whether the budget has room for a request's KV now."""

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Reserve memory for a request's KV; raises CapacityError if the budget has no room."""

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Begin to receive a request's KV, and return."""

    def state(self, request_id: str) -> KVState:
        """The state of a request's KV."""

    def error(self, request_id: str) -> Exception | None:
        """Why the receive failed; None if it did not."""

    def free(self, request: OmniDiffusionRequest) -> None:
        """Release a request's KV and its reserved memory, in any state; idempotent."""

    def stats(self) -> dict[str, Any]:
        """Bytes and entries held, and counters, as JSON values."""
