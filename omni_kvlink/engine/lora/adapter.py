"""`LoRAAdapter`: an adapter's matrices, cut to a rank's part of a model, added to its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.header import join_names

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from omni_kvlink.engine.lora.adapter_files import AdapterFiles, LoRAMatrices
    from omni_kvlink.engine.lora.request import LoRARequest


@dataclasses.dataclass(frozen=True, eq=False)
class LoRATarget:
    """A linear layer that adapters may change; `shape` is (outputs, inputs) of the whole layer.

    `module` has the outputs `rows` of the inputs `columns`; it is None if this stage has no use for
    the layer.
    """

    module: nn.Module | None
    shape: tuple[int, ...]
    rows: slice = dataclasses.field(default_factory=partial(slice, None))
    columns: slice = dataclasses.field(default_factory=partial(slice, None))


@dataclasses.dataclass(frozen=True, eq=False)
class LoRATargets:
    """The linear layers of a model, by name; `roots` are prefixes that a file may leave out."""

    layers: Mapping[str, LoRATarget]
    device: torch.device
    roots: tuple[str, ...] = ()

    def find(self, name: str) -> str | None:
        """The layer's own name, or None if the model has no such layer."""
        names = (name, *(root + name for root in self.roots))
        return next((full_name for full_name in names if full_name in self.layers), None)


class LoRALayer(nn.Module):
    """The matrices for one layer, float32; a module, so that they sleep as other weights do."""

    def __init__(self, target: LoRATarget, matrices: LoRAMatrices, device: torch.device):
        super().__init__()
        assert target.module is not None
        self.scaling = matrices.scaling
        self._target = (target.module,)  # in a tuple: it is not a part of this module
        a, b = matrices.a[:, target.columns], matrices.b[target.rows]
        self.a = nn.Parameter(a.to(device, copy=True).contiguous(), requires_grad=False)
        self.b = nn.Parameter(b.to(device, copy=True).contiguous(), requires_grad=False)

    def attach(self, scale: float) -> RemovableHandle:
        """Add `scale` times the matrices' product to the layer's outputs, until it is removed."""
        hook = partial(self._added, self.scaling * scale)
        return self._target[0].register_forward_hook(hook)

    def _added(
        self, factor: float, _: nn.Module, inputs: tuple[Any, ...], output: Tensor
    ) -> Tensor:
        narrow = F.linear(inputs[0].to(self.a.dtype), self.a)
        return (output + F.linear(narrow, self.b) * factor).to(output.dtype)


class LoRAAdapter(nn.Module):
    """An adapter for one model; raises SchemaError if it does not fit the model's layers.

    Attributes:
        request: what named it.
        digest: of its matrices, the same on all ranks.
    """

    def __init__(self, request: LoRARequest, files: AdapterFiles, targets: LoRATargets):
        super().__init__()
        self.request, self.digest = request, files.digest
        layer_names = {name: targets.find(name) for name in files.layers}
        if unknown := [name for name, layer in layer_names.items() if layer is None]:
            raise SchemaError(
                f"adapter {request.lora_name!r} changes {len(unknown)} layers that are no linear "
                f"layers of the model: {join_names(sorted(unknown))}"
            )
        by_layer: dict[str, str] = {}
        for name, layer in layer_names.items():
            assert layer is not None
            if layer in by_layer:
                raise SchemaError(
                    f"adapter {request.lora_name!r} has {by_layer[layer]} and {name}, which are one"
                )
            by_layer[layer] = name
            self._check_shape(name, files.layers[name], targets.layers[layer])
        self.layers = nn.ModuleList(
            LoRALayer(targets.layers[layer], files.layers[name], targets.device)
            for layer, name in by_layer.items()
            if targets.layers[layer].module is not None
        )

    def attach(self, scale: float) -> list[RemovableHandle]:
        """Add it to the model's layers; the model is as before when the handles are removed."""
        return [layer.attach(scale) for layer in self.layers if isinstance(layer, LoRALayer)]

    def _check_shape(self, name: str, matrices: LoRAMatrices, target: LoRATarget) -> None:
        shape = (matrices.b.shape[0], matrices.a.shape[1])
        if shape != target.shape:
            raise SchemaError(
                f"adapter {self.request.lora_name!r}: {name} has {shape[0]} outputs and {shape[1]} "
                f"inputs, the model's layer {target.shape[0]} and {target.shape[1]}"
            )


@dataclasses.dataclass(frozen=True)
class ActiveLoRA:
    """An adapter, and how strongly it acts on a request's batch.

    Two are equal if they do the same, so that all ranks form the same groups of requests, also if
    one of them has loaded an adapter again meanwhile.
    """

    adapter: LoRAAdapter = dataclasses.field(compare=False)
    scale: float
    number: int
    digest: str

    @classmethod
    def of(cls, adapter: LoRAAdapter, scale: float) -> ActiveLoRA:
        """An adapter with a scale."""
        return cls(adapter, scale, adapter.request.lora_int_id, adapter.digest)

    @property
    def identity(self) -> dict[str, Any] | None:
        """The facts on which a KV computed with it depends, as JSON; None if it has no effect."""
        if not self.scale:
            return None
        name = self.adapter.request.lora_name
        return {"name": name, "id": self.number, "digest": self.digest, "scale": self.scale}


def identity_of(lora: ActiveLoRA | None) -> dict[str, Any] | None:
    """The identity of an adapter, or None without one."""
    return None if lora is None else lora.identity


def check_identity(identity: Any, lora: ActiveLoRA | None, request_id: str) -> None:
    """Raises SchemaError unless a request's KV was computed with its own adapter, or none.

    `identity` came with the KV, or None.
    """
    expected = identity_of(lora)
    if identity != expected:
        raise SchemaError(
            f"the KV of {request_id!r} was computed with {_text(identity)}, and its image is to be "
            f"generated with {_text(expected)}: give all stages the same adapter and lora_scale"
        )


def _text(identity: Any) -> str:
    if identity is None:
        return "no LoRA adapter"
    if not isinstance(identity, dict) or not {"name", "id", "digest", "scale"} <= identity.keys():
        return f"the adapter {identity!r:.100}"
    name, number, scale = identity["name"], identity["id"], identity["scale"]
    return f"adapter {name!r} (id {number}, scale {scale}, SHA-256 {str(identity['digest'])[:12]})"
