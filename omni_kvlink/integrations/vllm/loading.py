"""The consumer's worker: loads caches into the engine's blocks, during or between passes."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.errors import IntegrityError, SchemaError, TransferFailed, TransferTimeout
from omni_kvlink.integrations.vllm.declining import Decliner
from omni_kvlink.integrations.vllm.device import PoolDevice
from omni_kvlink.integrations.vllm.pools import Pools, branch_name
from omni_kvlink.integrations.vllm.step import CancelledLoad
from omni_kvlink.lowlevel import BackgroundGet, GetPhase, begin_get, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink import PagedTensor, ReceivedStream
    from omni_kvlink.integrations.vllm.peers import Peers
    from omni_kvlink.integrations.vllm.stats import Meter
    from omni_kvlink.integrations.vllm.step import Load
    from omni_kvlink.lowlevel import Delivery, Manifest, StreamEvents

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Threads that copy caches; a cache that has not arrived yet occupies none."""

CONNECTING_THREADS = 16
"""Threads that wait for producers to be there: one that is gone delays no copy."""


class Target(NamedTuple):
    """The rows of a received branch that are written, and each layer's blocks for them."""

    branch: str
    views: list[PagedTensor]
    rows: range


class CacheLoad:
    """The load of a part of a cache: a pool thread requests it, none waits, one of them copies it.

    `submit` runs a function in the thread pool; the load ends within `timeout` seconds. `ended` is
    called once, in any thread, with the error of a failed load. Blocks on a device are written
    behind the `events` that were recorded.
    """

    def __init__(
        self,
        load: Load,
        pools: Pools,
        peers: Peers,
        submit: Callable[[Callable[[], None]], Future[None]],
        timeout: float,
        ended: Callable[[Exception | None], None],
        events: StreamEvents | None,
    ):
        self.load = dataclasses.replace(load, key=pools.part.key(load.key))
        self.error: Exception | None = None
        self.done = threading.Event()
        self.nbytes, self.wait_seconds, self.copy_seconds = 0, 0.0, 0.0
        self._pools, self._peers, self._submit, self._ended = pools, peers, submit, ended
        self._started = self._began = time.monotonic()
        self._changed = threading.Condition()
        self.cancelled: CancelledLoad | None = None
        self.has_used_read = False
        self._layers = 0
        self._events = events
        self._copies: list[list[StreamEvents]] = []  # by layer: the ends of copies on a device
        self.get = BackgroundGet(
            self.load.key,
            partial(peers.link, load.url, rank=pools.part.sender.index),
            partial(begin_get, streamed=True),
            timeout,
            url=load.url,
            submit=submit,
            copy=self._run,
            fail=self.end,
        )

    def request(self, connect: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Request the part; does not block. `connect` runs what may wait for a producer."""
        is_connected = self._peers.is_connected(self.load.url, self._pools.part.sender.index)
        submit = self._submit if is_connected else connect
        submit(self.get.request)

    def to_decline(self) -> CancelledLoad | None:
        """The read that this load leaves unused, and that no other request takes."""
        cancelled, is_late = self.cancelled, isinstance(self.error, TransferTimeout)
        if cancelled is not None:
            is_unused = cancelled.declines and not self.has_used_read
            return dataclasses.replace(cancelled, key=self.load.key) if is_unused else None
        if not (is_late and self.get.is_requested):
            return None
        cache = self.load.request_id, self.load.key, self.load.url, self.load.readers
        return CancelledLoad(*cache, "its reader's time is over", declines=True)

    def cancel(self, cancelled: CancelledLoad) -> None:
        """Cancel the load; a copy that has begun ends at the next layer."""
        with self._changed:
            self.cancelled = cancelled
        if self.get.cancel():
            self.end(TransferFailed(cancelled.reason, key=self.load.key))
            return
        is_copying = self.get.phase is GetPhase.TAKEN and not self.done.is_set()
        if is_copying and cancelled.declines and cancelled.readers == 1:
            self._submit(self._abort)

    def wait_for_layer(self, layer: int) -> None:
        """Block until a layer is in its blocks, the load has ended, or its deadline has passed.

        On a device: until the layer is here, and its digests are checked; then the current stream
        waits for its copy, not the caller.
        """
        limit = self.get.seconds_left()
        with self._changed:
            self._changed.wait_for(lambda: self._layers > layer or self.done.is_set(), limit)
        if self._layers <= layer:
            self.wait()
        for copy in self._copies[layer] if self._layers > layer else ():
            copy.make_streams_wait()

    def wait(self) -> None:
        """Block until the load has ended, at most until the deadline."""
        self.done.wait(self.get.seconds_left())
        self.get.expire()
        self.done.wait()  # a copy that has begun is not interrupted

    def _abort(self) -> None:
        """End a copy that waits for a layer, and the payload with it; runs in the pool."""
        assert self.cancelled is not None
        try:
            self.get.link.abort(self.load.key, self.cancelled.reason)
        except Exception as error:
            log.warning("cache %.200r could not be aborted: %s", self.load.key, str(error))

    def _check_cancelled(self) -> None:
        if self.cancelled is not None:
            raise TransferFailed(self.cancelled.reason, key=self.load.key)

    def _run(self, delivery: Delivery) -> None:
        """Copy the cache, which has begun to come; runs in the pool."""
        link, started = self.get.link, time.perf_counter()
        self._began = time.monotonic()
        self.wait_seconds = self._began - self._started
        limit = self.get.seconds_left()
        try:
            with open_stream(link, delivery, started=started, timeout=limit) as stream:
                try:
                    self._copy(stream, link.url)
                    if not self.load.is_async and self._use_read():
                        self.end(None)  # the pass's stream waits for the copies
                finally:
                    self._wait_for_copies()
                    if not (self.has_used_read or self._use_read()):
                        stream.release_unread()
                    elif self.cancelled is not None:
                        stream.release()  # declined: no other request of this engine reads it
        except Exception as error:
            # Their frames would keep the payload's memory, and so its lease.
            error.__traceback__ = error.__context__ = None
            if self.done.is_set():
                log.error("cache %.200r was not written to the device: %s", self.load.key, error)
            self.end(error)
            return
        self.end(None)

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
            copies: list[StreamEvents] = []
            self._copies.append(copies)
            for branch, views, rows in targets[group]:
                self._check_cancelled()
                limit = self.get.seconds_left()
                received = stream.wait_for_layer(index, branch=branch, timeout=limit)
                part = None if rows == range(received.key.shape[0]) else rows
                copies.append(received.begin_scatter(views[index], rows=part, after=self._events))
            with self._changed:
                self._layers = layer + 1
                self._changed.notify_all()
        stream.wait(timeout=self.get.seconds_left())  # until the commit

    def _targets(self, manifest: Manifest) -> list[list[Target]]:
        """The rows of the received branches that are written, and their blocks, for each group."""
        return [
            [
                target
                for part, sent in parts.items()
                if (target := self._target(group, part, sent, needed)) is not None
            ]
            for group, (parts, needed) in enumerate(
                zip(self._pools.received(manifest), self._pools.needed(self.load), strict=True)
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

    def end(self, error: Exception | None) -> None:
        """End the load, with the error of a failed one; the first call counts."""
        with self._changed:
            if self.done.is_set():
                return
            self.error, self.copy_seconds = error, time.monotonic() - self._began
            self.done.set()
            self._changed.notify_all()
        self._ended(error)


class RankLoad:
    """The load of a cache by this rank, in parts: the first that fails ends the others.

    There is a part, and a `Pools`, for each rank of the producer that is read from.
    """

    def __init__(
        self,
        load: Load,
        pools: Sequence[Pools],
        peers: Peers,
        submit: Callable[[Callable[[], None]], Future[None]],
        timeout: float,
        events: StreamEvents | None,
    ):
        self.load = load
        self.error: Exception | None = None
        self.cancelled: CancelledLoad | None = None
        self.is_forgotten = False  # the request has ended: nothing more is said of it
        self.done = threading.Event()
        self._submit, self._lock, self._missing = submit, threading.Lock(), len(pools)
        self.parts = [
            CacheLoad(load, part, peers, submit, timeout, self._end, events) for part in pools
        ]

    @property
    def has_used_read(self) -> bool:
        """Whether a part was read."""
        return any(part.has_used_read for part in self.parts)

    def request(self, connect: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Request all parts; does not block. `connect` runs what may wait for a producer."""
        for part in self.parts:
            part.request(connect)

    def fail(self, error: Exception) -> None:
        """End a load that is not attempted."""
        for part in self.parts:
            part.end(error)

    def cancel(self, cancelled: CancelledLoad) -> None:
        """Cancel the load; a copy that has begun ends at the next layer."""
        self.cancelled = cancelled
        for part in self.parts:
            part.cancel(cancelled)

    def expire(self) -> None:
        """End the load if its deadline has passed."""
        for part in self.parts:
            part.get.expire()

    def wait_for_layer(self, layer: int) -> None:
        """Block until a layer is in its blocks, the load has ended, or its deadline has passed."""
        for part in self.parts:
            part.wait_for_layer(layer)

    def wait(self) -> None:
        """Block until the load has ended, at most until the deadline."""
        for part in self.parts:
            part.wait()
        self.done.wait()

    def _end(self, error: Exception | None) -> None:
        """A part has ended; runs in any thread."""
        with self._lock:
            is_first = error is not None and self.error is None
            self.error = self.error or error
            self._missing -= 1
            is_last = not self._missing
        if is_last:
            self.done.set()
        elif is_first:
            cache = self.load.request_id, self.load.key, self.load.url, self.load.readers
            reason = "another part of the cache could not be loaded"
            for part in self.parts:
                if not part.done.is_set():
                    part.cancel(CancelledLoad(*cache, reason, declines=True))


class Loader:
    """The loads of a consumer's worker; called by the engine's thread only."""

    def __init__(self, pools: Sequence[Pools], peers: Peers, meter: Meter, *, timeout: float):
        self._pools, self._peers, self._meter, self._timeout = pools, peers, meter, timeout
        self._pool = ThreadPoolExecutor(THREADS, "kvlink-load")
        self._connecting_pool = ThreadPoolExecutor(CONNECTING_THREADS, "kvlink-connect")
        self._submit = self._pool.submit
        self._decliner = Decliner(peers, self._connecting_pool.submit, timeout)
        self._device = PoolDevice(
            [tensor for part in pools for tensor in part.tensors], peers.copier
        )
        self._loading: dict[str, RankLoad] = {}
        self._ended: dict[str, bool] = {}  # whether a request's ended load has used its read
        self._spent: set[tuple[str, str]] = set()  # caches whose read was returned too late
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._failed_here: set[str] = set()

    def start(self, loads: Sequence[Load]) -> None:
        """Begin loads; does not block. Work that the engine queued before may use their blocks."""
        events = self._device.record() if loads else None
        submit, timeout = self._submit, self._timeout
        for load in loads:
            loading = RankLoad(load, self._pools, self._peers, submit, timeout, events)
            self._loading[load.request_id] = loading
            if load.error:
                loading.fail(SchemaError(load.error))
            elif self._take_spent(load.url, load.key):
                loading.fail(TransferFailed("it was loaded by a request that was aborted"))
            else:
                if load.readers == 1:  # the read that was declined is needed again
                    for part in loading.parts:
                        self._decliner.withdraw(load.url, part.load.key)
                loading.request(self._connecting_pool.submit)

    def wait_for_layer(self, layer: int) -> None:
        """Block until a layer of every synchronous load is in its blocks."""
        for loading in self._loading.values():
            if not loading.load.is_async:
                loading.wait_for_layer(layer)

    def wait_for_pass(self) -> set[int]:
        """Wait for the synchronous loads of the forward pass; return the invalid blocks so far.

        On a device: until all digests are checked; the copies may go on.
        """
        for loading in [part for part in self._loading.values() if not part.load.is_async]:
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
            if not loading.is_forgotten:
                self._ended[loading.load.request_id] = loading.has_used_read
        self._peers.close_unused({loading.load.url for loading in self._loading.values()})
        return {loading.load.request_id for loading in ended}

    def forget(self, request_ids: set[str]) -> None:
        """Forget requests that have ended: nothing more is said of them."""
        for name in request_ids:
            self._ended.pop(name, None)
            if name in self._loading:
                self._loading[name].is_forgotten = True

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

    def take_failed_here(self) -> frozenset[str]:
        """Requests whose load failed on this rank since the last call, for the other ranks."""
        requests, self._failed_here = frozenset(self._failed_here), set()
        return requests

    def cancel(self, cancelled: CancelledLoad) -> None:
        """Cancel a load, and tell the producer, unless another request takes the read.

        Of several ranks some may have ended the load already.
        """
        name, cache = cancelled.request_id, (cancelled.url, cancelled.key)
        if name in self._ended:
            if self._ended[name] and not cancelled.declines:
                self._spent.add(cache)
            return
        self._meter.count("dropped")
        loading = self._loading.get(name)
        if loading is not None:
            loading.cancel(cancelled)  # `_end` declines it
            if loading.has_used_read and not cancelled.declines:
                self._spent.add(cache)
        elif cancelled.declines and not self._take_spent(*cache):
            for pools in self._pools:
                part = dataclasses.replace(cancelled, key=pools.part.key(cancelled.key))
                self._decliner.decline(part, pools.part.sender.index)

    def disconnect(self) -> None:
        """Close the links, from any thread: the loads fail, and producers know at once."""
        self._peers.close()

    def close(self) -> None:
        """Cancel all loads and close the links."""
        for loading in self._loading.values():
            load = loading.load
            cache, reason = (load.request_id, load.key, load.url), "the connector was shut down"
            loading.cancel(CancelledLoad(*cache, 0, reason, declines=True))
        self._decliner.close()
        self._peers.close()
        self._connecting_pool.shutdown()
        self._pool.shutdown()

    def _take_spent(self, url: str, key: str) -> bool:
        """Whether the read that a request was to take has been used."""
        is_spent = (url, key) in self._spent
        self._spent.discard((url, key))
        return is_spent

    def _end(self, loading: RankLoad) -> None:
        """Count an ended load; the blocks of a failed one are invalid."""
        load, error = loading.load, loading.error
        del self._loading[load.request_id]
        self._meter.copied("received", self._peers.copier.device_copies())
        if error is None:
            self._meter.count("received")
            for part in loading.parts:
                self._meter.observe(
                    wait_seconds=part.wait_seconds,
                    load_seconds=part.copy_seconds,
                    load_bytes=part.nbytes,
                )
            return
        for part, pools in zip(loading.parts, self._pools, strict=True):
            if declined := part.to_decline():
                self._decliner.decline(declined, pools.part.sender.index)
        if loading.cancelled is not None:
            return
        self._failed_here.add(load.request_id)
        pools = self._pools[0]  # the blocks are the same ones for each part
        if load.is_async and not pools.groups.is_single:
            self._failed.add(load.request_id)
        else:
            self._invalid |= pools.invalid(load)
        self._meter.count("load_failed")
        if isinstance(error, IntegrityError):
            self._meter.count("load_corrupt")
        text = f"{type(error).__name__}: {error}"
        log.error(
            "cache %.200r of request %.200r was not loaded: %s", load.key, load.request_id, text
        )
