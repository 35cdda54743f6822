"""Callbacks of an engine in the denoising loop, to reuse work or to distribute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

RunLayers: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""Runs rows through the decoder's layers `start` to `stop`: `run(x, start, stop)`."""


class VelocityHook(Protocol):
    """Wraps the computation of a flow."""

    def __call__(
        self, branch: str, step: int, rows: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return the flow of a branch at a step, computed or reused.

        Args:
            branch: "gen", "cfg_text" or "cfg_img".
            step: number of the step.
            rows: input of the decoder: marker, latent rows and marker.
            compute: computes the flow [n, patch_dim] by a whole pass.
        """


class LayersHook(Protocol):
    """Wraps the computation of the decoder's layers."""

    def __call__(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """Return the rows after the last of `count` layers; all of them are run, or some reused."""


class BranchesHook(Protocol):
    """Distributes branches over ranks."""

    def __call__(
        self, branches: Sequence[str], compute: Callable[[str], Tensor], like: Tensor
    ) -> dict[str, Tensor]:
        """Return the flows of all branches, each computed here or by another rank.

        Args:
            branches: their names.
            compute: computes the flow of one.
            like: a tensor with the shape, dtype and device of a flow.
        """


class SyncErrorsHook(Protocol):
    """Shares the errors of requests between ranks."""

    def __call__(self, errors: Mapping[str, Exception]) -> Mapping[str, Exception]:
        """Take the errors of this rank by request id; return those of all ranks."""


@dataclass
class DenoiseHooks:
    """Callbacks of an engine in the denoising loop; without any, every branch is computed in full.

    Flows and rows have their row dimension first; in a batch, the requests' dimension second.

    Attributes:
        velocity: wraps a branch's flow.
        layers: wraps a branch's decoder layers.
        branches: distributes branches over ranks.
        sync_errors: shares errors between ranks.
        decode: whether latents are decoded to images here.
    """

    velocity: VelocityHook | None = None
    layers: LayersHook | None = None
    branches: BranchesHook | None = None
    sync_errors: SyncErrorsHook | None = None
    decode: bool = True
