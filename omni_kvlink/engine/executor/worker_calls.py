"""`WorkerCalls`: what an executor asks all its workers for, besides running requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig
    from omni_kvlink.engine.lora.request import LoRARequest


class WorkerCalls(ABC):
    """Memory, compilation, sleep, adapters and traces of an executor's workers."""

    config: StageConfig

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; returns the answers in the order of the ranks.

        Raises what the method raised; TransferTimeout if a worker did not answer within `timeout`
        seconds, EngineDeadError if one is gone, NotImplementedError if there are no workers.
        """

    def determine_available_memory(self) -> list[int]:
        """Bytes free on each worker's device."""
        return self.collective_rpc("determine_available_memory")

    def compile_or_warm_up_model(self) -> list[float]:
        """Compile and warm up every worker's model, as configured; the seconds it took on each.

        Blocks for up to `config.start_timeout` seconds, then raises TransferTimeout.
        """
        timeout = self.config.start_timeout
        return self.collective_rpc("compile_or_warm_up_model", timeout=timeout)

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of every worker's memory: level 1 keeps them elsewhere, 2 not."""
        return all(self.collective_rpc("sleep", args=(level,)))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took: "weights", "kv_cache", or both if None."""
        return all(self.collective_rpc("wake_up", args=(tags,)))

    @property
    def sleeping_tags(self) -> set[str]:
        """The tags that `sleep` has taken, such as "weights"; asks all workers, and blocks."""
        return set[str]().union(*self.collective_rpc("sleeping_tags"))

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` has taken anything that `wake_up` has not brought back; blocks."""
        return bool(self.sleeping_tags)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every worker, or on none; False if it was there.

        Blocks while its files are read. Raises what `LoRAManager.add_adapter` raises.
        """
        was_there = lora_request.lora_int_id in self.list_loras()
        try:
            return any(self.collective_rpc("add_lora", args=(lora_request,)))
        except KVLinkError:
            if not was_there:
                self.remove_lora(lora_request.lora_int_id)
            raise

    def remove_lora(self, lora_int_id: int) -> bool:
        """Release an adapter on every worker; False if it was not there."""
        return any(self.collective_rpc("remove_lora", args=(lora_int_id,)))

    def list_loras(self) -> list[int]:
        """The numbers of the adapters that every worker holds."""
        return sorted(set.intersection(*map(set, self.collective_rpc("list_loras"))))

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed; False if it is not there."""
        return all(self.collective_rpc("pin_lora", args=(lora_int_id,)))

    def profile(self, directory: str | None) -> list[str]:
        """Record what every worker computes, for a `directory` on its machine; stop it with None.

        Stopping writes a Chrome trace for each worker, and returns their paths by rank.
        """
        if directory is None:
            return self.collective_rpc("stop_profile")
        self.collective_rpc("start_profile", args=(directory,))
        return []
