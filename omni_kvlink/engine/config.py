"""Configuration of stages: plain values that are sent to worker processes."""

from __future__ import annotations

import dataclasses
import importlib
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
    """How a diffusion stage divides its work among ranks.

    Attributes:
        data_parallel_size: groups that run different requests.
        cfg_parallel_size: ranks that divide the guidance branches; 1, 2 or 3.
        tensor_parallel_size: ranks that divide the heads.
        sequence_parallel_size: 1; latent rows are not divided here.
    """

    data_parallel_size: int = 1
    cfg_parallel_size: int = 1
    tensor_parallel_size: int = 1
    sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} {getattr(self, field.name)}: 1 or more")
        if self.cfg_parallel_size > 3:
            raise ValueError(f"cfg_parallel_size {self.cfg_parallel_size}: at most 3 branches")
        if self.sequence_parallel_size > 1:
            raise ValueError(
                f"sequence_parallel_size {self.sequence_parallel_size}: latent rows are not "
                "divided here; use cfg_parallel_size or tensor_parallel_size"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data_parallel_size * self.cfg_parallel_size * self.tensor_parallel_size


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """The links of a stage, and how much received KV it may hold.

    Attributes:
        sources: URLs of the tensor ranks of the stage before; empty if there is none.
        sinks: URLs that the tensor ranks serve for the next stage; empty if there is none.
        source_options, sink_options: fields of the connectors' `Options`.
        receivers: how the next stage divides its work; each of its ranks receives its part.
        budget: bytes of received KV that may be held at once.
        reserve: bytes reserved for a KV of unknown size; an eighth of the budget if 0.
        timeout: seconds until a request's KV must have come.
        connect_timeout: seconds until the stage before must serve.
        put_timeout: seconds to wait for free memory in the sink.
        ttl: seconds in which the next stage must receive what was sent.
        prefetch: receive for waiting requests while others run.
        verify: "full" checks every byte; "auto" checks what `get` does by default.
    """

    sources: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    source_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sink_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    receivers: DiffusionParallelConfig = dataclasses.field(default_factory=DiffusionParallelConfig)
    budget: int = 4 << 30
    reserve: int = 0
    timeout: float = 60.0
    connect_timeout: float = 60.0
    put_timeout: float = 60.0
    ttl: float = 120.0
    prefetch: bool = True
    verify: Verify = "full"


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Where Ray puts a stage, or the ranks of its executor.

    Attributes:
        address: "auto", "host:port" of a cluster, or "local" to start one.
        num_cpus: of each rank.
        num_gpus: of each rank; one if None and the stage uses a GPU.
        resources: further resources of each rank, by their names in Ray.
        strategy: of the ranks' placement group, as Ray names it.
    """

    address: str = "auto"
    num_cpus: float = 1.0
    num_gpus: float | None = None
    resources: dict[str, float] = dataclasses.field(default_factory=dict)
    strategy: str = "PACK"

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

    Attributes:
        model: directory of the checkpoint.
        model_class_name: the `ModelUtility`: "bagel", or "module:Class".
        stage: which part of the model, as the model names it.
        dtype: "bfloat16" or "float32".
        device: such as "cuda:1"; "auto" takes the rank's CUDA device, or the CPU.
        max_num_seqs: requests that may run at once.
        num_threads: of torch, on the CPU; torch's default if 0.
        kv: see `KVConfig`.
        parallel_config: see `DiffusionParallelConfig`.
        distributed_executor_backend: "uni", "mp", "ray", "diffusers" or "module:Class"; by the
            number of ranks if empty.
        distributed_init_method: the rendezvous of the ranks, "file:///…" or
            "tcp://127.0.0.1:port"; chosen by the executor if empty.
        distributed_timeout: seconds in which all ranks must join a collective operation.
        ray: see `RayConfig`.
    """

    model: str
    model_class_name: str = "bagel"
    stage: str = "dit"
    dtype: str = "bfloat16"
    device: str = "auto"
    max_num_seqs: int = 1
    num_threads: int = 0
    kv: KVConfig = dataclasses.field(default_factory=KVConfig)
    parallel_config: DiffusionParallelConfig = dataclasses.field(
        default_factory=DiffusionParallelConfig
    )
    distributed_executor_backend: str = ""
    distributed_init_method: str = ""
    distributed_timeout: float = 300.0
    ray: RayConfig = dataclasses.field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r}; there are {', '.join(_DTYPES)}")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs {self.max_num_seqs}: 1 or more")
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
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class OmniDiffusionConfig(StageConfig):
    """A diffusion stage.

    Attributes:
        request_batch_max_wait_ms: milliseconds that a first request may wait for a full batch.
        step_execution: scheduling between denoising steps; not supported, must be False.
        cache_backend: "none", or the name of a `CacheBackend`.
        cache_config: settings of the backend.
    """

    request_batch_max_wait_ms: float = 0.0
    step_execution: bool = False
    cache_backend: str = "none"
    cache_config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_execution:
            raise ValueError("step_execution: this engine batches whole requests; leave it off")
        if self.request_batch_max_wait_ms < 0:
            raise ValueError(f"request_batch_max_wait_ms {self.request_batch_max_wait_ms}")


@dataclasses.dataclass(frozen=True)
class OmniARConfig(StageConfig):
    """An AR stage.

    Attributes:
        num_blocks, block_size: of the paged KV pool: blocks, and tokens in each.
        think: let the model write a plan first, which becomes part of the prompt.
    """

    stage: str = "ar"
    num_blocks: int = 1024
    block_size: int = 16
    think: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel_config.world_size > self.parallel_config.tensor_parallel_size:
            raise ValueError("an AR stage divides its heads alone: use tensor_parallel_size")
