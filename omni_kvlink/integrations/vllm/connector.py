"""`OmniKVLinkConnector`: vLLM's KV connector over the links of this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink import KVLink
from omni_kvlink.integrations.vllm.loading import Loader
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.pools import Pools
from omni_kvlink.integrations.vllm.saving import Saver
from omni_kvlink.integrations.vllm.scheduling import SchedulerCalls
from omni_kvlink.integrations.vllm.stats import KVLinkPrometheus, KVLinkStats, Meter
from omni_kvlink.integrations.vllm.step import StepMetadata
from omni_kvlink.lowlevel import Options

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.forward_context import ForwardContext


class OmniKVLinkConnector(SchedulerCalls):
    """Sends a prompt's KV cache from one vLLM engine to others over any link of omni_kvlink.

    vLLM finds it by `kv_connector` and `kv_connector_module_path`. `kv_connector_extra_config`
    holds the fields of `VllmSettings`; `SchedulerCalls` documents a request's
    `kv_transfer_params`, and has the methods of the scheduler's process; the worker's are here.
    With the hybrid cache manager, each group of layers sends the blocks that it needs.

    Raises:
        SchemaError: a setting is wrong or missing, or a group of caches is of an unknown kind.
        UnavailableError: the engine has more than one rank.
    """

    build_kv_connector_stats = KVLinkStats
    build_prom_metrics = KVLinkPrometheus

    _meter: Meter | None = None
    _saver: Saver | None = None
    _loader: Loader | None = None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: layers are saved and loaded between the pieces of a CUDA graph."""
        return True

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the links; the engine has allocated its KV pools.

        Raises:
            BusyError: the producer's URL is already served.
            UnavailableError: the connector cannot run here, or the pools are on a device.
            SchemaError: the pools have an unknown layout.
        """
        settings = self._settings
        pools = Pools.of(self._vllm_config, self._kv_cache_config, kv_caches, settings)
        self._layers = {layer.name: number for number, layer in enumerate(pools.layers)}
        self._meter = Meter()
        if self._produces:
            options = {"quota": max(Options.quota, pools.nbytes), **settings.serve}
            self._saver = Saver(KVLink.serve(settings.url, **options), pools, settings, self._meter)
        if self._consumes:
            peers = Peers(settings.peers, settings.connect)
            self._loader = Loader(pools, peers, self._meter, timeout=settings.timeout)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step: announce the caches that its forward pass computes."""
        super().bind_connector_metadata(connector_metadata)
        assert self._meter is not None, "register_kv_caches must be called first"
        assert isinstance(connector_metadata, StepMetadata)
        if self._saver is not None:
            for failed in connector_metadata.failed:
                self._saver.fail(failed)
            self._saver.hold(connector_metadata.held)
            self._saver.begin(connector_metadata.saves)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Request the step's caches and cancel those no longer needed; does not block."""
        step: StepMetadata = self._get_connector_metadata()
        if self._loader is not None:
            for cancelled in step.cancelled:
                self._loader.cancel(cancelled)
            self._loader.start(step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block, at most `timeout` seconds, until the layer of each synchronous load is there.

        A failed load does not raise: `get_block_ids_with_load_errors` reports its blocks.
        """
        if self._loader is not None and layer_name in self._layers:
            self._loader.wait_for_layer(self._layers[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Queue the layer for a copy by the saver's thread; does not block."""
        if self._saver is not None and layer_name in self._layers:
            self._saver.layer(self._layers[layer_name])

    def wait_for_save(self) -> None:
        """Block until all layers are copied and committed; blocks may be overwritten afterwards."""
        if self._saver is not None:
            if self._loader is not None:  # a pass may save blocks that it loaded
                self._saver.fail_blocks(self._loader.wait_for_pass())
            self._saver.commit()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed, and those whose asynchronous load has ended."""
        sent = self._saver.released() if self._saver is not None else set[str]()
        return sent, self._loader.finished() if self._loader is not None else set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As `get_finished`, with the failed loads that their blocks cannot tell."""
        results = super().get_transfer_results(finished_req_ids)
        if self._loader is not None:
            results.failed_recving = self._loader.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads since the last call."""
        return self._loader.take_invalid_blocks() if self._loader is not None else set()

    def get_kv_connector_stats(self) -> KVLinkStats | None:
        """The statistics since the last call."""
        return self._meter.take() if self._meter is not None else None

    def shutdown(self) -> None:
        """Close the links; unread caches fail at their readers, and unfinished loads here."""
        for part in (self._saver, self._loader):
            if part is not None:
                part.close()
