"""Worker classes of one's own, which tests name as `worker_cls`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.worker import GPUARWorker, GPUDiffusionWorker
from omni_kvlink.models.bagel import Tiling

if TYPE_CHECKING:
    from omni_kvlink.engine import OmniDiffusionRequest
    from omni_kvlink.engine.outputs import BatchRunnerOutput


class CountingWorker(GPUDiffusionWorker):
    """Counts the requests that it has run."""

    count = 0

    def execute_model(self, requests: list[OmniDiffusionRequest]) -> BatchRunnerOutput:
        self.count += len(requests)
        return super().execute_model(requests)

    def requests_run(self) -> tuple[int, int, int]:
        """This worker's process and rank, and the number of requests."""
        return os.getpid(), self.rank, self.count


class TilingWorker(GPUDiffusionWorker):
    """Decodes images of more than 16 pixels a side in tiles, and counts those."""

    tiles = 0

    def init_device(self) -> None:
        super().init_device()
        autoencoder = self.runner.pipeline.autoencoder
        # The stage's setting has taken effect: it is replaced by one for small images.
        assert autoencoder._tiling == Tiling()
        autoencoder.enable_tiling(Tiling(16))
        autoencoder.decoder.register_forward_pre_hook(self._count)

    def tiles_decoded(self) -> tuple[int, int]:
        """This worker's rank, and the number of tiles."""
        return self.rank, self.tiles

    def _count(self, *_: Any) -> None:
        self.tiles += 1


class NamedARWorker(GPUARWorker):
    """Has a name."""

    def worker_name(self) -> str:
        return f"{type(self).__name__} {self.rank}"


class NoWorker:
    """Something else."""
