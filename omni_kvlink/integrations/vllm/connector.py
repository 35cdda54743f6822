"""`OmniKVLinkConnector`: vLLM's KV connector over the links of this library."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVLink
from omni_kvlink.integrations.vllm.device import link_options, log_path
from omni_kvlink.integrations.vllm.heads import HeadPools
from omni_kvlink.integrations.vllm.loading import Loader
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.pools import Pools
from omni_kvlink.integrations.vllm.ranks import rank_url
from omni_kvlink.integrations.vllm.saving import Saver
from omni_kvlink.integrations.vllm.scheduling import SchedulerCalls
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.siblings import SiblingWatch, sibling_pids
from omni_kvlink.integrations.vllm.stats import KVLinkPrometheus, KVLinkStats, Meter
from omni_kvlink.integrations.vllm.step import FailedLoads, StepMetadata
from omni_kvlink.lowlevel import Options

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.forward_context import ForwardContext


log = logging.getLogger(f"vllm.{__name__}")


class OmniKVLinkConnector(SchedulerCalls):
    """Sends a prompt's KV cache from one vLLM engine to others over any link of omni_kvlink.

    vLLM finds it by `kv_connector` and `kv_connector_module_path`. `kv_connector_extra_config`
    holds the fields of `VllmSettings`; `SchedulerCalls` documents a request's
    `kv_transfer_params`, and has the methods of the scheduler's process; the worker's are here.
    With the hybrid cache manager, each group of layers sends the blocks that it needs.

    Raises:
        SchemaError: a setting is wrong or missing, or a group of caches is of an unknown kind.
        UnavailableError: the engine divides a prompt's tokens over its ranks.
    """

    build_kv_connector_stats = KVLinkStats
    build_prom_metrics = KVLinkPrometheus

    _meter: Meter | None = None
    _saver: Saver | None = None
    _loader: Loader | None = None
    _siblings: SiblingWatch | None = None
    _is_asleep = False  # the pools are not registered

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: layers are saved and loaded between the pieces of a CUDA graph.

        vLLM calls this before it loads the weights: SchemaError if a setting is wrong.
        """
        VllmSettings.read(extra_config, VllmSettings.EXTRA)
        return True

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """True: peers read and write the link's memory, and know no address in the pools."""
        return True

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the links; the engine has allocated its KV pools.

        Raises:
            BusyError: the producer's URL is already served.
            UnavailableError: the connector cannot run here, or the pools are on a device that is
                not a CUDA device.
            SchemaError: the pools have an unknown layout.
        """
        settings, self._kv_caches = self._settings, kv_caches
        divided = self._divided_pools()
        self._layers = {layer.name: number for number, layer in enumerate(divided.pools.layers)}
        self._meter = Meter()
        options: dict[str, Any]
        if self._produces:
            sent = divided.parts(sends=True)
            nbytes = sum(pool.numel() for pool in divided.pools.tensors)
            options = {"quota": max(Options.quota, nbytes)}
            url = rank_url(settings.url, self._rank.index)
            options |= link_options(settings.serve, kv_caches.values())
            link = KVLink.serve(url, **options)
            log_path(link, options)
            self._saver = Saver(link, sent, settings, self._meter)
        if self._consumes:
            options = link_options(settings.connect, kv_caches.values())
            peers = Peers(settings.peers, options, file=settings.peers_file)
            received = divided.parts(sends=False)
            self._loader = Loader(received, peers, self._meter, timeout=settings.timeout)
        if self._rank.world_size > 1:
            self._siblings = SiblingWatch(sibling_pids(), self._on_rank_ended)

    def unregister_kv_caches(self) -> None:
        """Keep no view of the pools: the engine goes to sleep, which discards their memory.

        Blocks until no copy reads or writes them; loads in progress fail. The links stay open, and
        committed caches can be read. A second call does nothing.
        """
        self._is_asleep = True
        for part in (self._loader, self._saver):
            if part is not None:
                part.release_pools()

    def restore_kv_caches(self) -> None:
        """Send and load from the pools as they are after the wake-up; a second call does nothing.

        Raises:
            SchemaError: the pools have an unknown layout.
        """
        if not self._is_asleep:
            return
        divided = self._divided_pools()
        if self._saver is not None:
            self._saver.use_pools(divided.parts(sends=True))
        if self._loader is not None:
            self._loader.use_pools(divided.parts(sends=False))
        self._is_asleep = False

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Block until no copy reads the blocks of preempted requests: the pass overwrites them.

        A pipeline stage without the draft model is not told of its last pass's end: it is now.
        """
        assert isinstance(kv_connector_metadata, StepMetadata)
        self.wait_for_save()
        if self._saver is not None:
            self._saver.wait(kv_connector_metadata.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step: announce the caches that its forward pass computes."""
        super().bind_connector_metadata(connector_metadata)
        assert self._meter is not None, "register_kv_caches must be called first"
        assert isinstance(connector_metadata, StepMetadata)
        if self._saver is not None:
            for failed in connector_metadata.failed:
                self._saver.fail(failed)
            self._saver.hold(connector_metadata.held)
            self._saver.offer(connector_metadata.offers)
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

        On a device the layer's copy is awaited by the pass's stream, and not by the caller.
        A failed load does not raise: `get_block_ids_with_load_errors` reports its blocks.
        """
        if self._loader is not None and layer_name in self._layers:
            self._loader.wait_for_layer(self._layers[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Queue the layer for a copy by the saver's thread, if it is final; does not block."""
        if self._saver is not None and layer_name in self._layers:
            self._saver.layer(self._layers[layer_name])

    def wait_for_save(self) -> None:
        """Block until the next pass may begin: until all layers are copied and committed.

        On a device only if it could overwrite them: with `delay_free` off, and recurrent states.
        """
        if self._saver is not None:
            if self._loader is not None:  # a pass may save blocks that it loaded
                self._saver.fail_blocks(self._loader.wait_for_pass())
            self._saver.commit()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed, and those whose asynchronous load has ended."""
        sent = self._saver.released() if self._saver is not None else set[str]()
        if self._loader is None:
            return sent, set()
        self._loader.forget(finished_req_ids)
        return sent, self._loader.finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The results of `get_finished`, with the failed loads that their blocks cannot tell."""
        results = super().get_transfer_results(finished_req_ids)
        if self._loader is not None:
            results.failed_recving = self._loader.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads since the last call; no cache with one of them is sent.

        With a draft model, vLLM calls this before `wait_for_save`, and after it otherwise.
        """
        if self._loader is None:
            return set()
        invalid = self._loader.take_invalid_blocks()
        if self._saver is not None:
            self._saver.fail_blocks(invalid)
        return invalid

    def get_kv_connector_stats(self) -> KVLinkStats | None:
        """The statistics since the last call."""
        return self._meter.take() if self._meter is not None else None

    def build_connector_worker_meta(self) -> FailedLoads | None:
        """The loads that failed on this rank, which the other ranks need not go on with."""
        failed = self._loader.take_failed_here() if self._loader is not None else frozenset()
        return FailedLoads(failed) if failed and self._rank.world_size > 1 else None

    def shutdown(self) -> None:
        """Close the links; caches that are unread after `drain` seconds fail at their readers.

        Unfinished loads of this engine fail at once.
        """
        for part in (self._siblings, self._loader, self._saver):
            if part is not None:
                part.close()

    def _divided_pools(self) -> HeadPools:
        """The registered pools, where the engine's tensors have them now."""
        config, settings, caches = self._vllm_config, self._settings, self._kv_caches
        pools = Pools.of(config, self._kv_cache_config, caches, settings)
        model_heads = config.model_config.get_total_num_kv_heads()
        return HeadPools(pools, caches, self._rank, settings.peer_tp, model_heads)

    def _on_rank_ended(self) -> None:
        """Close the links, and exit if this rank is amid a forward pass, which cannot end.

        The engine's thread may wait for it in a collective call, where no signal handler runs. vLLM
        waits for this process before it reports the engine's requests as failed.
        """
        for part in (self._saver, self._loader):
            if part is not None:
                part.disconnect()
        if self.has_connector_metadata():
            log.error("this rank's forward pass needs the rank that has ended: exiting")
            os._exit(1)
