"""What the engine must know of a model: how to load it, and how its cache looks."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch

from omni_kvlink.engine.config import StageConfig
from omni_kvlink.engine.kv.block_manager import KVPools
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.link import Payload

_ROWS = {"bagel": "omni_kvlink.engine.models.bagel:BagelUtility"}


class DiffusionPipeline(Protocol):
    """A model that makes images of requests.

    Attributes:
        supports_request_batch: `forward` takes a whole batch in one pass.
    """

    supports_request_batch: bool

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One output for each request, in their order; one's error never touches another's.

        A request whose KV comes from the stage before carries it as `past_key_values`.
        """


class ModelUtility(ABC):
    """One model, loaded, with its cache's two forms: its own, and the schema's.

    Args:
        config: of the stage.
        device: where the weights go.
        mates: the ranks that this one works with, if there are any.

    Raises:
        ValueError: the model cannot be divided like this.
    """

    branches: ClassVar[tuple[str, ...]] = ()
    """Its guidance branches, as they are dealt to ranks; none if it runs on one rank alone."""

    def __init__(
        self, config: StageConfig, device: torch.device, mates: ProcessGroup | None = None
    ):
        self.config, self.device = config, device
        self.mates = ProcessGroup() if mates is None else mates
        if not self.mates.is_alone and not self.branches:
            raise ValueError(
                f"{type(self).__name__} does not divide its work: use data_parallel_size alone"
            )

    @staticmethod
    @abstractmethod
    def prepare(request: OmniDiffusionRequest) -> None:
        """Put the model's defaults where a request leaves a choice to it; again does nothing.

        Needs no weights: engines ask it before they compare requests.
        """

    @property
    @abstractmethod
    def pipeline(self) -> Any:
        """The loaded model; a `DiffusionPipeline` in a diffusion stage."""

    @abstractmethod
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The networks, by name: what `sleep` takes out of memory, and `wake_up` brings back."""

    @abstractmethod
    def reload(self) -> None:
        """Read the weights from the checkpoint again, into the modules that are there."""

    @abstractmethod
    def convert(self, payload: Payload, request: OmniDiffusionRequest) -> Any:
        """A received KV in the model's own form, its tensors shared; sets what came with it.

        Raises:
            SchemaError: it is not complete, or not this model's.
        """

    @abstractmethod
    def extract(self, request: OmniDiffusionRequest) -> Payload:
        """The KV of a request that has run, `request.past_key_values`, in the schema's form.

        A `KVCacheTransferData`, or a `KVCacheBundle` of those where there are several contexts;
        borrowed. Where the tensors are dense, `block_ids` is empty.
        """

    @abstractmethod
    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The most tokens that a prompt can put into each branch of its cache."""

    @abstractmethod
    def kv_row(self) -> tuple[int, tuple[int, ...]]:
        """Layers of the cache, and the shape of one token in each."""

    def kv_heads(self) -> int:
        """KV heads of the whole model, of which `kv_row` says those on this rank; 1 for latents."""
        _, row = self.kv_row()
        return row[0] if len(row) == 2 else 1

    @abstractmethod
    def prefill(
        self, request: OmniDiffusionRequest, pools: KVPools, block_ids: Mapping[str, list[int]]
    ) -> DiffusionOutput:
        """Read a prompt into blocks; `request.past_key_values` is then what `extract` wants."""


def model_utility(config: StageConfig) -> type[ModelUtility]:
    """The class that knows a stage's model; nothing is loaded.

    Raises:
        ValueError: there is no such model.
    """
    name = config.model_class_name
    target = _ROWS.get(name, name)
    module, separator, attribute = target.partition(":")
    if not separator:
        raise ValueError(f"no model {name!r}; there are {', '.join(_ROWS)}, or 'module:Class'")
    found: type[ModelUtility] = getattr(importlib.import_module(module), attribute)
    return found


def register_model(name: str, target: str) -> None:
    """Add a model: `target` is "module:Class" of a `ModelUtility`."""
    _ROWS[name] = target
