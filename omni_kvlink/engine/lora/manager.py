"""`LoRAManager`: the adapters that a worker holds, and the one that is active."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.lora.adapter import ActiveLoRA, LoRAAdapter, LoRATargets
from omni_kvlink.engine.lora.adapter_files import read_adapter
from omni_kvlink.engine.lora.request import LoRARequest, stable_lora_int_id
from omni_kvlink.errors import KVLinkError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.utils.hooks import RemovableHandle

    from omni_kvlink.engine.config import LoRAConfig
    from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams

_log = logging.getLogger(__name__)


class LoRAManager:
    """Holds the `max_loras` adapters that were used last, on the model's device.

    One adapter at most is active: added to the model's layers, until another one, or none, is. Used
    in the model's thread. The stage's own adapter, `lora_path`, acts on requests that name none; it
    is loaded here, and does not count.

    `is_used` is False until an adapter is named: there is nothing to resolve or to activate.
    `targets` returns the layers that adapters may change, or None if the model takes none.
    """

    def __init__(self, config: LoRAConfig, targets: Callable[[], LoRATargets | None]):
        self._config, self._targets = config, targets
        self.is_used = bool(config.lora_path)
        self._adapters: dict[int, LoRAAdapter] = {}  # the one that was used last is the last
        self._pinned: set[int] = set()
        self._active: ActiveLoRA | None = None
        self._handles: list[RemovableHandle] = []
        self._dropped: list[LoRARequest] = []
        self._static: LoRARequest | None = None
        if config.lora_path:
            number = stable_lora_int_id(config.lora_path)
            self._static = LoRARequest("static", number, config.lora_path)
            self._adapters[number] = self._load(self._static)

    @property
    def active(self) -> ActiveLoRA | None:
        """The adapter that acts on the model now, if one does."""
        return self._active

    def add_adapter(self, request: LoRARequest) -> bool:
        """Load an adapter, in place of the one that was used longest ago; False if it is here.

        Blocks while its files are read. Raises as `read_adapter` and `LoRAAdapter` do; EngineError
        if its number is that of another adapter here, or if all others are pinned.
        """
        if (match := self._adapters.get(request.lora_int_id)) is not None:
            if match.request != request:
                raise EngineError(
                    f"lora_int_id {request.lora_int_id} is {match.request.lora_name!r} of "
                    f"{match.request.lora_path}, not {request.lora_name!r} of {request.lora_path}: "
                    "choose another number, or remove_lora first"
                )
            return False
        adapter = self._load(request)
        self.is_used = True
        self._make_room()
        self._adapters[request.lora_int_id] = adapter
        return True

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Release an adapter; False if it is not here. EngineError for the stage's own."""
        if self._static is not None and lora_int_id == self._static.lora_int_id:
            raise EngineError(
                f"adapter {lora_int_id} is the stage's own: start it without lora_path"
            )
        adapter = self._adapters.pop(lora_int_id, None)
        self._pinned.discard(lora_int_id)
        if self._active is not None and self._active.number == lora_int_id:
            self.activate(None)
        return adapter is not None

    def list_adapters(self) -> list[int]:
        """The numbers of all adapters here, sorted."""
        return sorted(self._adapters)

    def pin_adapter(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed, whatever else is used; False if it is not here."""
        if lora_int_id not in self._adapters:
            return False
        self._pinned.add(lora_int_id)
        return True

    def resolve(self, params: OmniDiffusionSamplingParams) -> ActiveLoRA | None:
        """The adapter of a request, loaded if it is not here; None if the request runs without one.

        Raises as `add_adapter` does; EngineError if the request names a number that is not here, or
        if there are no adapters in this stage; SchemaError for a `lora_scale` without an adapter.
        """
        number, request = params.lora_int_id, params.lora_request
        if number is None:
            if params.lora_scale != 1.0:
                raise SchemaError(
                    f"lora_scale {params.lora_scale} without a lora_request: name one"
                )
            if self._static is None:
                return None
            adapter = self._adapters[self._static.lora_int_id]
            return ActiveLoRA.of(adapter, self._config.lora_scale)
        if request is not None:
            self.add_adapter(request)
        if number not in self._adapters:
            raise EngineError(
                f"lora_int_id {number} is not loaded here: add_lora first, or give a lora_request "
                f"with its path; there are {self.list_adapters()}"
            )
        adapter = self._adapters[number] = self._adapters.pop(number)  # it is the last now
        return ActiveLoRA.of(adapter, params.lora_scale)

    def activate(self, lora: ActiveLoRA | None) -> None:
        """Add an adapter to the model's layers, instead of the active one; None for no adapter."""
        if lora == self._active:
            return
        for handle in self._handles:
            handle.remove()
        self._handles, self._active = [], lora
        if lora is not None and lora.scale:
            self._handles = lora.adapter.attach(lora.scale)

    def modules(self) -> Mapping[str, nn.Module]:
        """The adapters' matrices by name, for `sleep`."""
        return {f"lora:{number}": adapter for number, adapter in self._adapters.items()}

    def drop(self) -> None:
        """Release all adapters; `reload` reads them again."""
        self.activate(None)
        self._dropped = [adapter.request for adapter in self._adapters.values()]
        self._adapters.clear()

    def reload(self) -> None:
        """Read what `drop` released; one that cannot be read is logged, and is gone."""
        for request in self._dropped:
            try:
                self._adapters[request.lora_int_id] = self._load(request)
            except KVLinkError as error:  # noqa: PERF203 - each has its own error
                if request == self._static:
                    raise
                self._pinned.discard(request.lora_int_id)
                _log.warning("adapter %r is not loaded again: %s", request.lora_name, error)
        self._dropped = []

    def _load(self, request: LoRARequest) -> LoRAAdapter:
        if not self._config.enable_lora:
            raise EngineError(
                f"adapter {request.lora_name!r}: this stage has enable_lora: false; leave that out"
            )
        targets = self._targets()
        if targets is None:
            raise EngineError(f"adapter {request.lora_name!r}: this model takes no LoRA adapters")
        with torch.inference_mode(False), torch.no_grad():  # it outlives the pass that needs it
            files = read_adapter(request.lora_path, max_rank=self._config.max_lora_rank)
            return LoRAAdapter(request, files, targets)

    def _make_room(self) -> None:
        """Release adapters until another one may be added."""
        kept = set(self._pinned) | ({self._static.lora_int_id} if self._static else set())
        capacity = self._config.capacity + (self._static is not None)
        while len(self._adapters) >= capacity:
            oldest = next((number for number in self._adapters if number not in kept), None)
            if oldest is None:
                raise EngineError(
                    f"all {self._config.capacity} adapters are pinned: raise max_loras, or "
                    "remove_lora one of them"
                )
            self.remove_adapter(oldest)
