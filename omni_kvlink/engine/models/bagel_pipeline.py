"""The BAGEL pipeline as an engine runs it: requests and batches in, `DiffusionOutput`s out."""

from __future__ import annotations

from omni_kvlink.engine.models.bagel_requests import generate
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.models.bagel.cache import BagelContexts
from omni_kvlink.models.bagel.pipeline import BagelPipeline


class OmniBagelPipeline(BagelPipeline):
    """`BagelPipeline` with the engine's `forward`."""

    supports_request_batch = True

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """The images of a request, or of a batch in one pass; see `requests.generate`."""
        batch = req if isinstance(req, DiffusionRequestBatch) else DiffusionRequestBatch([req])
        outputs, self._last = generate(self, batch, self._read)
        return outputs

    def _read(self, request: OmniDiffusionRequest) -> BagelContexts:
        """The prompt of a request that no other stage has read."""
        wishes = request.sampling_params
        shape = None if wishes.height is None else (wishes.height, wishes.width or wishes.height)
        return self.prefill(request.prompt, image_shape=shape, generator=wishes.generator)
