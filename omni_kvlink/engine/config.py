"""Configuration of stages: plain values that are sent to worker processes."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import field
from typing import Any, TypeVar

import torch

from omni_kvlink import Verify

C = TypeVar("C", bound="StageConfig")

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_class(kind: str, name: str, known: dict[str, str]) -> Any:
    """The class that a configuration names, by its name in `known` or as "module:Class"."""
    module, separator, attribute = known.get(name, name).partition(":")
    if not separator:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(known)}, or 'module:Class'")
    return getattr(importlib.import_module(module), attribute)


@dataclasses.dataclass(frozen=True)
class DiffusionParallelConfig:
    """How a diffusion stage divides its work among ranks."""

    data_parallel_size: int = 1  # groups that run different requests
    cfg_parallel_size: int = 1  # ranks that divide the guidance branches; 1, 2 or 3
    tensor_parallel_size: int = 1  # ranks that divide the heads
    sequence_parallel_size: int = 1  # latent rows are not divided here

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} {value}: 1 or more")
        if self.cfg_parallel_size > 3:
            raise ValueError(f"cfg_parallel_size {self.cfg_parallel_size}: at most 3 branches")
        if self.sequence_parallel_size > 1:
            text = f"sequence_parallel_size {self.sequence_parallel_size}: latent rows are not "
            raise ValueError(f"{text}divided here; use cfg_parallel_size or tensor_parallel_size")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data_parallel_size * self.cfg_parallel_size * self.tensor_parallel_size


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """The links of a stage, and how much received KV it may hold.

    Options are fields of the connectors' `Options`. `receivers` is how the next stage divides its
    work; each of its ranks receives its part.
    """

    sources: tuple[str, ...] = ()  # URLs of the tensor ranks of the stage before, if there is one
    sinks: tuple[str, ...] = ()  # URLs that the tensor ranks serve for the next stage
    source_options: dict[str, Any] = field(default_factory=dict)
    sink_options: dict[str, Any] = field(default_factory=dict)
    receivers: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    budget: int = 4 << 30  # bytes of received KV that may be held at once
    reserve: int = 0  # bytes reserved for a KV of unknown size; an eighth of the budget if 0
    timeout: float = 60.0  # seconds until a request's KV must have come
    connect_timeout: float = 60.0  # seconds until the stage before must serve
    put_timeout: float = 60.0  # seconds to wait for free memory in the sink
    ttl: float = 120.0  # seconds in which the next stage must receive what was sent
    prefetch: bool = True  # receive for waiting requests while others run
    verify: Verify = "full"  # checks every byte; "auto" checks what `get` does by default


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Where Ray puts a stage, or the ranks of its executor, and the resources of each rank."""

    address: str = "auto"  # or "host:port" of a cluster, or "local" to start one
    num_cpus: float = 1.0
    num_gpus: float | None = None  # one if None and the stage uses a GPU
    resources: dict[str, float] = field(default_factory=dict)  # by their names in Ray
    strategy: str = "PACK"  # of the ranks' placement group, as Ray names it

    def __post_init__(self) -> None:
        if self.strategy not in _STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r}; there are {', '.join(_STRATEGIES)}")
        if self.address.startswith("ray://"):
            raise ValueError(f"{self.address}: Ray's client cannot be used here; name host:port")
        amounts = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus or 0, **self.resources}
        low = [name for name, amount in amounts.items() if amount < 0]
        if low or not any(amounts.values()):
            raise ValueError(f"{amounts}: a rank needs something of its node, nothing below 0")


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """The configuration of any stage.

    `distributed_executor_backend` is "uni", "mp", "ray", "diffusers" or "module:Class", by the
    number of ranks if empty; `distributed_init_method` is the rendezvous of the ranks,
    "file:///…" or "tcp://127.0.0.1:port", chosen by the executor if empty.
    """

    model: str  # directory of the checkpoint
    model_class_name: str = "bagel"  # the `ModelUtility`, or "module:Class"
    stage: str = "dit"  # which part of the model, as the model names it
    dtype: str = "bfloat16"  # or "float32"
    device: str = "auto"  # the rank's CUDA device, or the CPU; or such as "cuda:1" for one rank
    device_numbers: tuple[int, ...] = ()  # the ranks' CUDA devices, in order; 0, 1, … if empty
    max_num_seqs: int = 1  # requests that may run at once
    num_threads: int = 0  # of torch, on the CPU; torch's default if 0
    kv: KVConfig = field(default_factory=KVConfig)
    parallel_config: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    distributed_executor_backend: str = ""
    distributed_init_method: str = ""
    start_timeout: float = 600.0  # seconds in which the stage must have loaded its model
    distributed_timeout: float = 300.0  # seconds in which all ranks must join a collective call
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r}; there are {', '.join(_DTYPES)}")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs {self.max_num_seqs}: 1 or more")
        if not self.start_timeout > 0:
            raise ValueError(f"start_timeout {self.start_timeout}: more than 0 s")
        world = self.parallel_config.world_size
        if ":" in self.device and world > 1:
            raise ValueError(f"device {self.device!r} for {world} ranks: use devices, one for each")
        if self.device_numbers and len(self.device_numbers) < world:
            raise ValueError(f"devices {self.device_numbers} for {world} ranks: one for each")
        ranks = self.parallel_config.tensor_parallel_size
        if self.kv.sinks and len(self.kv.sinks) != ranks:
            raise ValueError(f"{len(self.kv.sinks)} kv.sinks for {ranks} tensor ranks: one each")
        if self.kv.sinks and self.parallel_config.world_size > ranks:
            raise ValueError(
                "a stage that sends KV divides its heads alone: use tensor_parallel_size"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of torch."""
        return _DTYPES[self.dtype]

    def served_at(self: C, urls: tuple[str, ...]) -> C:
        """The configuration for a restart at the same URLs and ports."""
        kv = dataclasses.replace(self.kv, sinks=urls or self.kv.sinks)
        return dataclasses.replace(self, kv=kv)

    def device_of(self, local_rank: int) -> torch.device:
        """The device of the rank with this number on this machine."""
        if self.device not in ("auto", "cuda"):
            return torch.device(self.device)
        if self.device == "auto" and not torch.cuda.is_available():
            return torch.device("cpu")
        number = self.device_numbers[local_rank] if self.device_numbers else local_rank
        return torch.device("cuda", number)


@dataclasses.dataclass(frozen=True)
class OmniDiffusionConfig(StageConfig):
    """A diffusion stage."""

    request_batch_max_wait_ms: float = 0.0  # that a first request may wait for a full batch
    step_execution: bool = False  # scheduling between denoising steps; not supported
    cache_backend: str = "none"  # or the name of a `CacheBackend`
    cache_config: dict[str, Any] = field(default_factory=dict)
    attention_backend: str = "auto"  # of diffusers' pipelines, as diffusers or vLLM-Omni names it
    vae_use_slicing: bool = False  # the autoencoder decodes one image at a time; diffusers only,
    vae_use_tiling: bool = False  # and an image in tiles,
    enable_cpu_offload: bool = False  # and each network is on the GPU only while it computes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_execution:
            raise ValueError("step_execution: this engine batches whole requests; leave it off")
        if self.request_batch_max_wait_ms < 0:
            raise ValueError(f"request_batch_max_wait_ms {self.request_batch_max_wait_ms}")


@dataclasses.dataclass(frozen=True)
class OmniARConfig(StageConfig):
    """An AR stage."""

    stage: str = "ar"
    num_blocks: int = 1024  # of the paged KV pool
    block_size: int = 16  # tokens in each block
    think: bool = False  # let the model write a plan first, which becomes part of the prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel_config.world_size > self.parallel_config.tensor_parallel_size:
            raise ValueError("an AR stage divides its heads alone: use tensor_parallel_size")
