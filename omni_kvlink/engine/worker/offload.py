"""Moves weights out of a device's memory and back, bit for bit."""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from omni_kvlink.engine.errors import EngineAsleepError
from omni_kvlink.engine.worker.quantization import plain_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class OffloadableWeights:
    """Takes the weights of a model out of the device's memory and brings them back.

    `modules` returns the networks by name; `drop` gives up the weights for level 2, and `reload`
    loads them again. `level` is 0 while awake.
    """

    def __init__(
        self,
        *,
        modules: Callable[[], Mapping[str, nn.Module]],
        drop: Callable[[], None],
        reload: Callable[[], None],
    ):
        self._modules, self._drop, self._reload = modules, drop, reload
        self._parked: ParkedWeights | None = None
        self.level = 0

    def check_awake(self) -> None:
        """Raises EngineAsleepError while the weights are not in memory."""
        if self.level:
            raise EngineAsleepError(f"asleep at level {self.level}: wake_up() first")

    def sleep(self, level: int) -> bool:
        """Level 1 keeps the weights elsewhere, 2 drops them; returns whether they were awake."""
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}; there are 1 and 2")
        if self.level:
            return False
        if level == 1:
            self._parked = ParkedWeights(self._modules())
        else:
            self._drop()
        self.level = level
        return True

    def wake_up(self) -> bool:
        """Bring the weights back; returns whether they were asleep."""
        if not self.level:
            return False
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        else:
            self._reload()
        self.level = 0
        return True

    def close(self) -> None:
        """Release what is kept; idempotent."""
        if self._parked is not None:
            self._parked.close()
            self._parked = None


class ParkedWeights:
    """All parameters and buffers of some modules, which are unusable until `restore`.

    Weights of a GPU go to the CPU's memory, those of the CPU to an unnamed file.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._kept: list[tuple[Tensor, torch.Size, Tensor | None]] = []
        for tensor in _tensors(modules):
            on_cpu = tensor.device.type == "cpu"
            kept = None if on_cpu else tensor.detach().to("cpu")
            if on_cpu and tensor.numel():
                self._file.write(_bytes(tensor.detach().contiguous()))
            self._kept.append((tensor, tensor.shape, kept))
        self._file.flush()
        _empty(tensor for tensor, _, _ in self._kept)

    def restore(self) -> None:
        """Put every tensor back as it was; callable once."""
        self._file.seek(0)
        for tensor, shape, kept in self._kept:
            if kept is not None:
                tensor.data = kept.to(tensor.device)
                continue
            fresh = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            if fresh.numel() and self._file.readinto(_bytes(fresh)) != fresh.nbytes:
                raise OSError("the file with the parked weights is too short")
            tensor.data = fresh
        self.close()

    def close(self) -> None:
        """Release what is kept; idempotent."""
        self._kept = []
        self._file.close()


def drop_weights(modules: Mapping[str, nn.Module]) -> None:
    """Release the memory of all tensors that a checkpoint holds; others stay."""
    states = [module.state_dict(keep_vars=True) for module in modules.values()]
    _empty(tensor for state in states for tensor in state.values())


def weights_nbytes(modules: Mapping[str, nn.Module]) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in _tensors(modules))


def trim_memory() -> None:
    """Return freed memory to the system, which torch and the C library would keep."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if os.name == "posix" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def available_memory(device: torch.device) -> int:
    """Bytes free on a device."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    with open("/proc/meminfo") as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


def _tensors(modules: Mapping[str, nn.Module]) -> Iterable[Tensor]:
    """Each parameter and buffer once, also if modules share it."""
    groups = [[*module.parameters(), *module.buffers()] for module in modules.values()]
    tensors = (part for group in groups for tensor in group for part in plain_tensors(tensor))
    return {id(tensor): tensor for tensor in tensors}.values()


def _empty(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    trim_memory()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
