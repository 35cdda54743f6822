"""Callbacks of an engine in the denoising loop, to reuse work or to distribute it.

Flows and rows have their row dimension first; in a batch, the requests' dimension second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

RunLayers: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""Runs rows through the decoder's layers `start` to `stop`: `run(x, start, stop)`."""

LayersHook: TypeAlias = Callable[[str, int, Tensor, RunLayers, int], Tensor]
"""`hook(branch, step, rows, run, count)` returns the rows after the last of `count` layers, all,
some or none of which are run. `rows` is the input: marker, latent rows and marker."""

BranchesHook: TypeAlias = Callable[
    [Sequence[str], Callable[[str], Tensor], Callable[[str], Tensor]], dict[str, Tensor]
]
"""`hook(branches, compute, empty)` returns the flows of all branches, each computed here by
`compute(branch)` or by another rank. `empty(branch)` allocates a branch's flow."""

TilesHook: TypeAlias = Callable[
    [Sequence[tuple[int, int]], Callable[[int], Tensor]], list[Tensor] | None
]
"""`hook(shapes, compute)` returns all tiles of an image, [n, c, height, width] of these shapes,
each computed here by `compute(index)` or by another rank; None where another rank has the image."""

SyncErrorsHook: TypeAlias = Callable[[Mapping[str, Exception]], Mapping[str, Exception]]
"""Takes the errors of this rank by request id; returns those of all ranks."""


CleanHook: TypeAlias = Callable[[int, list[Tensor]], None]
"""`hook(done, rows)` is called after each step with the rows [h * w, patch_dim] of each request
that the latents would end at if the flow went straight on; after the last one, the latents'."""


@dataclass(slots=True)
class DenoiseHooks:
    """An engine's callbacks, and whether latents are `decode`d to images here.

    Where ranks divide the `tiles` of an image, all of them decode.
    """

    layers: LayersHook | None = None
    branches: BranchesHook | None = None
    sync_errors: SyncErrorsHook | None = None
    on_clean: CleanHook | None = None
    tiles: TilesHook | None = None
    decode: bool = True
