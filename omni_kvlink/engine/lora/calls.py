"""Calls that load and release adapters: where they are held, and of a whole stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.engine.lora.manager import LoRAManager
    from omni_kvlink.engine.lora.request import LoRARequest


class AdapterHolder(ABC):
    """Has a model with a `LoRAManager`."""

    @abstractmethod
    def _adapters(self, *, awake: bool) -> LoRAManager:
        """The manager; with `awake`, raises EngineAsleepError while the weights are elsewhere."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; see `LoRAManager.add_adapter`."""
        return self._adapters(awake=True).add_adapter(lora_request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Release an adapter; False if it is not here."""
        return self._adapters(awake=True).remove_adapter(lora_int_id)

    def list_loras(self) -> list[int]:
        """The numbers of all adapters here."""
        return self._adapters(awake=False).list_adapters()

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed; False if it is not here."""
        return self._adapters(awake=False).pin_adapter(lora_int_id)


class StageAdapters(ABC):
    """The adapters of a stage, which are the same on all its ranks; calls run between batches.

    All raise TransferTimeout after `timeout` seconds.
    """

    @abstractmethod
    def _call_executor(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        """Call a method of the stage's executor between batches; returns what it returns."""

    def add_lora(self, lora_request: LoRARequest, *, timeout: float = 60.0) -> bool:
        """Load an adapter on all ranks; False if it was there.

        Raises EngineError or SchemaError if it cannot be used; then no rank has it.
        """
        return bool(self._call_executor("add_lora", [lora_request], timeout))

    def remove_lora(self, lora_int_id: int, *, timeout: float = 60.0) -> bool:
        """Release an adapter; False if it was not there."""
        return bool(self._call_executor("remove_lora", [lora_int_id], timeout))

    def list_loras(self, *, timeout: float = 60.0) -> list[int]:
        """The numbers of the adapters that all ranks hold."""
        return list(self._call_executor("list_loras", [], timeout))

    def pin_lora(self, lora_int_id: int, *, timeout: float = 60.0) -> bool:
        """Keep an adapter until it is removed; False if it is not there."""
        return bool(self._call_executor("pin_lora", [lora_int_id], timeout))
