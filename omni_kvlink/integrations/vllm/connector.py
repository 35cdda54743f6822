"""`OmniKVLinkConnector`: vLLM's connector interface, each call handed to the half it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from omni_kvlink.errors import UnavailableError
from omni_kvlink.integrations.vllm.scheduling import Scheduling
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.stats import KVLinkPrometheus, KVLinkStats
from omni_kvlink.integrations.vllm.step import Step
from omni_kvlink.integrations.vllm.worker import KVWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class WorkerCalls(KVConnectorBase_V1):
    """What vLLM calls in a worker's process."""

    _settings: VllmSettings
    _worker: KVWorker | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine has its pools: open the links.

        Raises:
            BusyError, UnavailableError: as `KVLink.serve`.
            SchemaError: pools that this connector does not know.
        """
        self._worker = KVWorker(self._settings, self._vllm_config, self._kv_cache_config, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._opened().begin(self._step())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._opened().load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No longer than the setting `timeout`; what failed is in the blocks reported."""
        self._opened().before(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Returns at once; a thread copies the layer."""
        self._opened().after(layer_name)

    def wait_for_save(self) -> None:
        self._opened().end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self._opened().finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._opened().invalid()

    def get_kv_connector_stats(self) -> KVLinkStats | None:
        return None if self._worker is None else self._worker.meter.take()

    def shutdown(self) -> None:
        """Caches that were not read are lost, and their readers told."""
        if self._worker is not None:
            self._worker.close()

    def _opened(self) -> KVWorker:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step


class SchedulerCalls(KVConnectorBase_V1):
    """What vLLM calls in the scheduler's process."""

    _scheduling: Scheduling

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        (block_ids,) = blocks.get_block_ids()
        self._scheduling.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        return self._scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduling.loaded(set(connector_output.finished_recving or ()))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request)


class OmniKVLinkConnector(WorkerCalls, SchedulerCalls):
    """A prompt's KV cache from one vLLM engine to others, over any link of omni_kvlink.

    Named by `kv_connector` and `kv_connector_module_path`; `kv_connector_extra_config` holds the
    fields of `VllmSettings`, a request's `kv_transfer_params` are those of `Scheduling`. The hybrid
    cache manager is not supported: vLLM turns it off for this connector.

    Raises:
        SchemaError: a setting is wrong or missing.
        UnavailableError: the engine is distributed in a way that has not been tried.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        _check_alone(vllm_config)
        transfer = vllm_config.kv_transfer_config
        produces, consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._settings = VllmSettings.read(
            transfer.kv_connector_extra_config, produces=produces, consumes=consumes
        )
        self._scheduling = Scheduling(
            self._settings,
            block_size=vllm_config.cache_config.block_size,
            produces=produces,
            consumes=consumes,
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are saved and loaded between a graph's pieces."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLinkStats:
        return KVLinkStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVLinkPrometheus:
        return KVLinkPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_alone(vllm_config: VllmConfig) -> None:
    """Refuse what would need a link and a name for every rank."""
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise UnavailableError(
            f"this engine has {parallel.world_size} ranks (tensor parallel "
            f"{parallel.tensor_parallel_size}, pipeline parallel "
            f"{parallel.pipeline_parallel_size}); this connector has run with one: "
            "--tensor-parallel-size 1 --pipeline-parallel-size 1"
        )
