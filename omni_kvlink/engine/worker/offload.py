"""Weights out of memory and back, bit for bit."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class ParkedWeights:
    """All parameters and buffers of some modules, kept where they do not take the device's memory.

    Weights of a GPU go to the CPU's memory, those of the CPU to a file without a name.

    Args:
        modules: they are unusable until `restore`.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._places = list(_tensors(modules))
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by drop()
        self._kept: list[tuple[torch.device, torch.Size, torch.dtype, Tensor | None]] = []
        for tensor in self._places:
            on_cpu = tensor.device.type == "cpu"
            kept = None if on_cpu else tensor.detach().to("cpu")
            if on_cpu and tensor.numel():
                self._file.write(_bytes(tensor.detach().contiguous()))
            self._kept.append((tensor.device, tensor.shape, tensor.dtype, kept))
        self._file.flush()
        for tensor in self._places:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        give_memory_back()

    def restore(self) -> None:
        """Every tensor as it was; once."""
        self._file.seek(0)
        for tensor, (device, shape, dtype, kept) in zip(self._places, self._kept, strict=True):
            if kept is not None:
                tensor.data = kept.to(device)
                continue
            fresh = torch.empty(shape, dtype=dtype, device=device)
            if fresh.numel() and self._file.readinto(_bytes(fresh)) != fresh.nbytes:
                raise OSError("the file with the parked weights is too short")
            tensor.data = fresh
        self.drop()

    def drop(self) -> None:
        """Forget them."""
        self._places, self._kept = [], []
        self._file.close()


def drop_weights(modules: Mapping[str, nn.Module]) -> None:
    """Give back the memory of all that a checkpoint holds; what it does not hold stays."""
    for module in modules.values():
        for tensor in module.state_dict(keep_vars=True).values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    give_memory_back()


def weights_nbytes(modules: Mapping[str, nn.Module]) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in _tensors(modules))


def give_memory_back() -> None:
    """What was freed, to the system: the C library and torch would keep it for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if os.name == "posix" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def available_memory(device: torch.device) -> int:
    """Bytes that a device could still take."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    with open("/proc/meminfo") as lines:
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) << 10


def _tensors(modules: Mapping[str, nn.Module]) -> Iterator[Tensor]:
    """Each tensor once, also where two modules share it."""
    seen: set[int] = set()
    for module in modules.values():
        for tensor in [*module.parameters(), *module.buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
