"""Worker classes of one's own, which tests name as `worker_cls`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omni_kvlink.engine.worker import GPUARWorker, GPUDiffusionWorker

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


class NamedARWorker(GPUARWorker):
    """Has a name."""

    def worker_name(self) -> str:
        return f"{type(self).__name__} {self.rank}"


class NoWorker:
    """Something else."""
