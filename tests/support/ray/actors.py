"""Actors that make and read tensors; an import of this registers their transports."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch

import omni_kvlink.integrations.ray
from support.ray.tensors import digest, many_kinds

omni_kvlink.integrations.ray.register()
omni_kvlink.integrations.ray.register("kvlink-views", views=True)
omni_kvlink.integrations.ray.register("kvlink-tcp", transport="zmq+tcp")
omni_kvlink.integrations.ray.register("kvlink-small", quota="2MB", put_timeout=0.05)


class ActorProcess:
    def pid(self) -> int:
        return os.getpid()

    def stats(self, name: str = "kvlink") -> dict[str, Any]:
        """The `stats` of this process's links."""
        from ray.experimental.rdt.util import get_tensor_transport_manager

        found: dict[str, Any] = get_tensor_transport_manager(name.upper()).links.stats()
        return found

    def footprint(self) -> tuple[int, int]:
        """Number of open descriptors, and bytes of resident memory."""
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


class TensorSource(ActorProcess):
    """Makes tensors, which it passes by reference."""

    @ray.method(tensor_transport="kvlink")  # type: ignore[untyped-decorator]
    def make(self, seed: int, *shape: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.randn(shape or (256, 256))

    @ray.method(tensor_transport="kvlink")  # type: ignore[untyped-decorator]
    def make_kinds(self) -> dict[str, Any]:
        tensors = many_kinds()
        return {"first": tensors[0], "others": tensors[1:], "count": len(tensors)}

    @ray.method(tensor_transport="kvlink")  # type: ignore[untyped-decorator]
    def make_none(self) -> str:
        return "no tensor"

    @ray.method(tensor_transport="kvlink")  # type: ignore[untyped-decorator]
    def make_complex(self) -> torch.Tensor:
        return torch.ones(3, dtype=torch.complex64)

    @ray.method(tensor_transport="kvlink-small")  # type: ignore[untyped-decorator]
    def make_small(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)

    @ray.method(tensor_transport="kvlink-views")  # type: ignore[untyped-decorator]
    def make_for_views(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.randn(256, 256)

    @ray.method(tensor_transport="kvlink-tcp")  # type: ignore[untyped-decorator]
    def make_for_tcp(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.randn(256, 256)


class TensorReader(ActorProcess):
    """Reads tensors that it is passed, or got itself."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    def write(self, tensor: torch.Tensor) -> float:
        """The sum of a tensor, which is overwritten then."""
        total = float(tensor.sum())
        tensor.fill_(0)
        return total

    def digest(self, value: dict[str, Any]) -> str:
        return digest([value["first"], *value["others"]])

    def echo(self, value: Any) -> Any:
        return value

    def total_of_nested(self, references: list[Any]) -> float:
        return float(ray.get(references[0]).sum())

    def hold(self, tensor: torch.Tensor) -> None:
        self._held.append(tensor)

    def held_total(self) -> float:
        return float(self._held[-1].sum())

    def is_in_link_memory(self) -> tuple[bool, str]:
        """Whether the tensor that was held last lies in a memory file, and its permissions."""
        address = self._held[-1].data_ptr()
        with open("/proc/self/maps") as file:
            for line in file:
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                if first <= address < last:
                    return "memfd" in line, line.split()[1]
        return False, ""
