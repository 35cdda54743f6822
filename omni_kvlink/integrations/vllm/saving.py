"""The producer's worker: a layer is copied while the engine computes the next."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from vllm.forward_context import get_forward_context, is_forward_context_available

from omni_kvlink.errors import (
    DuplicateKeyError,
    KVLinkError,
    TransferFailed,
    TransferTimeout,
    without_frames,
)
from omni_kvlink.integrations.vllm.device import PoolDevice
from omni_kvlink.integrations.vllm.groups import HEAD, LAST
from omni_kvlink.integrations.vllm.pools import RELEASED, branch_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.forward_context import ForwardContext

    from omni_kvlink import KVProducer, PutStream, Receipt, TensorView
    from omni_kvlink.integrations.vllm.pools import Pools
    from omni_kvlink.integrations.vllm.settings import VllmSettings
    from omni_kvlink.integrations.vllm.stats import Meter
    from omni_kvlink.integrations.vllm.step import FailedSave, PromptCache
    from omni_kvlink.lowlevel import StreamEvents

log = logging.getLogger(f"vllm.{__name__}")


class CacheSave:
    """The save of one prompt's cache; its methods run in the saver's thread."""

    def __init__(self, cache: PromptCache, pools: Pools):
        self.cache, self._pools = cache, pools
        self.error: Exception | None = None
        self.receipt: Receipt | None = None
        self._stream: PutStream | None = None
        self._views: dict[str, list[TensorView]] = {}
        self._unwritten = set(range(len(pools.layers)))
        self._started = time.perf_counter()

    def open(self, link: KVProducer, ttl: float) -> None:
        """Announce the cache on the link."""
        bundle = self._pools.bundle(self.cache)
        self._views = {name: data.tensors() for name, data in bundle.tensor_data.items()}
        # timeout=0: waiting for memory would stall the forward pass.
        self._stream = link.stream_put(bundle, readers=self.cache.readers, ttl=ttl, timeout=0.0)

    def write(self, layer: int, events: StreamEvents | None) -> None:
        """Copy one layer's blocks into the payload; on a device, behind a recorded position."""
        assert self._stream is not None
        _, group, index = self._pools.layers[layer]
        for part in (HEAD, LAST):
            name = branch_name(group, part)
            if name in self._views:
                view = self._views[name][index]
                self._stream.write_layer(index, view, branch=name, after=events)
        self._unwritten.discard(layer)

    def commit(self, link: KVProducer, meter: Meter, events: StreamEvents | None) -> None:
        """Commit the payload once all copies have ended; `receipt` is set afterwards.

        Layers that `Saver.layer` did not queue are copied first: vLLM does not report those with a
        recurrent state, and those of a draft model are final only now.
        """
        assert self._stream is not None
        for layer in sorted(self._unwritten):
            self.write(layer, events)
        self.receipt = self._stream.commit()
        seconds = time.perf_counter() - self._started
        meter.observe(save_seconds=seconds, save_bytes=self._stream.manifest.nbytes)
        meter.copied("sent", link.stats()["device_copies"])

    def fail(self, link: KVProducer, error: Exception) -> None:
        """Fail the payload, so that consumers that wait for it raise the reason at once."""
        self.error = without_frames(error)
        if self._stream is not None:
            self._stream.fail(f"it could not be saved: {error!r}")
        elif not isinstance(error, DuplicateKeyError):  # the key belongs to another payload
            link.fail(self.cache.key, f"it could not be saved: {error!r}")


