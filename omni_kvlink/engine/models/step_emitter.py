"""`StepEmitter`: reports the denoising steps of a batch of BAGEL, with previews."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_kvlink.engine.tokens.events import StepEvent
from omni_kvlink.models.bagel.image_maker import decode_preview

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.models.bagel.pipeline import BagelPipeline


class StepEmitter:
    """Emits a `StepEvent` for each streamed request of a batch after each step.

    `on_clean` is the pipeline's hook of that name. `requests` are in the order of the batch's rows,
    each with its number of images.
    """

    def __init__(
        self, pipeline: BagelPipeline, requests: Sequence[OmniDiffusionRequest], total: int
    ):
        self._pipeline, self._requests, self._total = pipeline, requests, total

    @property
    def is_needed(self) -> bool:
        """Whether a request of the batch is streamed from here."""
        return any(map(_is_streamed, self._requests))

    def on_clean(self, done: int, rows: list[Tensor]) -> None:
        """Emit a step; `rows` are those of the images if the flow went straight on."""
        queue = iter(rows)
        for request in self._requests:
            latents = [next(queue) for _ in range(request.sampling_params.num_outputs_per_prompt)]
            if not _is_streamed(request):
                continue
            interval = request.sampling_params.preview_interval
            is_shown = interval and (done % interval == 0 or done == self._total)
            shape = request.past_key_values.image_shape
            shown = [decode_preview(self._pipeline, row, shape) for row in latents if is_shown]
            preview = torch.stack(shown) if shown else None
            request.emit(StepEvent(request.request_id, done, self._total, preview))


def _is_streamed(request: OmniDiffusionRequest) -> bool:
    return request.sampling_params.stream and request.emit is not None
