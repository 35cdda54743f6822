"""The producer's worker: a layer is copied while the engine computes the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from omni_kvlink.connectors.base import Receipt
from omni_kvlink.errors import DuplicateKeyError, KVLinkError, TransferFailed
from omni_kvlink.integrations.vllm.payload import Pools
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.stats import Meter
from omni_kvlink.integrations.vllm.step import Cache
from omni_kvlink.link import KVLink, PutStream
from omni_kvlink.payload.paged import BlockTable

log = logging.getLogger(f"vllm.{__name__}")


class Saving:
    """One prompt's cache on its way out; all of it runs in the saver's thread."""

    def __init__(self, cache: Cache, pools: Pools):
        self.cache, self._pools = cache, pools
        self.error: Exception | None = None
        self.receipt: Receipt | None = None
        self._stream: PutStream | None = None
        self._pages: dict[str, BlockTable] = {}
        self._started = time.perf_counter()

    def open(self, link: KVLink, ttl: float) -> None:
        bundle = self._pools.bundle(self.cache)
        split = self._pools.split(self.cache)
        self._pages = {name: self._pools.pages(blocks) for name, blocks in split.items()}
        # No waiting for room: a forward pass would wait with it.
        self._stream = link.stream_put(bundle, readers=self.cache.readers, ttl=ttl, timeout=0.0)

    def write(self, layer: int) -> None:
        assert self._stream is not None
        for name, pages in self._pages.items():
            self._stream.write_layer(layer, self._pools.place(layer, pages), branch=name)

    def commit(self, meter: Meter) -> None:
        assert self._stream is not None
        self.receipt = self._stream.commit()
        meter.observe(
            save_seconds=time.perf_counter() - self._started,
            save_bytes=self._stream.manifest.nbytes,
        )

    def fail(self, link: KVLink, error: Exception) -> None:
        """Whoever waits for it learns why at once."""
        self.error = error
        if self._stream is not None:
            self._stream.fail(f"it could not be saved: {error!r}")
        elif not isinstance(error, DuplicateKeyError):  # that payload is another's
            link.fail(self.cache.key, f"it could not be saved: {error!r}")


class Saver:
    """What a producer's worker has under way; called by the engine's thread alone."""

    def __init__(self, link: KVLink, pools: Pools, settings: VllmSettings, meter: Meter):
        self._link, self._pools, self._ttl, self._meter = link, pools, settings.ttl, meter
        self._thread = ThreadPoolExecutor(1, "kvlink-save")
        self._savings: list[Saving] = []
        self._jobs: list[Future[None]] = []
        self._receipts: dict[str, Receipt] = {}
        self._held: set[str] = set()

    def begin(self, caches: Sequence[Cache]) -> None:
        """Announce what the coming forward pass computes."""
        self._savings = [Saving(cache, self._pools) for cache in caches]
        for saving in self._savings:
            self._do(saving, partial(saving.open, self._link, self._ttl))

    def layer(self, layer: int) -> None:
        """A layer of all of them is computed; it stays as it is until `finish`."""
        for saving in self._savings:
            self._do(saving, partial(saving.write, layer))

    def spoil(self, blocks: set[int]) -> None:
        """These blocks are not what they should be: no cache that has one of them goes out."""
        for saving in self._savings:
            wrong = blocks.intersection(saving.cache.blocks)
            if wrong:
                self._do(saving, partial(_refuse, saving.cache, wrong))

    def finish(self) -> None:
        """Wait until all is copied and committed: the blocks may change afterwards."""
        for saving in self._savings:
            self._do(saving, partial(saving.commit, self._meter))
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        for saving in self._savings:
            if saving.receipt is not None:
                self._receipts[saving.cache.request_id] = saving.receipt
        self._savings = []

    def hold(self, request_ids: set[str]) -> None:
        """Finished requests, whose blocks stay until `released` names them."""
        self._held |= request_ids

    def released(self) -> set[str]:
        """Requests of `hold` whose readers have let go, or that failed or expired."""
        for request_id, receipt in list(self._receipts.items()):
            if receipt.done:
                del self._receipts[request_id]
                self._settle(receipt)
        over = self._held - self._receipts.keys()
        self._held -= over
        return over

    def fail(self, key: str, reason: str) -> None:
        """A cache that was promised will not come."""
        if all(receipt.key != key for receipt in self._receipts.values()):
            self._meter.count("send_failed")  # else the receipt is counted
        self._link.fail(key, reason)

    def close(self) -> None:
        self._thread.shutdown()
        self._link.close()

    def _do(self, saving: Saving, step: Callable[[], None]) -> None:
        self._jobs.append(self._thread.submit(self._try, saving, step))

    def _try(self, saving: Saving, step: Callable[[], None]) -> None:
        """One bad cache is its readers' to know, and no reason to stop the engine."""
        if saving.error is not None:
            return
        try:
            step()
        except Exception as error:
            self._meter.count("send_failed")
            trace = None if isinstance(error, KVLinkError) else error
            log.error("cache %r was not sent: %s", saving.cache.key, str(error), exc_info=trace)
            saving.fail(self._link, error)

    def _settle(self, receipt: Receipt) -> None:
        if receipt.state == "released":
            self._meter.count("sent")
            return
        self._meter.count("send_expired" if receipt.state == "expired" else "send_failed")
        try:
            receipt.wait(timeout=0.0)
        except Exception as error:
            log.warning("%s", str(error))


def _refuse(cache: Cache, blocks: set[int]) -> None:
    raise TransferFailed(f"its blocks {sorted(blocks)} were not loaded", key=cache.key)