class Saver:
    """The saves of a producer's worker; called by the engine's thread only.

    Attributes:
        overlaps: whether the next pass may begin while blocks are copied: they are on a device,
            they are kept until the cache is released, and no pass overwrites them, as it would a
            recurrent state.
    """

    def __init__(
        self, link: KVProducer, pools: Sequence[Pools], settings: VllmSettings, meter: Meter
    ):
        self._link, self._meter, self._settings = link, meter, settings
        self._thread = ThreadPoolExecutor(1, "kvlink-save")
        self._saves: list[CacheSave] = []  # of the pass, which has not ended
        self._forward: ForwardContext | None = None  # the model's own, in this pass
        self._queued: set[int] = set()  # layers of this pass
        self._repeated: set[int] = set()  # layers that the model computes several times in a pass
        self._open: dict[tuple[str, str], tuple[CacheSave, Future[None]]] = {}
        self._receipts: dict[tuple[str, str], Receipt] = {}  # both by request and key
        self._held: set[str] = set()
        self.use_pools(pools)

    def use_pools(self, pools: Sequence[Pools]) -> None:
        """Send caches from these pools from now on."""
        self._pools, self._is_released = pools, False
        self._device = PoolDevice((pool for part in pools for pool in part.tensors), self._link)
        has_state = any(part.groups.has_state for part in pools)
        self.overlaps = self._device.is_async and self._settings.delay_free and not has_state

    def release_pools(self) -> None:
        """Keep no reference to the pools; blocks until no copy reads them.

        A cache whose pass has not ended fails at its readers, and so do those that a later pass
        computes. Payloads that are committed stay readable. A second call does nothing.
        """
        self._fail_saves(self._saves, RELEASED)
        self.commit()
        self._end([*self._open])
        self._thread.shutdown()  # the thread may hold its last step for a moment
        self._thread = ThreadPoolExecutor(1, "kvlink-save")
        self.use_pools([pools.without_tensors() for pools in self._pools])
        self._is_released, self._forward = True, None

    def begin(self, caches: Sequence[PromptCache]) -> None:
        """Announce the caches that the coming forward pass computes, in the current context."""
        self._forward = _current_forward()
        self._queued.clear()
        self._saves = [
            CacheSave(pools.part.cache(cache), pools) for cache in caches for pools in self._pools
        ]
        if self._is_released:
            self._fail_saves(self._saves, RELEASED)
        for save in self._saves:
            self._enqueue(save, partial(save.open, self._link, self._settings.ttl))

    def offer(self, caches: Sequence[PromptCache]) -> None:
        """Send caches that are complete in the pools; blocks until they are copied.

        Their blocks may then be freed, whether or not anybody reads the caches.
        """
        if not caches:
            return
        names = {cache.request_id for cache in caches}
        self.begin(caches)
        self.commit()
        self.wait(names)
        for request_id, key in [name for name in self._receipts if name[0] in names]:
            self._receipts["", key] = self._receipts.pop((request_id, key))

    def layer(self, layer: int) -> None:
        """Queue a layer of all caches that the model has computed; not to change until `wait`.

        Only a layer that is final may be copied now. A forward pass of another context computes a
        part of the step, as each microbatch, or computes it repeatedly, as a draft model for each
        of its tokens: its layers are copied by `commit`.
        """
        if not self._saves or layer in self._repeated or _current_forward() is not self._forward:
            return
        if layer in self._queued:
            self._repeated.add(layer)
            name = self._pools[0].layers[layer].name
            self._fail_saves(
                self._saves,
                f"its layer {name} was computed again after it was copied; the next caches have "
                "this layer copied at the end of a pass",
            )
            return
        self._queued.add(layer)
        events = self._device.record()
        for save in self._saves:
            self._enqueue(save, partial(save.write, layer, events))

    def fail_blocks(self, blocks: set[int]) -> None:
        """Fail every cache that contains one of these blocks, which were not loaded correctly."""
        for save in self._saves:
            wrong = blocks.intersection(itertools.chain(*save.cache.blocks))
            if wrong:
                self._fail_saves([save], f"its blocks {sorted(wrong)} were not loaded")

    def commit(self) -> None:
        """End the pass, and `wait` for its caches unless the next one may overlap their copies.

        Later tokens of a request may change rows of its last block behind the prompt's: these are
        sent as well, and mean nothing.
        """
        saves, self._saves = self._saves, []
        events = self._device.record() if saves else None
        for save in saves:
            job = self._enqueue(save, partial(save.commit, self._link, self._meter, events))
            self._open[save.cache.request_id, save.cache.key] = save, job
        if not self.overlaps:
            self.wait({save.cache.request_id for save in saves})

    def wait(self, request_ids: set[str]) -> None:
        """Block until the caches of these requests are copied; their blocks may change then."""
        self._end([name for name in self._open if name[0] in request_ids])

    def hold(self, request_ids: set[str]) -> None:
        """Keep the blocks of finished requests until `released` returns them."""
        self._held |= request_ids

    def released(self) -> set[str]:
        """Held requests whose caches were released by all readers, failed or expired."""
        self._end([name for name, (_, job) in self._open.items() if job.done()])
        for name, receipt in list(self._receipts.items()):
            if receipt.done:
                del self._receipts[name]
                self._report(receipt)
        unread = self._receipts.keys() | self._open.keys()
        released = self._held - {request_id for request_id, _ in unread}
        self._held -= released
        return released

    def fail(self, failed: FailedSave) -> None:
        """Fail an announced cache whose request has ended; blocks while it is being copied."""
        self.wait({failed.request_id})
        for key in (pools.part.key(failed.key) for pools in self._pools):
            requests = {request_id for request_id, sent_key in self._receipts if sent_key == key}
            if failed.request_id not in requests:
                self._meter.count("send_failed")  # else the receipt is counted
            if requests <= {failed.request_id}:  # else the key is another request's
                self._link.fail(key, failed.reason)

    def disconnect(self) -> None:
        """Close the link, from any thread: readers know at once that they get no more."""
        self._link.close()

    def close(self) -> None:
        """Wait for queued copies and, `drain` seconds, for unread caches, then close the link."""
        self._thread.shutdown()
        self._end([*self._open])
        deadline = time.monotonic() + self._settings.drain
        try:
            for receipt in self._receipts.values():
                with contextlib.suppress(TransferFailed, TransferTimeout):
                    receipt.wait(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            self._link.close()

    def _end(self, names: Iterable[tuple[str, str]]) -> None:
        """Block until these saves have ended."""
        for name in names:
            save, job = self._open.pop(name)
            job.result()
            if save.receipt is not None:
                self._receipts[name] = save.receipt

    def _fail_saves(self, saves: Sequence[CacheSave], reason: str) -> None:
        for save in saves:
            self._enqueue(save, partial(_refuse, save.cache, reason))

    def _enqueue(self, save: CacheSave, step: Callable[[], None]) -> Future[None]:
        """Run a step of a save in the thread, after all earlier steps."""
        return self._thread.submit(self._run, save, step)

    def _run(self, save: CacheSave, step: Callable[[], None]) -> None:
        """Run a step of a save; an error fails this cache only, not the engine."""
        if save.error is not None:
            return
        try:
            step()
        except Exception as error:
            self._meter.count("send_failed")
            trace = None if isinstance(error, KVLinkError) else error
            log.error("cache %r was not sent: %s", save.cache.key, str(error), exc_info=trace)
            save.fail(self._link, error)

    def _report(self, receipt: Receipt) -> None:
        if receipt.state == "released":
            self._meter.count("sent")
            return
        self._meter.count("send_expired" if receipt.state == "expired" else "send_failed")
        try:
            receipt.wait(timeout=0.0)
        except Exception as error:
            log.warning("%s", str(error))


def _refuse(cache: PromptCache, reason: str) -> None:
    raise TransferFailed(reason, key=cache.key)


def _current_forward() -> ForwardContext | None:
    """The context of the forward pass that runs now; each pass of a step has its own."""
    return get_forward_context() if is_forward_context_available() else None
