"""The consumer's worker: loads caches into the engine's blocks, during or between passes."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.errors import (
    ClosedError,
    IntegrityError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.integrations.vllm.declining import Decliner
from omni_kvlink.integrations.vllm.device import PoolDevice
from omni_kvlink.integrations.vllm.pools import RELEASED, branch_name
from omni_kvlink.lowlevel import BackgroundGet, GetPhase, LayerTargets, LazyEvent, begin_get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from omni_kvlink import PagedTensor, ReceivedStream
    from omni_kvlink.integrations.vllm.peers import Peers
    from omni_kvlink.integrations.vllm.pools import Pools
    from omni_kvlink.integrations.vllm.stats import Meter
    from omni_kvlink.integrations.vllm.step import CancelledLoad, Load
    from omni_kvlink.lowlevel import CopyInto, StreamEvents

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Threads that copy caches; a cache that has not arrived yet occupies none."""

CONNECTING_THREADS = 16
"""Threads that wait for producers to be there: one that is gone delays no copy."""


MAX_COPY_SECONDS = 1e9
"""A time that every clock of the system accepts."""


class Target(NamedTuple):
    """The rows of a received branch that are written, and each layer's blocks for them."""

    branch: str
    views: list[PagedTensor]
    rows: range


class CacheLoad:
    """The load of a part of a cache: a pool thread requests it, none waits, one of them copies it.

    It ends within the loader's `timeout`. `failed` is called once, in any thread, with the error of
    a failed load. Blocks on a device are written behind the `events` that were recorded.
    """

    def __init__(
        self,
        loader: Loader,
        load: Load,
        pools: Pools,
        failed: Callable[[Exception], None],
        events: StreamEvents | None,
    ):
        self.load = dataclasses.replace(load, key=pools.part.key(load.key))
        self.error: Exception | None = None
        self.cancelled: CancelledLoad | None = None
        self.nbytes, self.wait_seconds, self.copy_seconds = 0, 0.0, 0.0
        self.done = LazyEvent()
        self._arrived = [LazyEvent() for _ in pools.layers]  # set at the end, too
        self._loader, self._pools, self._failed = loader, pools, failed
        self._lock = threading.Lock()  # of what ends the load
        self._started = self._began = time.monotonic()
        self._copies: CopyInto | None = None
        self._counts: list[int] = []  # of copies that fill a layer and those before it
        self._rank = pools.part.sender.index
        self.get = BackgroundGet(
            self.load.key,
            partial(loader.peers.link, load.url, rank=self._rank),
            partial(begin_get, streamed=True),
            loader.timeout,
            url=load.url,
            submit=loader.submit,
            copy=lambda copies: self.end(None),
            fail=self._end_failed,
            into=self._targets,
            copied=self._on_copied,
            after=events,
        )

    def request(self) -> None:
        """Request the part; does not block."""
        is_connected = self._loader.peers.is_connected(self.load.url, self._rank)
        submit = self._loader.submit if is_connected else self._loader.connect
        submit(self.get.request)

    @property
    def has_used_read(self) -> bool:
        """Whether the payload counts as read; else another request of this engine can take it."""
        return self.get.is_read

    def to_decline(self) -> CancelledLoad | None:
        """The read that this load leaves unused, and that no other request takes."""
        cancelled, is_late = self.cancelled, isinstance(self.error, TransferTimeout)
        if cancelled is not None:
            is_unused = cancelled.declines and not self.has_used_read
            return dataclasses.replace(cancelled, key=self.load.key) if is_unused else None
        is_unused = is_late and self.get.is_requested
        return self.load.cancelled("its reader's time is over") if is_unused else None

    def cancel(self, cancelled: CancelledLoad) -> None:
        """Cancel the load; a copy that has begun ends at the next layer."""
        self.cancelled = cancelled
        if self.get.cancel(leaves_unread=not cancelled.declines):
            self.end(TransferFailed(cancelled.reason, key=self.load.key))
            return
        is_copying = self.get.phase is GetPhase.STOPPED and not self.done.is_set()
        if is_copying and cancelled.declines and cancelled.readers == 1:
            self._loader.submit(self._abort)

    def wait_for_layer(self, layer: int) -> None:
        """Block until a layer is in its blocks, the load has ended, or its deadline has passed.

        On a device: until the layer is here, and its digests are checked; then the current stream
        waits for its copy, not the caller.
        """
        if not self._arrived[layer].wait(self.get.seconds_left()):
            self.wait()
        if self._copies is not None:
            first, stop = [0, *self._counts][layer : layer + 2]
            for copy in self._copies.ends[first:stop]:
                copy.make_streams_wait()

    def wait(self) -> None:
        """Block until the load has ended, at most until the deadline."""
        self.done.wait(self.get.seconds_left())
        self.get.expire()
        self.done.wait(MAX_COPY_SECONDS)  # a copy that has begun is not interrupted

    def _abort(self) -> None:
        """End a copy that waits for a layer, and the payload with it; runs in the pool."""
        assert self.cancelled is not None
        try:
            self.get.link.abort(self.load.key, self.cancelled.reason)
        except Exception as error:
            log.warning("cache %.200r could not be aborted: %s", self.load.key, str(error))

    def _targets(self, stream: ReceivedStream) -> list[LayerTargets]:
        """Return the blocks of each layer, in the order of the model."""
        self._began = time.monotonic()
        self.wait_seconds = self._began - self._started
        manifest = stream.manifest
        try:
            self._pools.check(manifest, self.load, peer=self.get.link.url)
        except Exception as error:
            stream.delivery.reject(str(error))  # the producer's receipt reports the reason
            raise
        self.nbytes = manifest.nbytes
        numbers = self._pools.received(manifest), self._pools.needed(self.load)
        targets = [
            [*self._targets_of(group, parts, needed)]
            for group, (parts, needed) in enumerate(zip(*numbers, strict=True))
        ]
        layers, counts = list[LayerTargets](), list[int]()
        for _, group, index in self._pools.layers:
            for branch, views, rows in targets[group]:
                layers.append(LayerTargets(branch, index, [views[index]], rows))
            counts.append(len(layers))
        self._counts = counts
        return layers

    def _on_copied(self, copies: CopyInto) -> None:
        """Let the pass go on to the layers that are there.

        TransferFailed if the connection broke when it had begun to: they are not written again.
        """
        if self._copies is not copies:
            if not self.load.is_async and any(arrived.is_set() for arrived in self._arrived):
                raise TransferFailed("the connection broke amid the load", key=self.load.key)
            self._copies = copies
        for count, arrived in zip(self._counts, self._arrived, strict=True):
            if count <= copies.count:
                arrived.set()
        if self.get.phase is GetPhase.CLAIMED and not self.load.is_async:
            self.end(None)  # the pass's stream waits for the copies

    def _end_failed(self, error: Exception) -> None:
        if self.done.is_set():
            log.error("cache %.200r was not written to the device: %s", self.load.key, error)
        if self.cancelled is not None and isinstance(error, ClosedError):
            error = TransferFailed(self.cancelled.reason, key=self.load.key)
        self.end(error)

    def _targets_of(
        self, group: int, parts: Mapping[str, range], needed: range
    ) -> Iterator[Target]:
        """The rows of the received parts of a group that are written, and their blocks."""
        for part, sent in parts.items():
            blocks = range(max(sent.start, needed.start), min(sent.stop, needed.stop))
            if blocks:
                views = self._pools.views(group, self._pools.block_ids(self.load, group, blocks))
                size = views[0].block_table.block_size  # rows of a block
                rows = range((blocks.start - sent.start) * size, (blocks.stop - sent.start) * size)
                yield Target(branch_name(group, part), views, rows)

    def end(self, error: Exception | None) -> None:
        """End the load, with the error of a failed one; the first call counts."""
        with self._lock:
            if self.done.is_set():
                return
            self.error, self.copy_seconds = error, time.monotonic() - self._began
            self.done.set()
        for arrived in self._arrived:
            arrived.set()
        failed, self._failed = self._failed, _ignore  # it refers to this object
        if error is not None:
            failed(error)


