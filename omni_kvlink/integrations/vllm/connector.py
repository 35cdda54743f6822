"""`OmniKVLinkConnector`: vLLM's connector interface; calls go to the scheduler or worker part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from omni_kvlink.errors import UnavailableError
from omni_kvlink.integrations.vllm.scheduling import TransferScheduler
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.stats import KVLinkPrometheus, KVLinkStats
from omni_kvlink.integrations.vllm.step import StepMetadata
from omni_kvlink.integrations.vllm.worker import KVWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class WorkerCalls(KVConnectorBase_V1):
    """The methods that vLLM calls in a worker's process."""

    _settings: VllmSettings
    _worker: KVWorker | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the links; the engine has allocated its KV pools.

        Raises:
            BusyError: the producer's URL is already served.
            UnavailableError: the connector cannot run here, or the pools are on a device.
            SchemaError: the pools have an unknown layout.
        """
        self._worker = KVWorker(self._settings, self._vllm_config, self._kv_cache_config, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step: announce the caches that its forward pass computes."""
        super().bind_connector_metadata(connector_metadata)
        self._opened().begin(self._step())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Request the step's caches; does not block."""
        self._opened().load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block, at most `timeout` seconds, until the layer of each synchronous load is there.

        A failed load does not raise: `get_block_ids_with_load_errors` reports its blocks.
        """
        self._opened().wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Queue the layer for a copy by the saver's thread; does not block."""
        self._opened().save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Block until all layers are copied and committed; blocks may be overwritten afterwards."""
        self._opened().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed, and those whose asynchronous load has ended."""
        return self._opened().finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads since the last call."""
        return self._opened().take_invalid_blocks()

    def get_kv_connector_stats(self) -> KVLinkStats | None:
        """The statistics since the last call."""
        return None if self._worker is None else self._worker.meter.take()

    def shutdown(self) -> None:
        """Close the links; caches that were not read yet fail at their readers."""
        if self._worker is not None:
            self._worker.close()

    def _opened(self) -> KVWorker:
        assert self._worker is not None, "register_kv_caches must be called first"
        return self._worker

    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step


class SchedulerCalls(KVConnectorBase_V1):
    """The methods that vLLM calls in the scheduler's process."""

    _scheduler: TransferScheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens to load beyond the computed ones, and whether the load is asynchronous."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Record a request's blocks; plan its load or save."""
        (block_ids,) = blocks.get_block_ids()
        self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """The transfers of the step that was scheduled."""
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the loads that the worker reports as ended."""
        self._scheduler.loaded(set(connector_output.finished_recving or ()))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept, and the params for the consumer's request."""
        return self._scheduler.finished(request)


class OmniKVLinkConnector(WorkerCalls, SchedulerCalls):
    """Sends a prompt's KV cache from one vLLM engine to others over any link of omni_kvlink.

    vLLM finds it by `kv_connector` and `kv_connector_module_path`. `kv_connector_extra_config`
    holds the fields of `VllmSettings`; `TransferScheduler` documents a request's
    `kv_transfer_params`. The hybrid cache manager is not supported: vLLM disables it for this
    connector.

    Raises:
        SchemaError: a setting is wrong or missing.
        UnavailableError: the engine has more than one rank.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        _check_single_rank(vllm_config)
        transfer = vllm_config.kv_transfer_config
        produces, consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._settings = VllmSettings.read(
            transfer.kv_connector_extra_config, produces=produces, consumes=consumes
        )
        self._scheduler = TransferScheduler(
            self._settings,
            block_size=vllm_config.cache_config.block_size,
            produces=produces,
            consumes=consumes,
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: layers are saved and loaded between the pieces of a CUDA graph."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLinkStats:
        """Wrap statistics that arrived from a worker."""
        return KVLinkStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVLinkPrometheus:
        """The connector's Prometheus metrics."""
        return KVLinkPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_single_rank(vllm_config: VllmConfig) -> None:
    """Refuse an engine of several ranks: each rank would need a link of its own."""
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise UnavailableError(
            f"this engine has {parallel.world_size} ranks (tensor parallel "
            f"{parallel.tensor_parallel_size}, pipeline parallel "
            f"{parallel.pipeline_parallel_size}); this connector supports one: "
            "--tensor-parallel-size 1 --pipeline-parallel-size 1"
        )
