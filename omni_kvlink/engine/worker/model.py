"""`ModelUtility`: what the engine must know of a model, and the table of models."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from omni_kvlink.engine.config import OmniARConfig, StageConfig, load_class
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.worker.prefill_utility import PrefillUtility
from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from omni_kvlink import KVPayload
    from omni_kvlink.engine.lora.adapter import LoRATargets
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
    from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams

_MODELS = {"bagel": "omni_kvlink.engine.models.bagel:BagelUtility"}
"""Models by name, as "module:Class"; imported when a configuration names them."""
_OF_ANY_MODEL = {"seed", "generator", "stream", "lora_request", "lora_int_id", "lora_scale"}
"""Sampling params that the engine itself uses or refuses."""


class DiffusionPipeline(Protocol):
    """A model that generates images for requests."""

    supports_request_batch: bool  # `forward` takes a whole batch in one pass

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One output for each request, in their order; a request's error is in its own output.

        A request whose KV comes from the stage before has it as `past_key_values`.
        """


class ModelUtility(PrefillUtility, ABC):
    """A loaded model, and the conversions between its own cache and the schema's.

    What handles KV is defined where a stage has KV: `kv_row`, and `count_tokens`, `prefill_steps`
    and `extract` in an AR stage, `convert` in a stage that receives it. ValueError if one is
    missing, when the stage starts.
    """

    branches: ClassVar[tuple[str, ...]] = ()
    """Guidance branches, in the order in which ranks get them; empty if one rank computes all. With
    branches, the pipeline has `hooks` with the fields of `RankHooks`."""
    supports_tp: ClassVar[bool] = False
    """Whether ranks can divide the heads, in each kind of stage: `tensor_parallel_size`."""
    supports_sp: ClassVar[bool] = False
    """Whether ranks can divide the rows of an image: `ulysses_degree`, `ring_degree`."""
    supports_pp: ClassVar[bool] = False
    """Whether ranks can divide the layers: `pipeline_parallel_size`."""
    supports_vae_patch_parallel: ClassVar[bool] = False
    """Whether ranks can divide the tiles of an image: `vae_patch_parallel_size`."""
    supports_attention_backend: ClassVar[bool] = False
    """Whether it computes attention by `attention_backend`."""

    def __init__(
        self, config: StageConfig, device: torch.device, process_group: ProcessGroup | None = None
    ):
        self.config, self.device = config, device
        self.process_group = process_group or ProcessGroup()
        self._check_kv_methods()
        if not self.process_group.is_alone and not self.branches:
            name = type(self).__name__
            raise ValueError(f"{name} does not divide its work: use data_parallel_size alone")
        if config.has_attention_backend and not self.supports_attention_backend:
            text = f"attention_backend {config.attention_backend!r}: {type(self).__name__}"
            raise ValueError(f"{text} does not support it, leave it out")
        parallel = self.process_group.parallel
        for supported, degree in (
            (self.supports_tp, "tensor_parallel_size"),
            (self.supports_sp, "sequence_parallel_size"),
            (self.supports_pp, "pipeline_parallel_size"),
            (self.supports_vae_patch_parallel, "vae_patch_parallel_size"),
        ):
            if (value := getattr(parallel, degree)) > 1 and not supported:
                raise ValueError(f"{degree} {value}: {type(self).__name__} does not support it")
        rank, ranks = self.process_group.coords.guidance, parallel.cfg_parallel_size
        if ranks > max(1, len(self.branches)):
            name, count = type(self).__name__, len(self.branches)
            raise ValueError(f"cfg_parallel_size {ranks}: {name} has {count} guidance branches")
        self.own_branches = self.branches[rank::ranks]
        """The guidance branches that this rank computes, and whose KV it receives."""

    @staticmethod
    @abstractmethod
    def prepare(request: OmniDiffusionRequest) -> None:
        """Set the params that a request leaves open, before it is queued; needs no weights."""

    @property
    @abstractmethod
    def pipeline(self) -> Any:
        """The loaded model; a `DiffusionPipeline` in a diffusion stage."""

    @abstractmethod
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The networks by name: what `sleep` takes out of memory, and `wake_up` brings back."""

    @abstractmethod
    def reload(self) -> None:
        """Read the weights from the checkpoint again, into the existing modules."""

    def compile(self, **options: Any) -> None:
        """Compile the repeated layers with `torch.compile(..., **options)`, at their first call."""
        name = type(self).__name__
        raise ValueError(f"{name} has no layers to compile: leave enforce_eager true")

    def warm_up(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Run what this stage does once for images of these sizes, each height and width."""
        raise ValueError(f"{type(self).__name__} has no warm-up: leave warmup_sizes empty")

    def encoders_and_decoders(self) -> Sequence[torch.nn.Module]:
        """The networks for `enable_cpu_offload`, which `forward` alone uses."""
        raise ValueError(f"{type(self).__name__} has no part for enable_cpu_offload: leave it out")

    def layers(self) -> Sequence[torch.nn.Module]:
        """The repeated layers, in the order in which `forward` is called.

        They are what `enable_layerwise_offload` moves and `quantization` makes smaller.
        """
        name, text = type(self).__name__, "leave out enable_layerwise_offload and quantization"
        raise ValueError(f"{name} has no layers for them: {text}")

    def lora_targets(self) -> LoRATargets | None:
        """The layers that LoRA adapters may change; None if the model takes no adapters."""
        return None

    def convert(self, payload: KVPayload, request: OmniDiffusionRequest) -> Any:
        """A received KV in the model's form, its tensors shared; SchemaError if it does not fit.

        Sets those sampling params of the request that came with the KV.
        """
        raise NotImplementedError(f"{type(self).__name__} has no convert")

    def extract(self, request: OmniDiffusionRequest) -> KVPayload:
        """The KV of a request that has run, `request.past_key_values`, in the schema's form.

        A `KVCacheTransferData`, or a `KVCacheBundle` of those if there are several contexts. The
        tensors are the model's own; `block_ids` is empty if they are dense.
        """
        raise NotImplementedError(f"{type(self).__name__} has no extract")

    def _check_kv_methods(self) -> None:
        """Raises ValueError if the model lacks a method that this stage's KV needs."""
        config, needed = self.config, dict[str, str]()
        if config.kv.sources:
            needed |= dict.fromkeys(("kv_row", "convert"), "receives KV")
        if config.kv.sinks:
            needed |= dict.fromkeys(("kv_row", "extract"), "sends KV")
        if isinstance(config, OmniARConfig):
            needed |= dict.fromkeys(("kv_row", "count_tokens", "prefill_steps"), "reads prompts")
        for method, purpose in needed.items():
            if getattr(type(self), method) is getattr(ModelUtility, method):
                name = type(self).__name__
                raise ValueError(f"{name} has no {method}, and this stage {purpose}: define it")


def model_utility(config: StageConfig) -> type[ModelUtility]:
    """The class of a stage's model; no weights are loaded. ValueError if it is no model."""
    try:
        named_class = load_class("model", config.model_class_name, _MODELS)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"model_class_name {config.model_class_name}: {error}") from error
    if not (isinstance(named_class, type) and issubclass(named_class, ModelUtility)):
        raise ValueError(f"model_class_name {config.model_class_name} is no ModelUtility")
    return named_class


def register_model(name: str, target: str) -> None:
    """Add a model: `target` is "module:Class" of a `ModelUtility`."""
    _MODELS[name] = target


def refuse_params(params: OmniDiffusionSamplingParams, supported: Set[str]) -> None:
    """Raises SchemaError if a param is set that is not among those a model supports, by name.

    The seed, streams and LoRA adapters are the engine's own.
    """
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name in supported | _OF_ANY_MODEL or value is field.default:
            continue
        if isinstance(value, torch.Tensor) or value != field.default:
            names = ", ".join(sorted(supported))
            raise SchemaError(f"{field.name} {value!r:.60}: this model supports {names}; remove it")
