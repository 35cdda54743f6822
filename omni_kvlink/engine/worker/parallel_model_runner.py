"""`ParallelDiffusionModelRunner`: a diffusion model on several ranks that share each batch."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.guidance import RankHooks, SharedBranches
from omni_kvlink.engine.parallel.tiles import SharedTiles
from omni_kvlink.engine.worker.gpu_diffusion_model_runner import GPUDiffusionModelRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from omni_kvlink.engine.config import OmniDiffusionConfig
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.parallel.process_group import ProcessGroup
    from omni_kvlink.engine.request import OmniDiffusionRequest


class ParallelDiffusionModelRunner(GPUDiffusionModelRunner):
    """One rank of a group that generates images together, which its leader has.

    All ranks are given the same batches in the same order. An error on one of them is the request's
    error on all; an abort takes effect on all at the same step. EngineDeadError: a rank is gone.
    """

    def __init__(
        self, config: OmniDiffusionConfig, device: torch.device, process_group: ProcessGroup
    ):
        self._batch_sync = BatchSync(process_group)
        super().__init__(config, device, process_group)

    def abort(self, request_id: str) -> None:
        """Propose to end a running request; the ranks agree on it at their next step."""
        self._batch_sync.abort(request_id)

    def _load_model(self) -> None:
        super()._load_model()
        share_passes(self.pipeline, self.utility.branches, self.process_group, self._batch_sync)

    def _begin(self, requests: Sequence[OmniDiffusionRequest]) -> None:
        self._batch_sync.begin([request.request_id for request in requests])
        for request in requests:
            if request.is_cancelled():  # it was aborted before it came here
                self.abort(request.request_id)
            request.is_cancelled = partial(self._batch_sync.is_cancelled, request.request_id)

    def _all_errors(self, errors: dict[str, Exception]) -> dict[str, Exception]:
        return self._batch_sync.sync_errors(errors)

    def _end(
        self, requests: Sequence[OmniDiffusionRequest], outputs: dict[str, DiffusionOutput]
    ) -> None:
        """Fail on this rank what failed on another."""
        local_errors = {
            key: output.error for key, output in outputs.items() if output.error is not None
        }
        errors = self._batch_sync.end(local_errors)
        for request in requests:
            key = request.request_id
            if key in errors and key not in local_errors:
                outputs[key] = self._failed(request, errors[key])


def share_passes(
    pipeline: Any, branches: Sequence[str], process_group: ProcessGroup, sync: BatchSync
) -> None:
    """Let a pipeline compute each pass with the other ranks; the leader has the images.

    Raises ValueError if the pipeline has no `hooks` with the fields of `RankHooks`.
    """
    hooks: Any = getattr(pipeline, "hooks", None)
    if missing := [field.name for field in fields(RankHooks) if not hasattr(hooks, field.name)]:
        raise ValueError(
            f"{type(pipeline).__name__}: hooks without {', '.join(missing)}, and several ranks "
            "share its passes: give it `hooks`, a RankHooks, or use data_parallel_size alone"
        )
    hooks.branches = SharedBranches(branches, process_group, sync)
    hooks.sync_errors, hooks.decode = sync.sync_errors, process_group.coords.is_leader
    if process_group.parallel.vae_patch_parallel_size > 1:
        hooks.tiles = SharedTiles(process_group, sync)
