"""The consumer's worker: loads caches into the engine's blocks, during or between passes."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.errors import IntegrityError, SchemaError, TransferFailed, TransferTimeout
from omni_kvlink.integrations.vllm.declining import Decliner
from omni_kvlink.integrations.vllm.device import PoolDevice
from omni_kvlink.integrations.vllm.pools import Pools, branch_name
from omni_kvlink.integrations.vllm.step import CancelledLoad
from omni_kvlink.lowlevel import PendingGet, begin_get, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink import KVConsumer, PagedTensor, ReceivedStream
    from omni_kvlink.integrations.vllm.peers import Peers
    from omni_kvlink.integrations.vllm.stats import Meter
    from omni_kvlink.integrations.vllm.step import Load
    from omni_kvlink.lowlevel import Manifest, StreamEvents

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Threads that copy caches; a cache that has not arrived yet occupies none."""


class Target(NamedTuple):
    """The rows of a received branch that are written, and each layer's blocks for them."""

    branch: str
    views: list[PagedTensor]
    rows: range


class CacheLoad:
    """The load of one cache: a pool thread requests it; none waits; a pool thread copies it.

    `submit` runs a function in the thread pool; the load ends within `timeout` seconds. Blocks on
    a device are written behind what was recorded as `after`.
    """

    def __init__(
        self,
        load: Load,
        pools: Pools,
        peers: Peers,
        submit: Callable[[Callable[[], None]], Future[None]],
        timeout: float,
        after: StreamEvents | None = None,
    ):
        self.load = load
        self.error: Exception | None = None
        self.done = threading.Event()
        self.nbytes, self.wait_seconds, self.copy_seconds = 0, 0.0, 0.0
        self.link: KVConsumer | None = None
        self._pools, self._peers, self._submit = pools, peers, submit
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._changed = threading.Condition()
        self._pending: PendingGet | None = None
        self._is_claimed = False
        self.cancelled: CancelledLoad | None = None
        self.has_used_read = False
        self._layers = 0
        self._after = after
        self._copies: list[list[StreamEvents]] = []  # by layer: the ends of copies on a device

    @property
    def is_requested(self) -> bool:
        """Whether the request has reached the link."""
        return self._pending is not None

    def fail(self, error: Exception) -> None:
        """End a load that is not attempted."""
        self._complete(error)

    def request(self) -> None:
        """Request the cache from its producer; runs in the pool."""
        try:
            self.link = self._peers.link(self.load.url, timeout=self._left())
            self._check_cancelled()
            pending = begin_get(self.link, self.load.key, timeout=self._left(), streamed=True)
        except Exception as error:
            self._complete(error)
            return
        with self._changed:
            self._pending = pending
        if self.cancelled is not None:
            self.cancel(self.cancelled)
        else:
            pending.future.add_done_callback(lambda future: self._begin_copy())

    def expire(self) -> None:
        """End the load if its deadline has passed."""
        if self._pending is not None and self._left() <= 0:
            self._begin_copy()

    def cancel(self, cancelled: CancelledLoad) -> None:
        """Cancel the load; a copy that has begun ends at the next layer."""
        with self._changed:
            self.cancelled = cancelled
        if self._pending is None:
            return
        if self._claim():
            self._pending.cancel()
            self._complete(TransferFailed(cancelled.reason, key=self.load.key))
        elif cancelled.declines and cancelled.readers == 1 and not self.done.is_set():
            self._submit(self._abort)

    def wait_for_layer(self, layer: int) -> None:
        """Block until a layer is in its blocks, the load has ended, or its deadline has passed.

        On a device: until the layer is here, and its digests are checked; then the current stream
        waits for its copy, not the caller.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._layers > layer or self.done.is_set(), self._left())
        if self._layers <= layer:
            self.wait()
        for copy in self._copies[layer] if self._layers > layer else ():
            copy.make_streams_wait()

    def wait(self) -> None:
        """Block until the load has ended, at most until the deadline."""
        self.done.wait(self._left())
        self.expire()
        self.done.wait()  # a copy that has begun is not interrupted

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _claim(self) -> bool:
        """Whether the caller is the first, and so the one, to handle the pending get."""
        with self._changed:
            first, self._is_claimed = not self._is_claimed, True
        return first

    def _begin_copy(self) -> None:
        if self._claim():
            self._submit(self._run)

    def _abort(self) -> None:
        """End a copy that waits for a layer, and the payload with it; runs in the pool."""
        assert self.link is not None
        assert self.cancelled is not None
        try:
            self.link.abort(self.load.key, self.cancelled.reason)
        except Exception as error:
            log.warning("cache %.200r could not be aborted: %s", self.load.key, str(error))

    def _check_cancelled(self) -> None:
        if self.cancelled is not None:
            raise TransferFailed(self.cancelled.reason, key=self.load.key)

    def _run(self) -> None:
        """Copy the cache; runs in the pool when the get is answered or its deadline has passed."""
        link, pending = self.link, self._pending
        assert link is not None
        assert pending is not None
        began = time.monotonic()
        self.wait_seconds = began - self._started
        try:
            delivery, started = pending.wait(timeout=0.0), time.perf_counter()
            with open_stream(link, delivery, started=started, timeout=self._left()) as stream:
                try:
                    self._copy(stream, link.url)
                    self.copy_seconds = time.monotonic() - began
                    if not self.load.is_async and self._use_read():
                        self._complete(None)  # the pass's stream waits for the copies
                finally:
                    self._wait_for_copies()
                    if not (self.has_used_read or self._use_read()):
                        stream.delivery.release_unread()
        except Exception as error:
            # Their frames would keep the payload's memory, and so its lease.
            error.__traceback__ = error.__context__ = None
            self._complete(error)
            return
        self._complete(None)

    def _use_read(self) -> bool:
        """Decide whether the read is used; else another request of this engine takes it."""
        with self._changed:
            self.has_used_read = self.cancelled is None or self.cancelled.declines
        return self.has_used_read

    def _wait_for_copies(self) -> None:
        """Block until no copy reads the payload any more."""
        for copies in self._copies:
            for copy in copies:
                copy.wait()

    def _copy(self, stream: ReceivedStream, peer: str) -> None:
        """Copy layer by layer, each byte checked against its digest; begin it, on a device."""
        try:
            self._pools.check(stream.manifest, self.load, peer=peer)
        except Exception as error:
            stream.delivery.reject(str(error))  # the producer's receipt reports the reason
            raise
        self.nbytes = stream.manifest.nbytes
        targets = self._targets(stream.manifest)
        for layer, (_, group, index) in enumerate(self._pools.layers):
            copies = list[StreamEvents]()
            self._copies.append(copies)
            for branch, views, rows in targets[group]:
                self._check_cancelled()
                received = stream.wait_for_layer(index, branch=branch, timeout=self._left())
                whole = rows == range(received.key.shape[0])
                part = None if whole else rows
                copies.append(received.begin_scatter(views[index], rows=part, after=self._after))
            with self._changed:
                self._layers = layer + 1
                self._changed.notify_all()
        stream.wait(timeout=self._left())  # until the commit

    def _targets(self, manifest: Manifest) -> list[list[Target]]:
        """For each group, what of the received branches is written, and where."""
        return [
            [
                target
                for part, sent in parts.items()
                if (target := self._target(group, part, sent, needed)) is not None
            ]
            for group, (parts, needed) in enumerate(
                zip(
                    self._pools.received(manifest), self._pools.needed(self.load), strict=True
                )
            )
        ]

    def _target(self, group: int, part: str, sent: range, needed: range) -> Target | None:
        blocks = range(max(sent.start, needed.start), min(sent.stop, needed.stop))
        if not blocks:
            return None
        views = self._pools.views(group, self._pools.block_ids(self.load, group, blocks))
        size = views[0].block_table.block_size  # rows of a block
        rows = range((blocks.start - sent.start) * size, (blocks.stop - sent.start) * size)
        return Target(branch_name(group, part), views, rows)

    def _complete(self, error: Exception | None) -> None:
        with self._changed:
            self.error = error
            self.done.set()
            self._changed.notify_all()


class Loader:
    """The loads of a consumer's worker; called by the engine's thread only."""

    def __init__(self, pools: Pools, peers: Peers, meter: Meter, *, timeout: float):
        self._pools, self._peers, self._meter, self._timeout = pools, peers, meter, timeout
        self._pool = ThreadPoolExecutor(THREADS, "kvlink-load")
        self._submit = self._pool.submit
        self._decliner = Decliner(peers, self._submit, timeout)
        self._device = PoolDevice(pools.tensors, peers.copier)
        self._loading: dict[str, CacheLoad] = {}
        self._spent: set[tuple[str, str]] = set()  # caches whose read was returned too late
        self._invalid: set[int] = set()
        self._failed: set[str] = set()

    def start(self, loads: Sequence[Load]) -> None:
        """Begin loads; does not block. Work that the engine queued before may use their blocks."""
        after = self._device.record() if loads else None
        pool, timeout = self._submit, self._timeout
        for load in loads:
            loading = CacheLoad(load, self._pools, self._peers, pool, timeout, after)
            self._loading[load.request_id] = loading
            if load.error:
                loading.fail(SchemaError(load.error))
            elif self._take_spent(load.url, load.key):
                loading.fail(TransferFailed("it was loaded by a request that was aborted"))
            else:
                if load.readers == 1:  # the read that was declined is needed again
                    self._decliner.withdraw(load.url, load.key)
                self._submit(loading.request)

    def wait_for_layer(self, layer: int) -> None:
        """Block until a layer of every synchronous load is in its blocks."""
        for loading in self._loading.values():
            if not loading.load.is_async:
                loading.wait_for_layer(layer)

    def wait_for_pass(self) -> set[int]:
        """Wait for the synchronous loads of the forward pass; return the invalid blocks so far.

        On a device: until all digests are checked; the copies may go on.
        """
        for loading in [each for each in self._loading.values() if not each.load.is_async]:
            loading.wait()
            self._end(loading)
        return self._invalid

    def finished(self) -> set[str]:
        """Requests whose asynchronous load has ended, with or without success."""
        self.wait_for_pass()
        for loading in self._loading.values():
            loading.expire()
        ended = [loading for loading in self._loading.values() if loading.done.is_set()]
        for loading in ended:
            self._end(loading)
        return {loading.load.request_id for loading in ended}

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that failed since the last call."""
        blocks, self._invalid = self._invalid, set()
        return blocks

    def take_failed(self) -> set[str]:
        """Requests whose asynchronous load failed since the last call.

        Only where blocks cannot say so: vLLM would compute a request again from its first invalid
        block on, and a window or a state before that block would not be there.
        """
        requests, self._failed = self._failed, set()
        return requests

    def cancel(self, cancelled: CancelledLoad) -> None:
        """Cancel a load, and tell the producer, unless another request takes the read."""
        self._meter.count("dropped")
        loading = self._loading.get(cancelled.request_id)
        if loading is not None:
            loading.cancel(cancelled)  # `_end` declines it
            if loading.has_used_read and not cancelled.declines:
                self._spent.add((cancelled.url, cancelled.key))
        elif cancelled.declines and not self._take_spent(cancelled.url, cancelled.key):
            self._decliner.decline(cancelled)

    def close(self) -> None:
        """Cancel all loads and close the links."""
        for loading in self._loading.values():
            load = loading.load
            cache, reason = (load.request_id, load.key, load.url), "the connector was shut down"
            loading.cancel(CancelledLoad(*cache, 0, reason, declines=True))
        self._decliner.close()
        self._peers.close()
        self._pool.shutdown()

    def _take_spent(self, url: str, key: str) -> bool:
        """Whether the read that a request was to take has been used."""
        is_spent = (url, key) in self._spent
        self._spent.discard((url, key))
        return is_spent

    def _end(self, loading: CacheLoad) -> None:
        """Count an ended load; the blocks of a failed one are invalid."""
        load, error = loading.load, loading.error
        del self._loading[load.request_id]
        if loading.link is not None:
            self._meter.copied(loading.link)
        if error is None:
            self._meter.count("received")
            self._meter.observe(
                wait_seconds=loading.wait_seconds,
                load_seconds=loading.copy_seconds,
                load_bytes=loading.nbytes,
            )
            return
        cancelled = loading.cancelled
        if cancelled is None and isinstance(error, TransferTimeout) and loading.is_requested:
            late = (load.request_id, load.key, load.url, load.readers)
            self._decliner.decline(CancelledLoad(*late, "its reader's time is over", declines=True))
        if cancelled is not None:
            if cancelled.declines and not loading.has_used_read:
                self._decliner.decline(cancelled)
            return
        if load.is_async and not self._pools.groups.is_single:
            self._failed.add(load.request_id)
        else:
            self._invalid |= self._pools.invalid(load)
        self._meter.count("load_failed")
        if isinstance(error, IntegrityError):
            self._meter.count("load_corrupt")
        text = f"{type(error).__name__}: {error}"
        log.error(
            "cache %.200r of request %.200r was not loaded: %s", load.key, load.request_id, text
        )
