"""Loads encoder outputs from their producers; the scheduler never waits."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import KVLinkError, SchemaError, TransferTimeout, format_seconds
from omni_kvlink.integrations.vllm.encoder.identity import ExpectedOutput, check_output
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.lowlevel import PendingGet, begin_get, open_delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omni_kvlink import KVConsumer
    from omni_kvlink.integrations.vllm.encoder.params import Source
    from omni_kvlink.integrations.vllm.encoder.settings import EncoderSettings

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Threads of each producer's loads: a producer that does not answer holds up its own only."""


class OutputLoad:
    """The load of one encoder output: a pool thread requests it, none waits, one copies it.

    When `is_done`, it has a `tensor` in memory of its own, or an `error`.
    """

    def __init__(self, loader: EncoderLoader, source: Source, expected: ExpectedOutput):
        self.source, self.expected = source, expected
        self.tensor: torch.Tensor | None = None
        self.error = ""
        self._loader, self._deadline = loader, time.monotonic() + loader.timeout
        self._done, self._lock = threading.Event(), threading.Lock()
        self._link: KVConsumer | None = None
        self._pending: PendingGet | None = None
        self._is_claimed = False

    def is_done(self) -> bool:
        """Whether it has ended; does not block. Ends it if its deadline has passed."""
        if self._left() <= 0 and not self._done.is_set():
            self._expire()
        return self._done.is_set()

    def cancel(self) -> bool:
        """Withdraw the request; False if the output was copied, or is being copied."""
        is_first = self._claim()
        if is_first and self._pending is not None:
            self._pending.cancel()
        return is_first

    def fail(self, error: Exception) -> None:
        """End the load without an output."""
        if not isinstance(error, KVLinkError):
            log.error("encoder output %.200r", self.expected.item, exc_info=error)
        self.error = f"{type(error).__name__}: {error}"
        self._done.set()

    def request(self) -> None:
        """Request the output; blocks while it connects."""
        try:
            link = self._loader.peers.link(self.source.url, timeout=self._left())
            pending = begin_get(link, self.source.key, timeout=self._left())
        except Exception as error:
            if self._claim():
                self.fail(error)
            return
        with self._lock:
            self._link, self._pending = link, pending
            is_cancelled = self._is_claimed
        if is_cancelled:
            pending.cancel()
        else:
            pending.future.add_done_callback(lambda _: self._begin_copy())

    def _expire(self) -> None:
        with self._lock:
            is_connecting = self._pending is None and not self._is_claimed
            self._is_claimed = self._is_claimed or is_connecting
        if is_connecting:  # `request` finds the claim, and cancels its get
            url, waited = self.source.url or self._loader.default_url, self._loader.timeout
            text = f"the producer {url} was not reached within {format_seconds(waited)}"
            self.fail(TransferTimeout(text, key=self.source.key, waited=waited))
        else:
            self._begin_copy()

    def _begin_copy(self) -> None:
        if self._pending is not None and self._claim():
            self._loader.submit(self.source, self._copy)

    def _claim(self) -> bool:
        """Whether the caller is the first, and so the one, to end the request."""
        with self._lock:
            first, self._is_claimed = not self._is_claimed, True
        return first

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _copy(self) -> None:
        """Copy the output, which is there, or the deadline has passed."""
        assert self._pending is not None
        assert self._link is not None
        try:
            delivery, started = self._pending.wait(timeout=0.0), time.perf_counter()
            received = open_delivery(self._link, delivery, started=started)
            with received as data:
                identity, peer = self._loader.identity, self._link.url
                found = check_output(data, self.expected, identity, peer=peer)
                tensor = torch.empty(found.shape, dtype=found.dtype)
                received.scatter([tensor])  # the same pass checks each byte against its digest
        except Exception as error:
            self.fail(error)
            self._loader.decline(self.source)  # it will not be loaded again
            return
        self.tensor = tensor
        self._done.set()


class EncoderLoader:
    """The links of a consumer to its producers, and the threads that connect and copy."""

    def __init__(self, settings: EncoderSettings, identity: Mapping[str, str]):
        self.peers = Peers(settings.peers, settings.connect)
        self.identity, self.timeout = identity, settings.timeout
        self.default_url = settings.peers[0]
        self._pools = {url: ThreadPoolExecutor(THREADS, "kvlink-ec") for url in settings.peers}

    def load(self, source: Source, expected: ExpectedOutput, error: str = "") -> OutputLoad:
        """Begin a load, which ends within the settings' `timeout`; never raises.

        With an `error`, a reason not to attempt it, it has ended.
        """
        load, url = OutputLoad(self, source, expected), source.url or self.default_url
        error = error or source.error
        if not error and url not in self._pools:
            known = ", ".join(self._pools)
            error = f"url is {url!r:.200}, which is not one of this engine's peers: {known}"
        if error:
            load.fail(SchemaError(error))
        else:
            self.submit(source, load.request)
        return load

    def decline(self, source: Source) -> None:
        """Free an output that is not needed, if it has no other reader; does not block."""
        is_valid = not source.error and (source.url or self.default_url) in self._pools
        if is_valid and source.readers == 1:
            self.submit(source, lambda: self._abort(source))

    def submit(self, source: Source, call: Callable[[], None]) -> None:
        """Run a call in a thread of the source's producer."""
        self._pools[source.url or self.default_url].submit(call)

    def close(self) -> None:
        """End all loads with an error, and close the links."""
        self.peers.close()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _abort(self, source: Source) -> None:
        try:
            link = self.peers.link(source.url, timeout=self.timeout)
            link.abort(source.key, "its reader does not need it any more")
        except Exception as error:  # its producer is gone, or frees it when its ttl has passed
            log.debug("encoder output %.200r was not aborted: %s", source.key, error)
