"""Configuration of stages: plain values that are sent to worker processes."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

import torch

from omni_kvlink import Verify
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import ConnectOptions, ServeOptions
from omni_kvlink.settings import (
    Choice,
    FilePath,
    Integer,
    Json,
    ListOf,
    MapOf,
    Number,
    Seconds,
    Settings,
    Size,
    SomeOf,
    Text,
)

C = TypeVar("C", bound="StageConfig")

Degree = Annotated[int, Integer(1)]
Wait = Annotated[float, Seconds(above=0, endless=True)]
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_class(kind: str, name: str, classes: dict[str, str]) -> Any:
    """The class that a configuration names, by its name in `classes` or as "module:Class"."""
    module, separator, attribute = classes.get(name, name).partition(":")
    if not separator:
        raise SchemaError(f"no {kind} {name!r}; there are {', '.join(classes)}, or 'module:Class'")
    return getattr(importlib.import_module(module), attribute)


@dataclasses.dataclass(frozen=True)
class DiffusionParallelConfig(Settings):
    """The division of a diffusion stage's work among ranks."""

    data_parallel_size: Degree = 1  # groups that run different requests
    cfg_parallel_size: Annotated[int, Integer(1, 3)] = (
        1  # ranks that divide the guidance branches; 1, 2 or 3
    )
    tensor_parallel_size: Degree = 1  # ranks that divide the heads
    sequence_parallel_size: Degree | None = None  # ulysses_degree x ring_degree, if None
    ulysses_degree: Degree = 1  # ranks that divide latent rows, and the heads in attention
    ring_degree: Degree = 1  # ranks that divide latent rows, and pass K and V around in attention
    pipeline_parallel_size: Degree = 1  # ranks that divide the layers
    vae_patch_parallel_size: Degree = 1  # of these ranks: the first ones decode an image's tiles

    def __post_init__(self) -> None:
        super().__post_init__()
        product = self.ulysses_degree * self.ring_degree
        if self.sequence_parallel_size is None:
            object.__setattr__(self, "sequence_parallel_size", product)
        if self.sequence_parallel_size != product:
            raise SchemaError(
                f"sequence_parallel_size {self.sequence_parallel_size}: ulysses_degree "
                f"{self.ulysses_degree} x ring_degree {self.ring_degree} is {product}; set those"
            )
        if (degree := self.vae_patch_parallel_size) > self.ranks_per_request:
            raise SchemaError(
                f"vae_patch_parallel_size {degree}: at most the number of ranks that compute a "
                f"request together, here {self.ranks_per_request}: the product of all degrees but "
                "data_parallel_size"
            )

    @property
    def kv_ranks(self) -> int:
        """The number of ranks that divide the KV heads of a prompt."""
        return self.tensor_parallel_size * self.ulysses_degree

    @property
    def ranks_per_pass(self) -> int:
        """The number of ranks that compute one pass of the model together."""
        return self.kv_ranks * self.ring_degree * self.pipeline_parallel_size

    @property
    def ranks_per_request(self) -> int:
        """The number of ranks of a data-parallel group."""
        return self.cfg_parallel_size * self.ranks_per_pass

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data_parallel_size * self.ranks_per_request


@dataclasses.dataclass(frozen=True)
class KVConfig(Settings):
    """The links of a stage, and how much received KV it may hold.

    Options are fields of the connectors' `Options`. `receivers` is how the next stage divides its
    work; each of its ranks receives its part.
    """

    sources: tuple[str, ...] = ()  # URLs of the tensor ranks of the stage before, if there is one
    sinks: tuple[str, ...] = ()  # URLs that the tensor ranks serve for the next stage
    source_options: Annotated[dict[str, Any], SomeOf(ConnectOptions)] = field(default_factory=dict)
    sink_options: Annotated[dict[str, Any], SomeOf(ServeOptions)] = field(default_factory=dict)
    receivers: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    budget: Annotated[int, Size(1)] = 4 << 30  # bytes of received KV that may be held at once
    reserve: Annotated[int, Size()] = 0  # bytes for a KV of unknown size; 0: budget / 8
    timeout: Wait = 60.0  # seconds until a request's KV must have come
    connect_timeout: Wait = 60.0  # seconds until the stage before must serve
    put_timeout: Wait = 60.0  # seconds to wait for free memory in the sink
    ttl: Wait = 120.0  # seconds in which the next stage must receive what was sent
    prefetch: bool = True  # receive for waiting requests while others run
    verify: Verify = "full"  # checks every byte; "auto" checks what `get` does by default


