"""`OmniKVLinkTier`: a secondary tier of vLLM's tiered offloading, of kept payloads."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from omni_kvlink.integrations.vllm.tier.identity import cache_identity
from omni_kvlink.integrations.vllm.tier.settings import TierSettings
from omni_kvlink.integrations.vllm.tier.transfers import ChunkTransfers
from omni_kvlink.integrations.vllm.versions import warn_if_untested
from omni_kvlink.kept import StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import JobId, TransferJob

    _Transfer = Callable[[TransferJob], JobResult]

log = logging.getLogger(f"vllm.{__name__}")

COUNTS = {
    "stored": "chunks of this engine that are kept",
    "store_failed": "chunks of this engine that could not be kept",
    "loaded": "chunks that were loaded, each byte compared with its digest",
    "missed": "chunks that were found and then not loaded: evicted, lost with a peer, or damaged",
}
"""Counters, vLLM's metrics `vllm:omni_kvlink_tier_…`."""


class OmniKVLinkTier(SecondaryTierManager):
    """Keeps the chunks that an engine offloads, and loads its own, a store's and other engines'.

    vLLM finds it by `type` and `module_path` of an entry of `secondary_tiers`; the entry's other
    keys are `settings`, the fields of `TierSettings`. It lives in the scheduler's process. No
    method but `drain_jobs` and `shutdown` blocks: threads look up, store and load.

    Raises:
        SchemaError: a setting is wrong or missing.
        KVLinkError: the link cannot be served.
    """

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        warn_if_untested()
        config = offloading_spec.config
        tier_settings = TierSettings.of(settings, config.parallel.data_parallel_index)
        self.locality = Locality(tier_settings.locality) if tier_settings.locality else None
        self._jobs: dict[JobId, _Job] = {}
        self._counts = dict.fromkeys(COUNTS, 0)  # since the last `get_stats`
        client = StoreClient(
            serve=tier_settings.url,
            stores=tier_settings.stores,
            peers=tier_settings.peers,
            identity=cache_identity(config, tier_settings, self.block_size_bytes),
            budget=tier_settings.budget,
            timeout=tier_settings.timeout,
            **tier_settings.link,
        )
        client.wait_connected(timeout=tier_settings.timeout)  # else the first requests would miss
        self._transfers = ChunkTransfers(client, primary_kv_view, drain=tier_settings.drain)
        self._lookups = _Lookups(self._transfers, tier_type)
        self._storing = ThreadPoolExecutor(1, "kvlink-tier-store")
        self._loading = ThreadPoolExecutor(1, "kvlink-tier-load")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is kept here, in a store or by a peer; RETRY until they have answered."""
        is_kept = self._lookups.lookup(key, req_context)
        if is_kept is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_kept else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Have chunks of the primary tier kept."""
        self._submit(self._storing, self._transfers.store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Have chunks loaded into their rows of the primary tier."""
        self._submit(self._loading, self._transfers.load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The results of the jobs that have ended since the last call."""
        finished = [job_id for job_id, job in self._jobs.items() if job.future.done()]
        return [self._finish(*self._jobs.pop(job_id)) for job_id in finished]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask vLLM to store each chunk once."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what was looked up for a request."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Have this step's look-ups answered."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended: nothing uses the primary tier then."""
        wait([job.future for job in self._jobs.values()])

    def shutdown(self) -> None:
        """Wait until all jobs have ended, and `drain` seconds for the stores; close the links."""
        self._lookups.shutdown()
        self._storing.shutdown()
        self._loading.shutdown()
        self._transfers.close()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The counters of `COUNTS`."""
        return {_metric(name): OffloadingCounterMetadata(text) for name, text in COUNTS.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts since the last call, which begin again at 0."""
        stats = OffloadingConnectorStats()
        for name, count in self._counts.items():
            if count:
                stats.increase_counter(_metric(name), count)
        self._counts = dict.fromkeys(COUNTS, 0)
        return stats

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        transfer: Callable[[TransferJob], JobResult],
        job: TransferJob,
    ) -> None:
        self._jobs[job.job_id] = _Job(job, pool.submit(transfer, job))

    def _finish(self, job: TransferJob, future: Future[JobResult]) -> JobResult:
        """The result of a job that has ended; what was not loaded is a miss from now on."""
        error = future.exception()
        if error is not None:  # vLLM holds the rows until a job has a result
            log.error("a job of %d chunks failed: %s", len(job.keys), repr(error))
        result = JobResult(job.job_id, success=False) if error else future.result()
        ended = job.keys if result.success else result.successful_keys or ()
        failed = set(job.keys).difference(ended)
        names = ("loaded", "missed") if job.is_promotion else ("stored", "store_failed")
        for name, keys in zip(names, (ended, failed), strict=True):
            self._counts[name] += len(keys)
        if job.is_promotion:
            self._lookups.mark_miss(failed)
        return result


class _Job(NamedTuple):
    """A transfer, and its result."""

    job: TransferJob
    future: Future[JobResult]


class _Lookups(AsyncLookupManager):
    """vLLM's look-ups in a thread; a key has one answer for as long as a request uses it."""

    def __init__(self, transfers: ChunkTransfers, tier_type: str):
        self._transfers = transfers
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._transfers.contains(keys)


def _metric(name: str) -> str:
    return f"vllm:omni_kvlink_tier_{name}"