def _ignore(error: Exception) -> None:
    pass


class RankLoad:
    """The load of a cache by this rank, in parts: the first that fails ends the others.

    There is a part, and a `Pools`, for each rank of the producer that is read from.
    """

    def __init__(self, loader: Loader, load: Load, events: StreamEvents | None):
        self.load = load
        self.cancelled: CancelledLoad | None = None
        self.is_forgotten = False  # the request has ended: nothing more is said of it
        self._failure = load.cancelled("another part of the cache could not be loaded")
        self.parts = [
            CacheLoad(loader, load, part, self._cancel_others, events) for part in loader.pools
        ]

    @property
    def is_done(self) -> bool:
        """Whether all parts have ended."""
        return all(part.done.is_set() for part in self.parts)

    @property
    def error(self) -> Exception | None:
        """The error of the part that has failed, and not of those that it ended."""
        failed = [part for part in self.parts if part.cancelled is not self._failure]
        return next((part.error for part in failed if part.error is not None), None)

    @property
    def has_used_read(self) -> bool:
        """Whether a part was read."""
        return any(part.has_used_read for part in self.parts)

    def cancel(self, cancelled: CancelledLoad) -> None:
        """Cancel the load; a copy that has begun ends at the next layer."""
        self.cancelled = cancelled
        for part in self.parts:
            part.cancel(cancelled)

    def fail(self, reason: str) -> None:
        """Fail the load; a copy that has begun ends at the next layer. Its read is declined."""
        failure = self.load.cancelled(reason)
        for part in self.parts:
            if not part.done.is_set():
                part.cancel(failure)

    def _cancel_others(self, error: Exception) -> None:
        """A part has failed; runs in any thread."""
        for part in self.parts:
            if not part.done.is_set():
                part.cancel(self._failure)