@dataclasses.dataclass(frozen=True)
class CompilationConfig(Settings):
    """The settings of `torch.compile` for the repeated layers, where `enforce_eager` is False."""

    # "aot_eager" and "eager" trace, but generate no code
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    # of inductor, as torch names them; "reduce-overhead" uses CUDA graphs
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    dynamic: bool = True  # compile for any number of rows; False compiles for each number anew

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "default" and self.backend != "inductor":
            raise SchemaError(f"mode={self.mode!r}: it is for the backend inductor")

    def options(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        mode = {} if self.mode == "default" else {"mode": self.mode}
        return {"backend": self.backend, "dynamic": self.dynamic, **mode}


@dataclasses.dataclass(frozen=True)
class LoRAConfig(Settings):
    """The LoRA adapters of a stage, in vLLM's names."""

    enable_lora: bool = True  # False refuses requests with an adapter
    max_loras: Degree = 1  # adapters that are held at once; those that were used last stay
    max_cpu_loras: Degree | None = None  # as vLLM-Omni calls it; the larger of the two counts
    max_lora_rank: Degree = 512  # of a layer of an adapter
    lora_path: Annotated[str, FilePath()] = (
        ""  # directory of the stage's own adapter, for requests that name none
    )
    lora_scale: float = 1.0  # of the stage's own adapter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_path and not self.enable_lora:
            raise SchemaError(f"lora_path {self.lora_path} with enable_lora: false; one of them")
        if self.lora_scale != 1.0 and not self.lora_path:
            raise SchemaError(f"lora_scale {self.lora_scale} without a lora_path has no effect")

    @property
    def capacity(self) -> int:
        """The number of adapters that are held at once, besides the stage's own."""
        return max(self.max_loras, self.max_cpu_loras or 0)


@dataclasses.dataclass(frozen=True)
class KVTransferConfig(Settings):
    """Prefill and decode apart: an AR stage gives K and V of prompts to another, or takes them.

    A stage of each role serves a link at its `url`, and connects to those of the other role.
    """

    # "kv_producer": reads prompts alone; "kv_consumer": reads what no producer has
    kv_role: Literal["kv_producer", "kv_consumer"]
    url: Annotated[
        str, Text("shm://prefill", filled=True)
    ]  # of this stage's link; its peers must know it, so a port is not 0
    peers: tuple[str, ...]  # the URLs of the stages of the other role
    # of all these links
    options: Annotated[dict[str, Any], SomeOf(ConnectOptions)] = field(default_factory=dict)
    budget: Annotated[int, Size(1)] = 1 << 30  # bytes of K and V that a producer keeps
    timeout: Wait = 10.0  # seconds that a consumer waits for a producer; then it computes

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.peers:
            raise SchemaError("peers=(): the URLs of stages of the other role")

    @property
    def is_producer(self) -> bool:
        """Whether the stage reads prompts for others."""
        return self.kv_role == "kv_producer"


@dataclasses.dataclass(frozen=True)
class RayConfig(Settings):
    """The node on which Ray puts a stage, or its executor's ranks, and the resources of a rank."""

    address: str = "auto"  # or "host:port" of a cluster, or "local" to start one
    num_cpus: Annotated[float, Number(0)] = 1.0
    # one if None and the stage uses a GPU
    num_gpus: Annotated[float, Number(0)] | None = None
    # by their names in Ray
    resources: Annotated[dict[str, float], MapOf(Number(0))] = field(default_factory=dict)
    # of the ranks' placement group, as Ray names it
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address.startswith("ray://"):
            raise SchemaError(f"{self.address}: Ray's client cannot be used here; name host:port")
        amounts = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus or 0, **self.resources}
        if not any(amounts.values()):
            raise SchemaError(f"{amounts}: a rank needs something of its node")


