"""Where an engine may step into the denoising loop: to reuse work, or to share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

RunLayers: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""Rows through the layers `start` to `stop` of the decoder: `run(x, start, stop)`."""


class VelocityHook(Protocol):
    def __call__(
        self, branch: str, step: int, rows: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """The flow of a branch ("gen", "cfg_text", "cfg_img") at a step: computed, or reused.

        Args:
            rows: what goes into the decoder, marker, latent rows and marker.
            compute: the flow [n, patch_dim], by a whole pass.
        """


class LayersHook(Protocol):
    def __call__(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """The rows behind the last of `count` layers: all run, or some of them reused."""


class BranchesHook(Protocol):
    def __call__(
        self, branches: Sequence[str], compute: Callable[[str], Tensor], like: Tensor
    ) -> dict[str, Tensor]:
        """The flows of all branches: each computed here, or by another rank.

        Args:
            like: of the form of a flow.
        """


class SettleHook(Protocol):
    def __call__(self, errors: Mapping[str, Exception]) -> Mapping[str, Exception]:
        """Errors of requests, by id: those of this rank in, those of all ranks out."""


@dataclass
class DenoiseHooks:
    """Untouched: each step computes each branch with every layer, and latents become images.

    Flows and rows have their row dimension first; of a batch, the requests' dimension second.
    """

    velocity: VelocityHook | None = None
    layers: LayersHook | None = None
    branches: BranchesHook | None = None
    settle: SettleHook | None = None
    decode: bool = True
