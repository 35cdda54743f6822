"""The denoising loop: from noise to a latent, over the three contexts of a request."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cache import BagelContexts
from .model import BagelModel
from .sampling import DenoiseParams, guide, schedule

OnStep = Callable[[int, int], None]


def denoise_rows(
    model: BagelModel,
    contexts: BagelContexts,
    markers: Tensor,
    noise: Tensor,
    grid: tuple[int, int],
    params: DenoiseParams,
    on_step: OnStep | None = None,
) -> Tensor:
    """Integrates the flow from noise [h * w, patch_dim] to the latent's rows, float32.

    The three caches are read, never changed.

    Args:
        markers: the rows [2, hidden] before and after the latent rows.
        grid: h and w.
        on_step: called after each step with (steps done, steps in all).
    """
    x = noise.to(model.device, torch.float32)
    times, spans = schedule(params)
    for step, (t, span) in enumerate(zip(times, spans, strict=True)):
        rows = model.latent_rows(x, *grid, t[None].to(model.device))
        block = torch.cat([markers[:1], rows, markers[1:]])
        flow = _flow(model, contexts, block, params, guided=params.guided_at(t))
        # The product has the flow's dtype, x stays float32.
        x = x - flow * span.to(model.device)
        if on_step is not None:
            on_step(step + 1, params.num_steps)
    return x


def _flow(
    model: BagelModel, contexts: BagelContexts, x: Tensor, params: DenoiseParams, *, guided: bool
) -> Tensor:
    flow = model.velocity(contexts.gen, x)
    if not (guided and params.needs_cfg_text):
        return flow
    text = model.velocity(contexts.cfg_text, x)
    image = model.velocity(contexts.cfg_img, x) if params.needs_cfg_img else None
    return guide(flow, text, image, params)
