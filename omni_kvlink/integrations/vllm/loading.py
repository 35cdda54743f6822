"""The consumer's worker: caches into the engine's blocks, in step with a forward pass or not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from omni_kvlink.connectors.base import PendingGet
from omni_kvlink.errors import IntegrityError, TransferFailed
from omni_kvlink.integrations.vllm.payload import HEAD, LAST, Pools
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.stats import Meter
from omni_kvlink.integrations.vllm.step import Drop, Load
from omni_kvlink.link import KVLink, ReceivedStream
from omni_kvlink.payload.paged import BlockTable
from omni_kvlink.payload.views import write

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Caches that are copied at the same time. One that is only waited for holds no thread."""


class Loading:
    """One cache on its way in.

    Asked for in a thread of the pool, then waited for without one, then copied in one again.

    Args:
        submit: runs something in the pool.
        timeout: seconds until all of it must be there.
    """

    def __init__(
        self,
        load: Load,
        pools: Pools,
        peers: Peers,
        submit: Callable[[Callable[[], None]], Future[None]],
        *,
        timeout: float,
    ):
        self.load = load
        self.error: Exception | None = None
        self.over = threading.Event()
        self.nbytes, self.waited, self.copied = 0, 0.0, 0.0
        self._pools, self._peers, self._submit = pools, peers, submit
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._changed = threading.Condition()
        self._link: KVLink | None = None
        self._want: PendingGet | None = None
        self._is_taken = False
        self.stopped = ""
        self._layers = 0

    def ask(self) -> None:
        """In the pool."""
        try:
            self._link = self._peers.link(self.load.url, timeout=self._left())
            self._check_wanted()
            want = self._link.begin_get(self.load.key, timeout=self._left(), streamed=True)
        except Exception as error:
            self._end(error)
            return
        with self._changed:
            self._want = want
        if self.stopped:
            self.stop(self.stopped)
        else:
            want.future.add_done_callback(lambda future: self._take())

    def expire(self) -> None:
        """If its time is over, let it end."""
        if self._want is not None and self._left() <= 0:
            self._take()

    def stop(self, reason: str) -> None:
        """It is not needed any more; it ends soon."""
        self.stopped = reason
        if self._want is not None and self._claim():
            self._want.cancel()
            self._end(TransferFailed(reason, key=self.load.key))

    def wait_for_layer(self, layer: int) -> None:
        """Until a layer is in its blocks, or never will be; no longer than the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers > layer or self.over.is_set(), self._left())
        if self._layers <= layer:
            self.wait()

    def wait(self) -> None:
        """Until it ended; no longer than the deadline."""
        self.over.wait(self._left())
        self.expire()
        self.over.wait()  # a copy that has begun comes to an end

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _claim(self) -> bool:
        """Whoever is first deals with what comes of the want."""
        with self._changed:
            first, self._is_taken = not self._is_taken, True
        return first

    def _take(self) -> None:
        if self._claim():
            self._submit(self._run)

    def _check_wanted(self) -> None:
        if self.stopped:
            raise TransferFailed(self.stopped, key=self.load.key)

    def _run(self) -> None:
        """In the pool: the want was answered, or its time is over."""
        link, want = self._link, self._want
        assert link is not None
        assert want is not None
        began = time.monotonic()
        self.waited = began - self._started
        try:
            delivery = want.wait(timeout=0.0)
            timeout = self._left()
            with link.open_stream(delivery, started=time.perf_counter(), timeout=timeout) as stream:
                self._copy(stream, link.url)
        except Exception as error:
            self._end(error)
            return
        self.copied = time.monotonic() - began
        self._end(None)

    def _copy(self, stream: ReceivedStream, peer: str) -> None:
        """Layer by layer; every byte is compared with its digest in the pass that copies it."""
        try:
            self._pools.check(stream.manifest, self.load, peer=peer)
        except Exception as error:
            stream.delivery.reject(str(error))  # the producer's receipt names it, too
            raise
        self.nbytes = stream.manifest.nbytes
        targets = self._targets()
        for layer in range(len(self._pools.layers)):
            for branch, (blocks, skip) in targets.items():
                self._check_wanted()
                got = stream.wait_for_layer(layer, branch=branch, timeout=self._left())
                place = self._pools.place(layer, blocks)
                if not skip:
                    got.scatter(place)
                    continue
                scratch = torch.empty_like(got.key)  # a digest is of all blocks
                got.scatter(scratch)
                write(place, scratch[skip * self._pools.format.block_size :])
            with self._changed:
                self._layers = layer + 1
                self._changed.notify_all()
        stream.wait(timeout=self._left())  # committed: the producer finished it

    def _targets(self) -> dict[str, tuple[BlockTable, int]]:
        """By branch, the blocks to fill and how many leading ones are here already."""
        split, skip = self._pools.split(self.load), self.load.skip
        found = {}
        if len(split.get(HEAD, ())) > skip:
            found[HEAD] = (self._pools.pages(split[HEAD][skip:]), skip)
        if self.load.is_async:  # else the engine computes it, as after a local hit
            found[LAST] = (self._pools.pages(split[LAST]), 0)
        return found

    def _end(self, error: Exception | None) -> None:
        with self._changed:
            self.error = error
            self.over.set()
            self._changed.notify_all()


class Loader:
    """What a consumer's worker has under way; called by the engine's thread alone."""

    def __init__(self, pools: Pools, peers: Peers, meter: Meter, *, timeout: float):
        self._pools, self._peers, self._meter = pools, peers, meter
        self._timeout = timeout
        self._pool = ThreadPoolExecutor(THREADS, "kvlink-load")
        self._loading: dict[str, Loading] = {}
        self._invalid: set[int] = set()

    def start(self, loads: Sequence[Load]) -> None:
        """Ask for caches; returns at once."""
        for load in loads:
            loading = Loading(
                load, self._pools, self._peers, self._pool.submit, timeout=self._timeout
            )
            self._loading[load.request_id] = loading
            self._pool.submit(loading.ask)

    def wait_for_layer(self, layer: int) -> None:
        """Of what is loaded in step with this forward pass."""
        for loading in self._loading.values():
            if not loading.load.is_async:
                loading.wait_for_layer(layer)

    def end(self) -> set[int]:
        """The forward pass is over: blocks of its own loads that are not what they should be."""
        for request_id, loading in list(self._loading.items()):
            if not loading.load.is_async:
                loading.wait()
                del self._loading[request_id]
                self._settle(loading)
        return self._invalid

    def finished(self) -> set[str]:
        """Requests whose asynchronous load has ended, however; failed blocks go to `invalid`."""
        self.end()
        ended = set()
        for request_id, loading in list(self._loading.items()):
            loading.expire()
            if loading.over.is_set():
                del self._loading[request_id]
                self._settle(loading)
                ended.add(request_id)
        return ended

    def invalid(self) -> set[int]:
        """Blocks of loads that failed, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def drop(self, drop: Drop) -> None:
        """A cache is not wanted: stop loading it, and let its producer go on."""
        self._meter.count("dropped")
        loading = self._loading.get(drop.request_id)
        if loading is not None:
            loading.stop(drop.reason)
        if drop.readers == 1:  # other readers may want it still
            self._pool.submit(self._abort, drop)

    def close(self) -> None:
        for loading in self._loading.values():
            loading.stop("the connector was shut down")
        self._peers.close()
        self._pool.shutdown()

    def _abort(self, drop: Drop) -> None:
        try:
            self._peers.link(drop.url, timeout=self._timeout).abort(drop.key, drop.reason)
        except Exception as error:
            log.warning("cache %r was not given back: %s", drop.key, str(error))

    def _settle(self, loading: Loading) -> None:
        load, error = loading.load, loading.error
        if error is None:
            self._meter.count("received")
            self._meter.observe(
                wait_seconds=loading.waited,
                load_seconds=loading.copied,
                load_bytes=loading.nbytes,
            )
            return
        if loading.stopped:  # its request has ended, and nobody asks for these blocks
            return
        wanted = len(load.blocks) if load.is_async else self._pools.head(load)
        self._invalid.update(load.blocks[load.skip : wanted])
        self._meter.count("load_failed")
        if isinstance(error, IntegrityError):
            self._meter.count("load_corrupt")
        said = f"{type(error).__name__}: {error}"
        log.error("cache %r of request %s was not loaded: %s", load.key, load.request_id, said)
