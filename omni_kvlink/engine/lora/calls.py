"""Calls that load and release adapters, where they are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