@dataclasses.dataclass(frozen=True)
class ProfilerConfig(Settings):
    """The settings of each worker's profiler, in vLLM's names; all are off by default."""

    profiler: Literal["torch"] = "torch"  # the only one here
    torch_profiler_dir: Annotated[str, FilePath()] = ""  # for `start_profile` without a directory
    torch_profiler_record_shapes: bool = False  # of each operator's inputs
    torch_profiler_with_memory: bool = False
    torch_profiler_with_stack: bool = False  # of Python
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = False  # writes `.trace.json.gz`


@dataclasses.dataclass(frozen=True)
class StageConfig(Settings):
    """The configuration of any stage.

    `worker_cls` is "module:Class" of a `WorkerBase`, the stage's own kind if empty.
    `distributed_executor_backend` is "uni", "mp", "ray", "diffusers" or "module:Class", by the
    number of ranks if empty; `distributed_init_method` is the rendezvous of the ranks,
    "file:///…" or "tcp://127.0.0.1:port", chosen by the executor if empty.
    """

    model: Annotated[str, FilePath()]  # directory of the checkpoint; a path becomes a string
    model_class_name: str = "bagel"  # the `ModelUtility`, or "module:Class"
    worker_cls: str = ""
    stage: str = "dit"  # which part of the model, as the model names it
    dtype: Annotated[str, Choice(*_DTYPES)] = "bfloat16"
    attention_backend: str = "auto"  # as vLLM-Omni, diffusers or `attention_backends` name it
    quantization: Literal["", "int8_weight_only"] = ""  # of the layers' weights
    # of the image autoencoder; as published if "auto", BAGEL's in float32
    vae_dtype: Annotated[str, Choice("auto", *_DTYPES)] = "auto"
    device: str = "auto"  # the rank's CUDA device, or the CPU; or such as "cuda:1" for one rank
    # the ranks' CUDA devices, in order; 0, 1, … if empty
    device_numbers: Annotated[tuple[int, ...], ListOf(Integer(0))] = ()
    max_num_seqs: Degree = 1  # requests that may run at once
    num_threads: Annotated[int, Integer(0)] = 0  # of torch, on the CPU; torch's default if 0
    vae_use_tiling: bool = False  # images above 512 pixels a side: blended tiles; True if divided
    enable_cpu_offload: bool = False  # encoders and decoders are on the device while they run
    enable_layerwise_offload: bool = False  # layers are on the device while they run
    pin_cpu_memory: bool = True  # of offloaded weights, where there is a GPU
    enforce_eager: bool = True  # False compiles the model's repeated layers
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    warmup_sizes: tuple[tuple[int, int], ...] = ()  # of images that run at the start: height, width
    kv: KVConfig = field(default_factory=KVConfig)
    parallel_config: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    distributed_executor_backend: str = ""
    distributed_init_method: str = ""
    start_timeout: Wait = 600.0  # seconds in which the stage must have loaded its model
    distributed_timeout: Wait = 300.0  # seconds in which all ranks must join a collective call
    ray: RayConfig = field(default_factory=RayConfig)
    profiler_config: ProfilerConfig = field(default_factory=ProfilerConfig)
    lora_config: LoRAConfig = field(default_factory=LoRAConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization and self.offloads:
            raise SchemaError("quantization with offloaded weights: choose one of them")
        if self.enforce_eager and self.compilation_config != CompilationConfig():
            raise SchemaError("compilation_config: has no effect unless enforce_eager is false")
        if not (self.pin_cpu_memory or self.offloads):
            raise SchemaError("pin_cpu_memory false: it is for enable_cpu_offload and the like")
        if self.worker_cls and ":" not in self.worker_cls:
            raise SchemaError(f"worker_cls {self.worker_cls!r}: name a WorkerBase, 'module:Class'")
        if self.parallel_config.vae_patch_parallel_size > 1:
            object.__setattr__(self, "vae_use_tiling", True)
        world = self.parallel_config.world_size
        if ":" in self.device and world > 1:
            raise SchemaError(
                f"device {self.device!r} for {world} ranks: use devices, one for each"
            )
        if self.device_numbers and len(self.device_numbers) < world:
            raise SchemaError(f"devices {self.device_numbers} for {world} ranks: one for each")
        ranks = self.parallel_config.tensor_parallel_size
        if self.kv.sinks and len(self.kv.sinks) != ranks:
            raise SchemaError(f"{len(self.kv.sinks)} kv.sinks for {ranks} tensor ranks: one each")
        if self.kv.sinks and self.parallel_config.world_size > ranks:
            raise SchemaError(
                "a stage that sends KV divides its heads alone: use tensor_parallel_size"
            )

    @property
    def has_attention_backend(self) -> bool:
        """Whether attention is computed by something else than torch's SDPA as it is."""
        return self.attention_backend not in ("", "auto", "TORCH_SDPA", "SDPA", "native")

    @property
    def offloads(self) -> bool:
        """Whether weights are in host memory while they are not used."""
        return self.enable_cpu_offload or self.enable_layerwise_offload

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of torch."""
        return _DTYPES[self.dtype]

    @property
    def torch_vae_dtype(self) -> torch.dtype | None:
        """The autoencoder's dtype of torch; None for the published one."""
        return _DTYPES.get(self.vae_dtype)

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

    request_batch_max_wait_ms: Annotated[float, Number(0)] = (
        0.0  # that a first request may wait for a full batch
    )
    step_execution: bool = False  # requests begin and end between denoising steps
    max_concurrent_batches: Degree = 1  # sent to the workers before the first has ended
    cache_backend: str = "none"  # or the name of a `CacheBackend`
    # of the `CacheBackend`, which checks it
    cache_config: Annotated[dict[str, Any], MapOf(Json())] = field(default_factory=dict)
    vae_use_slicing: bool = False  # the autoencoder decodes one image at a time; diffusers only

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_attention_backend and self.parallel_config.ring_degree > 1:
            text = f"attention_backend {self.attention_backend!r} with ring_degree"
            raise SchemaError(f"{text}: a ring merges blocks by itself; set ulysses_degree")
        if self.step_execution and self.max_concurrent_batches > 1:
            text = f"max_concurrent_batches {self.max_concurrent_batches} with step_execution"
            raise SchemaError(f"{text}: a step begins when the one before has ended; set 1")
        if self.step_execution and self.request_batch_max_wait_ms:
            text = f"request_batch_max_wait_ms {self.request_batch_max_wait_ms} with step_execution"
            raise SchemaError(f"{text}: a request joins those that run at their next step; set 0")
        if self.step_execution and self.cache_backend != "none":
            text = f"cache_backend {self.cache_backend!r} with step_execution: it compares steps of"
            raise SchemaError(f'{text} one batch, from its first to its last; set "none"')


@dataclasses.dataclass(frozen=True)
class OmniARConfig(StageConfig):
    """An AR stage."""

    stage: str = "ar"
    num_blocks: Degree = 1024  # of the paged KV pool
    block_size: Degree = 16  # tokens in each block
    think: bool = False  # let the model write a plan first, which becomes part of the prompt
    max_num_batched_tokens: Degree = 2048  # of all texts in one step
    enable_chunked_prefill: bool = True  # divide a text that is longer
    enable_prefix_caching: bool = False  # share blocks of equal leading texts
    kv_transfer: KVTransferConfig | None = None  # prefill and decode apart

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SchemaError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} for max_num_seqs "
                f"{self.max_num_seqs}: one token for each request, or more"
            )
        if self.parallel_config.world_size > self.parallel_config.tensor_parallel_size:
            raise SchemaError("an AR stage divides its heads alone: use tensor_parallel_size")
        if (degree := self.parallel_config.vae_patch_parallel_size) > 1:
            raise SchemaError(
                f"vae_patch_parallel_size {degree}: an AR stage decodes no image; leave it out"
            )
        if self.kv_transfer is not None and self.parallel_config.world_size > 1:
            raise SchemaError("kv_transfer: a stage with it has one rank, not several")
        if self.kv_transfer is not None and self.kv_transfer.is_producer and self.kv.sinks:
            raise SchemaError("a kv_producer reads prompts for a kv_consumer: leave kv.sinks out")
        if self.kv_transfer is not None and self.lora_config.lora_path:
            raise SchemaError("kv_transfer with lora_path: stages compare no adapters; one of them")