class Loader:
    """The loads of a consumer's worker; called by the engine's thread only."""

    def __init__(self, pools: Sequence[Pools], peers: Peers, meter: Meter, *, timeout: float):
        self.peers, self.timeout, self._meter = peers, timeout, meter
        self._pool = ThreadPoolExecutor(THREADS, "kvlink-load")
        self._connecting_pool = ThreadPoolExecutor(CONNECTING_THREADS, "kvlink-connect")
        self.submit, self.connect = self._pool.submit, self._connecting_pool.submit
        self._decliner = Decliner(peers, self.connect, timeout)
        self._loading: dict[str, RankLoad] = {}
        self._ended: dict[str, bool] = {}  # whether a request's ended load has used its read
        self._spent: set[tuple[str, str]] = set()  # caches whose read was returned too late
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._failed_here: set[str] = set()
        self._finished: set[str] = set()
        self.use_pools(pools)

    def use_pools(self, pools: Sequence[Pools]) -> None:
        """Load caches into these pools from now on."""
        self.pools, self._is_released = pools, False
        self._device = PoolDevice(chain(*(part.tensors for part in pools)), self.peers.copier)

    def release_pools(self) -> None:
        """Keep no reference to the pools; blocks until no copy writes to them.

        The loads in progress fail, and so do those that `start` is given later. A second call does
        nothing.
        """
        for loading in self._loading.values():
            loading.fail(RELEASED)
        for part in chain(*(loading.parts for loading in self._loading.values())):
            part.wait()
        self._collect()
        self._pool.shutdown()  # the end of a copy may still be on its way there
        self._pool = ThreadPoolExecutor(THREADS, "kvlink-load")
        self.submit = self._pool.submit
        self.use_pools([pools.without_tensors() for pools in self.pools])
        self._is_released = True

    def start(self, loads: Sequence[Load]) -> None:
        """Begin loads; does not block. Work that the engine queued before may use their blocks."""
        events = self._device.record() if loads else None
        for load in loads:
            loading = self._loading[load.request_id] = RankLoad(self, load, events)
            error: Exception | None = SchemaError(load.error) if load.error else None
            if error is None and self._take_spent(load.url, load.key):
                error = TransferFailed("it was loaded by a request that was aborted")
            if error is None and self._is_released:
                loading.fail(RELEASED)
                continue
            for part in loading.parts:
                if error is not None:
                    part.end(error)
                    continue
                if load.readers == 1:  # the read that was declined is needed again
                    self._decliner.withdraw(load.url, part.load.key)
                part.request()

    def wait_for_layer(self, layer: int) -> None:
        """Block until a layer of every synchronous load is in its blocks."""
        for loading in self._loading.values():
            for part in loading.parts if not loading.load.is_async else ():
                part.wait_for_layer(layer)

    def wait_for_pass(self) -> set[int]:
        """Wait for the synchronous loads of the forward pass; return the invalid blocks so far.

        On a device: until all digests are checked; the copies may go on.
        """
        for loading in [each for each in self._loading.values() if not each.load.is_async]:
            for part in loading.parts:
                part.wait()
            self._end(loading)
        return self._invalid

    def finished(self) -> set[str]:
        """Requests whose asynchronous load has ended since the last call, also without success."""
        self._collect()
        finished, self._finished = self._finished, set()
        return finished

    def _collect(self) -> None:
        """End the loads that have nothing left to do."""
        self.wait_for_pass()
        for part in chain(*(loading.parts for loading in self._loading.values())):
            part.get.expire()
        ended = [loading for loading in self._loading.values() if loading.is_done]
        for loading in ended:
            self._end(loading)
            if not loading.is_forgotten:
                self._ended[loading.load.request_id] = loading.has_used_read
        self.peers.close_unused({loading.load.url for loading in self._loading.values()})
        self._finished |= {loading.load.request_id for loading in ended}

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
            for pools in self.pools:
                part = dataclasses.replace(cancelled, key=pools.part.key(cancelled.key))
                self._decliner.decline(part, pools.part.sender.index)

    def disconnect(self) -> None:
        """Close the links, from any thread: the loads fail, and producers know at once."""
        self.peers.close()

    def close(self) -> None:
        """Cancel all loads and close the links."""
        for loading in self._loading.values():
            unread = dataclasses.replace(loading.load, readers=0)  # nothing is aborted
            loading.cancel(unread.cancelled("the connector was shut down"))
        self._decliner.close()
        self.peers.close()
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
        self._meter.copied("received", self.peers.copier.device_copies())
        if error is None:
            self._meter.count("received")
            for part in loading.parts:
                self._meter.observe(
                    wait_seconds=part.wait_seconds,
                    load_seconds=part.copy_seconds,
                    load_bytes=part.nbytes,
                )
            return
        for part, pools in zip(loading.parts, self.pools, strict=True):
            if declined := part.to_decline():
                self._decliner.decline(declined, pools.part.sender.index)
        if loading.cancelled is not None:
            return
        self._failed_here.add(load.request_id)
        pools = self.pools[0]  # the blocks are the same ones for each part
        if load.is_async and not (pools.groups.is_whole and pools.groups.tables == 1):
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
