"""How a stage of the engine is set up. All of it is plain values, to travel to worker processes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

from omni_kvlink.link import Verify

C = TypeVar("C", bound="StageConfig")

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True)
class DiffusionParallelConfig:
    """How many ranks share the work of a diffusion stage; each degree divides it another way.

    Attributes:
        data_parallel_size: groups that paint different requests.
        cfg_parallel_size: ranks that compute one guidance branch each; 1, 2 or 3.
        tensor_parallel_size: ranks that hold a share of the heads each.
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
        """Ranks in all."""
        return self.data_parallel_size * self.cfg_parallel_size * self.tensor_parallel_size


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """Where a stage's KV comes from and goes to, and how much of it may be held.

    Attributes:
        sources: URLs to connect to, of each tensor rank of the stage before; none if there is no
            such stage.
        sinks: URLs to serve, of each tensor rank, for the stage after; none if there is no such
            stage.
        source_options, sink_options: fields of the connectors' `Options`.
        receivers: how the stage after divides its work: each of its ranks is sent only its part.
        budget: bytes of received KV that may be held at once.
        reserve: bytes set aside for a KV whose size nobody said; a share of the budget if 0.
        timeout: seconds until a request's KV must have come.
        connect_timeout: seconds until the stage before must serve.
        put_timeout: seconds to wait for room in the sink.
        ttl: seconds in which the next stage must fetch what was sent.
        prefetch: receive for waiting requests while others run.
        verify: "full" checks every byte that comes; "auto" what `KVLink.get` checks.
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
        num_gpus: of each rank; one if None and the stage wants a GPU.
        resources: of each rank besides, by Ray's names for them.
        strategy: how ranks are spread over nodes, in Ray's words.
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
            raise ValueError(f"{amounts}: a rank takes something of its node, nothing below 0")


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """What every stage has.

    Attributes:
        model: directory of the checkpoint.
        model_class_name: whose `ModelUtility` loads and serves it; "bagel", or "module:Class".
        stage: the share of the model, in the model's own words.
        dtype: "bfloat16" or "float32".
        device: such as "cuda:1"; "auto" takes the rank's CUDA device, or the CPU.
        max_num_seqs: requests that may run at once.
        num_threads: of torch, on the CPU; as it finds them if 0.
        kv: see `KVConfig`.
        parallel_config: see `DiffusionParallelConfig`.
        distributed_executor_backend: "uni", "mp", "ray", "diffusers" or "module:Class"; by the
            number of ranks if empty.
        distributed_init_method: where ranks meet, "file:///…" or "tcp://127.0.0.1:port"; found by
            the executor if empty.
        distributed_timeout: seconds in which the other ranks must come to what all do together.
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
                "a stage that hands KV on divides its heads alone: use tensor_parallel_size"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def served_at(self: C, urls: tuple[str, ...]) -> C:
        """The same, for a next life: where the system chose ports, it is at those again."""
        kv = dataclasses.replace(self.kv, sinks=urls or self.kv.sinks)
        return dataclasses.replace(self, kv=kv)

    def device_of(self, local_rank: int) -> torch.device:
        """The device of a rank on this machine."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class OmniDiffusionConfig(StageConfig):
    """A diffusion stage.

    Attributes:
        request_batch_max_wait_ms: milliseconds that a first request may wait for companions.
        step_execution: scheduling between denoising steps; this engine has none.
        cache_backend: "none", or the name of a `CacheBackend`.
        cache_config: the backend's own settings.
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
        think: write a plan first, which becomes part of the prompt.
    """

    stage: str = "ar"
    num_blocks: int = 1024
    block_size: int = 16
    think: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel_config.world_size > self.parallel_config.tensor_parallel_size:
            raise ValueError("an AR stage divides its heads alone: use tensor_parallel_size")
