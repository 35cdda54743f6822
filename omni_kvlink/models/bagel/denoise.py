"""The denoising loop: from noise to a latent, over the three contexts of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omni_kvlink.models.bagel.sampling import DenoiseParams, guide, schedule

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.cache import BagelContexts
    from omni_kvlink.models.bagel.hooks import DenoiseHooks
    from omni_kvlink.models.bagel.model import BagelModel

OnStep = Callable[[int, int], None]
"""Called after each step with (steps done, all steps)."""


def denoise_rows(
    model: BagelModel,
    contexts: Sequence[BagelContexts],
    markers: Tensor,
    noise: Sequence[Tensor],
    grid: tuple[int, int],
    params: DenoiseParams,
    on_step: OnStep | None = None,
    *,
    hooks: DenoiseHooks,
) -> list[Tensor]:
    """Integrate the flow from noise [h * w, patch_dim] to each latent's rows, float32.

    The caches are only read. Several requests run through the model in one batch. `markers` are the
    rows [2, hidden] before and after the latent rows, `grid` is h and w.
    """
    alone = len(contexts) == 1
    x = noise[0] if alone else torch.stack([own.to(model.device) for own in noise], dim=1)
    x = x.to(model.device, torch.float32)
    ends = markers if alone else markers[:, None].expand(-1, len(contexts), -1)
    times, spans = schedule(params)
    for step, (t, span) in enumerate(zip(times, spans, strict=True)):
        rows = model.latent_rows(x, *grid, t[None].to(model.device))
        block = torch.cat([ends[:1], rows, ends[1:]])
        branches = params.branches(guided=params.guided_at(t))
        flows = _flows(model, contexts, block, branches, step, hooks)
        # The product has the flow's dtype, x stays float32.
        flow = _guided(flows, params, alone=alone)
        x = x - flow * span.to(model.device)
        if hooks.on_clean is not None:
            clean = x - flow * (t - span).to(model.device)
            hooks.on_clean(step + 1, [clean] if alone else list(clean.unbind(dim=1)))
        if on_step is not None:
            on_step(step + 1, params.num_steps)
    return [x] if alone else list(x.unbind(dim=1))


def _flows(
    model: BagelModel,
    contexts: Sequence[BagelContexts],
    block: Tensor,
    branches: Sequence[str],
    step: int,
    hooks: DenoiseHooks,
) -> dict[str, Tensor]:
    """Return the flow of every branch, computed or returned by a hook."""

    def whole_pass(branch: str) -> Tensor:
        own = [getattr(one, branch) for one in contexts]
        through = None if hooks.layers is None else partial(hooks.layers, branch, step)
        return model.velocity(own, block, through)

    def compute(branch: str) -> Tensor:
        if hooks.velocity is None:
            return whole_pass(branch)
        return hooks.velocity(branch, step, block, partial(whole_pass, branch))

    if hooks.branches is not None:
        shape = (len(block) - 2, *block.shape[1:-1], model.config.patch_dim)
        like = torch.empty(shape, dtype=model.dtype, device=model.device)
        return hooks.branches(branches, compute, like)
    return {branch: compute(branch) for branch in branches}


def _guided(flows: dict[str, Tensor], params: DenoiseParams, *, alone: bool) -> Tensor:
    """Combine the flows of all branches; norms are computed per request."""
    flow, text, image = (flows.get(branch) for branch in ("gen", "cfg_text", "cfg_img"))
    assert flow is not None
    if text is None:
        return flow
    if alone:
        return guide(flow, text, image, params)
    own = [
        guide(flow[:, i], text[:, i], None if image is None else image[:, i], params)
        for i in range(flow.shape[1])
    ]
    return torch.stack(own, dim=1)
