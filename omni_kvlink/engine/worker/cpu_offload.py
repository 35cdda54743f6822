"""CPU offload: weights that are in host memory, and on the device only while they are used.

By module (encoders and decoders) and by layer, the next layer being copied while one computes. A
weight that is not on the device is an empty tensor there, so that a use without its module's call
is an error. On the CPU the "device" is other memory of the host: the same copies are made, which
save nothing, but show what they do on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from omni_kvlink.engine.worker.offload import trim_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig
    from omni_kvlink.engine.worker.model import ModelUtility


class OffloadedModule:
    """All weights of a module: in host memory, and on the device between `load` and `unload`."""

    def __init__(self, module: nn.Module, device: torch.device, pin: bool):
        self._tensors = [*module.parameters(), *module.buffers()]
        self._device, self._pin = device, pin and device.type == "cuda"
        self._host: list[Tensor] = []
        self._event: Any = None
        self.is_loaded = False
        self.take()

    def take(self) -> None:
        """Take the weights that the module has now into host memory."""
        self._host = []
        for tensor in self._tensors:
            kept = tensor.detach().to("cpu")
            self._host.append(kept.pin_memory() if self._pin else kept)
        self.is_loaded = False
        self._empty()

    def drop(self) -> None:
        """Give the weights up; `take` takes new ones."""
        self.unload()
        self._host = []

    def load(self, stream: Any = None) -> None:
        """Copy the weights to the device, on a CUDA stream of their own if there is one."""
        if self.is_loaded:
            return
        with torch.cuda.stream(stream):  # None: the current one
            for tensor, kept in zip(self._tensors, self._host, strict=True):
                tensor.data = kept.to(self._device, non_blocking=True, copy=True)
            self._event = None if stream is None else stream.record_event()
        self.is_loaded = True

    def wait(self) -> None:
        """Let the current CUDA stream wait for the copies of `load`, and keep them until then."""
        if self._event is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        for tensor in self._tensors:
            tensor.data.record_stream(current)
        self._event = None

    def unload(self) -> None:
        """Release the device's memory; the weights were not changed there."""
        if self.is_loaded:
            self.is_loaded = False
            self._empty()

    def _empty(self) -> None:
        for tensor in self._tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._device)


class CpuOffload:
    """The offloaded modules of a model.

    Each of `modules` is on the device during its call. `layers` are called in order, and again from
    the first: the called one and the next are on the device. Calls come from one thread.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layers: Sequence[nn.Module],
        device: torch.device,
        *,
        pin: bool = True,
    ):
        self._layers = [OffloadedModule(layer, device, pin) for layer in layers]
        self._modules = [OffloadedModule(module, device, pin) for module in modules]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for weights, module in zip(self._modules, modules, strict=True):
            module.register_forward_pre_hook(partial(_load, weights))
            module.register_forward_hook(partial(_unload, weights), always_call=True)
        for number, module in enumerate(layers):
            module.register_forward_pre_hook(partial(self._enter, number))
        trim_memory()

    @classmethod
    def of(
        cls, config: StageConfig, utility: ModelUtility, device: torch.device
    ) -> CpuOffload | None:
        """Offload what a configuration says, and move all other weights to the device."""
        if not config.offloads:
            return None
        modules = utility.encoders_and_decoders() if config.enable_cpu_offload else ()
        layers = utility.layers() if config.enable_layerwise_offload else ()
        offload = cls(modules, layers, device, pin=config.pin_cpu_memory)
        move_weights(utility.modules(), device)
        return offload

    def take(self) -> None:
        """Take weights that were loaded anew into host memory."""
        for weights in (*self._layers, *self._modules):
            weights.take()
        trim_memory()

    def unload(self) -> None:
        """Release all that is on the device."""
        for weights in (*self._layers, *self._modules):
            weights.unload()

    def drop(self) -> None:
        """Give up the weights, in host memory, too."""
        for weights in (*self._layers, *self._modules):
            weights.drop()

    def _enter(self, number: int, *_: Any) -> None:
        """Load a layer that is called now, unless it was prefetched, and prefetch the next."""
        following = (number + 1) % len(self._layers)
        # before any copy: only two layers are ever on the device
        for index, layer in enumerate(self._layers):
            if index not in (number, following):
                layer.unload()
        self._layers[number].load(self._stream)
        self._layers[number].wait()
        self._layers[following].load(self._stream)


def move_weights(modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Move every parameter and buffer to a device, in place."""
    for module in modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.to(device)


def _load(weights: OffloadedModule, *_: Any) -> None:
    weights.load()


def _unload(weights: OffloadedModule, *_: Any) -> None:
    weights.unload()
