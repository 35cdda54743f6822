"""`OmniBagelPipeline`: the BAGEL pipeline with the interface of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.engine.models.bagel_requests import generate
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.models.bagel.pipeline import BagelPipeline

if TYPE_CHECKING:
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.models.bagel.cache import BagelContexts


class OmniBagelPipeline(BagelPipeline):
    """A `BagelPipeline` that is a `DiffusionPipeline`."""

    supports_request_batch = True

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Generate the images of a request, or of a batch in one pass; see `generate`."""
        batch = req if isinstance(req, DiffusionRequestBatch) else DiffusionRequestBatch([req])
        outputs, self._last = generate(self, batch, self._read)
        return outputs

    def _read(self, request: OmniDiffusionRequest) -> BagelContexts:
        """Read the prompt of a request that has no KV."""
        params = request.sampling_params
        shape = None if params.height is None else (params.height, params.width or params.height)
        return self.prefill(request.prompt, image_shape=shape, generator=params.generator)
