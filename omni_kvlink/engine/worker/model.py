"""`ModelUtility`: what the engine must know of a model, and the table of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from omni_kvlink.engine.config import OmniDiffusionConfig, StageConfig, load_class
from omni_kvlink.engine.parallel.process_group import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import torch

    from omni_kvlink import KVPayload
    from omni_kvlink.engine.kv.block_manager import KVPools
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest

_MODELS = {"bagel": "omni_kvlink.engine.models.bagel:BagelUtility"}
"""Models by name, as "module:Class"; imported when a configuration names them."""

PrefillSteps: TypeAlias = "Generator[Any, Any, DiffusionOutput]"
"""See `ModelUtility.prefill_steps`."""


class DiffusionPipeline(Protocol):
    """A model that generates images for requests."""

    supports_request_batch: bool  # `forward` takes a whole batch in one pass

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One output for each request, in their order; a request's error is in its own output.

        A request whose KV comes from the stage before has it as `past_key_values`.
        """


class ModelUtility(ABC):
    """A loaded model, and the conversions between its own cache and the schema's."""

    branches: ClassVar[tuple[str, ...]] = ()
    """Guidance branches, in the order in which ranks get them; empty if one rank computes all."""

    def __init__(
        self, config: StageConfig, device: torch.device, process_group: ProcessGroup | None = None
    ):
        self.config, self.device = config, device
        self.process_group = process_group or ProcessGroup()
        if not self.process_group.is_alone and not self.branches:
            name = type(self).__name__
            raise ValueError(f"{name} does not divide its work: use data_parallel_size alone")

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

    @abstractmethod
    def convert(self, payload: KVPayload, request: OmniDiffusionRequest) -> Any:
        """A received KV in the model's form, its tensors shared; SchemaError if it does not fit.

        Sets those sampling params of the request that came with the KV.
        """

    @abstractmethod
    def extract(self, request: OmniDiffusionRequest) -> KVPayload:
        """The KV of a request that has run, `request.past_key_values`, in the schema's form.

        A `KVCacheTransferData`, or a `KVCacheBundle` of those if there are several contexts. The
        tensors are the model's own; `block_ids` is empty if they are dense.
        """

    @abstractmethod
    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The most tokens that a prompt can put into each branch of its cache."""

    @abstractmethod
    def kv_row(self) -> tuple[int, tuple[int, ...]]:
        """Layers of the cache, and the shape of one token in each, on this rank."""

    def kv_heads(self) -> int:
        """KV heads of the whole model; 1 for latents."""
        _, row = self.kv_row()
        return row[0] if len(row) == 2 else 1

    @abstractmethod
    def prefill_steps(
        self, request: OmniDiffusionRequest, pools: KVPools, block_ids: Mapping[str, list[int]]
    ) -> PrefillSteps:
        """Read a prompt into blocks, step by step, and set `request.past_key_values`.

        The generator yields None between two parts of the prompt, or a pass that `advance` can run
        together with those of other requests, and whose result is sent to it. Its value is the
        request's output; `extract` then reads the KV.
        """

    def advance(self, passes: Sequence[Any]) -> list[Any]:
        """Run one pass of several requests together; returns a result for each."""
        raise NotImplementedError(f"the steps of {type(self).__name__} yield None alone")


def model_utility(config: StageConfig) -> type[ModelUtility]:
    """The class of a stage's model; no weights are loaded."""
    found = load_class("model", config.model_class_name, _MODELS)
    if not (isinstance(found, type) and issubclass(found, ModelUtility)):
        raise ValueError(f"model_class_name {config.model_class_name} is no ModelUtility")
    return found


def register_model(name: str, target: str) -> None:
    """Add a model: `target` is "module:Class" of a `ModelUtility`."""
    _MODELS[name] = target


def refuse_pipeline_settings(config: OmniDiffusionConfig) -> None:
    """Raises ValueError if a setting of diffusers' pipelines is used, which has no effect here."""
    used = {
        "attention_backend": config.attention_backend not in ("", "auto", "TORCH_SDPA", "SDPA"),
        "vae_use_tiling": config.vae_use_tiling,
        "enable_cpu_offload": config.enable_cpu_offload,
    }
    if names := ", ".join(name for name, value in used.items() if value):
        raise ValueError(f"{names}: for pipelines of diffusers alone; leave it out")
