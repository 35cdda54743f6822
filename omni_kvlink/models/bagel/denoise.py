"""The denoising loop: from noise to a latent, over the three contexts of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omni_kvlink.models.bagel.sampling import BRANCHES, DenoiseParams, guide, schedule

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.cache import BagelContexts
    from omni_kvlink.models.bagel.hooks import DenoiseHooks
    from omni_kvlink.models.bagel.model import BagelModel

OnStep = Callable[[int, int], None]
"""Called after each step with (steps done, all steps)."""


class DenoiseState:
    """An image between two denoising steps, on the device of its noise.

    Attributes:
        contexts: only read.
        grid: height and width in latent tokens.
        rows: the latent's rows [h * w, patch_dim], float32.
        step: number of steps done.
    """

    def __init__(
        self,
        contexts: BagelContexts,
        noise: Tensor,
        grid: tuple[int, int],
        params: DenoiseParams,
    ) -> None:
        self.contexts, self.grid, self.params = contexts, grid, params
        self.rows, self.step = noise.to(torch.float32), 0
        self._times, self._spans = schedule(params)

    @property
    def time(self) -> Tensor:
        """The time of the next step, 0-dim float32 on the CPU."""
        return self._times[self.step]

    @property
    def branches(self) -> list[str]:
        """The contexts that the next step reads."""
        return self.params.branches(guided=self.params.guided_at(self.time))

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.params.num_steps

    def clean(self, flow: Tensor) -> Tensor:
        """The rows that the latent would end at if the flow [h * w, patch_dim] went straight on."""
        return self.rows - flow * self.time.to(flow.device)

    def integrate(self, flow: Tensor) -> None:
        """Take the next step, along a flow [h * w, patch_dim]."""
        # The product has the flow's dtype, the rows stay float32.
        self.rows = self.rows - flow * self._spans[self.step].to(flow.device)
        self.step += 1


def guided_flows(
    model: BagelModel, states: Sequence[DenoiseState], markers: Tensor, *, hooks: DenoiseHooks
) -> list[Tensor]:
    """Return the guided flow [h * w, patch_dim] of each image at its own time; changes no state.

    All images have one grid. A branch is one pass through the model over the images that read it.
    `markers` are the rows [2, hidden] before and after the latent rows.
    """
    block = _block(model, states, markers)
    readers: dict[str, list[int]] = {}
    for branch in BRANCHES:
        if indices := [i for i, state in enumerate(states) if branch in state.branches]:
            readers[branch] = indices
    flows = _flows(model, states, block, readers, hooks)
    return [
        _guided({branch: flows[branch, i] for branch in state.branches}, state.params)
        for i, state in enumerate(states)
    ]


def _block(model: BagelModel, states: Sequence[DenoiseState], markers: Tensor) -> Tensor:
    """Return the decoder's input: marker, latent rows and marker; several images at dim 1."""
    is_single = len(states) == 1
    x = states[0].rows if is_single else torch.stack([state.rows for state in states], dim=1)
    times = torch.stack([state.time for state in states])
    if bool((times == times[0]).all()):  # one embedding for all of them
        times = times[:1]
    rows = model.latent_rows(x, *states[0].grid, times.to(model.device))
    ends = markers if is_single else markers[:, None].expand(-1, len(states), -1)
    return torch.cat([ends[:1], rows, ends[1:]])


def _flows(
    model: BagelModel,
    states: Sequence[DenoiseState],
    block: Tensor,
    readers: dict[str, list[int]],
    hooks: DenoiseHooks,
) -> dict[tuple[str, int], Tensor]:
    """Return the flow of every branch and image, computed or returned by a hook."""

    def rows_of(branch: str) -> Tensor:
        indices = readers[branch]
        if len(indices) == len(states):
            return block
        return block[:, indices[0]] if len(indices) == 1 else block[:, indices]

    def compute(branch: str) -> Tensor:
        contexts = [getattr(states[i].contexts, branch) for i in readers[branch]]
        through = None if hooks.layers is None else partial(hooks.layers, branch, states[0].step)
        return model.velocity(contexts, rows_of(branch), through)

    def empty(branch: str) -> Tensor:
        batch = rows_of(branch).shape[1:-1]
        shape = (len(block) - 2, *batch, model.config.patch_dim)
        return torch.empty(shape, dtype=model.dtype, device=model.device)

    if hooks.branches is not None:
        flows = hooks.branches(list(readers), compute, empty)
    else:
        flows = {branch: compute(branch) for branch in readers}
    return {
        (branch, i): flows[branch] if len(indices) == 1 else flows[branch][:, column]
        for branch, indices in readers.items()
        for column, i in enumerate(indices)
    }


def _guided(flows: dict[str, Tensor], params: DenoiseParams) -> Tensor:
    """Combine an image's flows [h * w, patch_dim] of all branches."""
    flow, text, image = flows["gen"], flows.get("cfg_text"), flows.get("cfg_img")
    return flow if text is None else guide(flow, text, image, params)
